"""Layers between sharded ones: norms and dropout on sequence shards, and replicated layers that feed sharded ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.features import check_norm
from commlib.tensor_parallel.styles import Replicate, Sequence
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._trial_run import preserve_model
from commlib_torch.tensor._comparison import note_input
from commlib_torch.tensor.moves import copy
from commlib_torch.tensor.streams import divided

_MIXING = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
"""Layers, possibly without weights, whose outputs depend on several positions of a sequence."""


class _SequenceNorm(nn.Module):
    """A norm on a sequence shard."""

    normalized_shape: tuple[int, ...]

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return no shardings: weights are replicated. Raises UsageError for a dimension that the norm reduces over."""
        _check_features(what, self.normalized_shape, style.dim)
        return {}

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Replace a plain layer: it then takes sequence shards."""
        self.axis, self.style = axis, style


class SequenceLayerNorm(_SequenceNorm, nn.LayerNorm):
    """A LayerNorm on a sequence shard: weights are replicated, and the ranks' gradients are summed.

    Arguments are those of `nn.LayerNorm`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of a shard."""
        _check_features(type(self).__name__, self.normalized_shape, self.style.dim, x.dim())
        weight, bias = _copy_parameters(self.axis, self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SequenceRMSNorm(_SequenceNorm, nn.RMSNorm):
    """An RMSNorm on a sequence shard: weights are replicated, and the ranks' gradients are summed.

    Arguments are those of `nn.RMSNorm`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of a shard."""
        _check_features(type(self).__name__, self.normalized_shape, self.style.dim, x.dim())
        weight, _ = _copy_parameters(self.axis, self.weight, None)
        return F.rms_norm(x, list(self.normalized_shape), weight, self.eps)


class ShardwiseLayer(nn.Module):
    """A layer without weights, such as dropout, that draws different random numbers on each rank in training."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return no shardings: there are no weights. Raises UsageError for a layer that mixes positions."""
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        if names or isinstance(self, _MIXING):
            why = f"has {', '.join(names)}" if names else "mixes positions of a sequence"
            raise UsageError(
                f"plan: {what} {why}: Sequence is for LayerNorm, RMSNorm, and layers without weights or statistics "
                "that process each position separately"
            )
        return {}

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Replace a plain layer: it then takes shards."""
        self.axis, self.style = axis, style

    @disable_compile
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output for a shard."""
        if not self.training:
            return super().forward(*args, **kwargs)
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        with divided(self.axis, "cpu" if given is None else given.device):
            return super().forward(*args, **kwargs)


class RowWiseNorm(nn.Module):
    """A layer that processes each row separately, such as a model's custom norm: weights are replicated."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return no shardings: weights are replicated."""
        return {}

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Replace a plain layer: it then takes shards, and the ranks' gradients of weights are summed."""
        self.axis, self.style = axis, style

    @disable_compile
    def forward(self, x: Tensor) -> Any:
        """Return the layer's output for a shard."""
        own = self._parameters
        try:
            self._parameters = {
                name: None if one is None else copy(one, self.axis)  # type: ignore[misc]  # for the forward alone
                for name, one in own.items()
            }
            return super().forward(x)
        finally:
            self._parameters = own


def is_row_wise(module: nn.Module) -> bool:
    """Return, by trial, whether a layer has weights for the last dimension only, and processes each row separately."""
    weights = list(module.parameters())
    width = weights[0].shape[-1] if weights and weights[0].dim() == 1 else 0
    if any(True for _ in (*module.children(), *module.buffers())) or any(one.shape != (width,) for one in weights):
        return False
    if not width or weights[0].is_meta or module._forward_hooks or module._forward_pre_hooks:
        return False
    with preserve_model(module), torch.no_grad():
        answers = {_treats_rows(module, torch.randn(*rows, width).to(weights[0])) for rows in ((2, 3, 4), (3, 4), (3,))}
    return answers - {None} == {True}


def _treats_rows(module: nn.Module, x: Tensor) -> bool | None:
    """Return whether a layer's results for rows are the same alone and together; None if it rejects such inputs."""
    try:
        whole = module(x)
        parts = [(module(x.narrow(dim, 1, 1)), whole.narrow(dim, 1, 1)) for dim in range(x.dim() - 1)]
        return all(torch.allclose(own, part, rtol=1e-2, atol=1e-3) for own, part in parts)
    except Exception:
        return None


class ReplicatedLayer(nn.Module):
    """A replicated layer whose output feeds sharded layers: the ranks' gradients of the output are summed."""

    def shardings(self, what: str, style: Replicate) -> dict[str, Sharding]:
        """Return no shardings: weights are replicated."""
        return {}

    def become(self, what: str, axis: ParallelAxis, style: Replicate) -> None:
        """Replace a plain layer: gradients of its output are then summed."""
        self.axis, self.style, self.layer_name = axis, style, what

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        return _sum_gradients(super().forward(*args, **kwargs), self)


@cache
def subclass_around(kind: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `plain` with the forward of `kind` around its own."""
    return type(f"{kind.__name__}{plain.__name__}", (kind, plain), {"__doc__": plain.__doc__})


def _sum_gradients(output: Any, layer: ReplicatedLayer) -> Any:
    if isinstance(output, Tensor):
        note_input(layer, output, "the output")
        return copy(output, layer.axis) if output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: _sum_gradients(value, layer) for key, value in output.items()}
    if isinstance(output, list | tuple) and type(output) in (list, tuple):
        return type(output)(_sum_gradients(value, layer) for value in output)
    if output is None:
        return None
    raise UsageError(
        f"Replicate(into_sharded=True): a layer returned a {type(output).__name__}, expected tensors, alone or in "
        "tuples, lists and dicts: call commlib_torch.tensor.copy on its tensors yourself"
    )


def _copy_parameters(
    axis: ParallelAxis, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return both unchanged; their gradients are summed in one small reduction."""
    if axis.size == 1 or weight is None:
        return weight, bias
    if bias is None:
        return copy(weight, axis), None
    both = copy(torch.stack((weight, bias)), axis)
    return both[0], both[1]


def _check_features(what: str, features: tuple[int, ...], dim: int, dims: int | None = None) -> None:
    """Raise UsageError if the sharded dimension is one of those that a norm reduces over.

    A dimension counted from the front is unknown before the first input, whose number of dimensions is `dims`.
    """
    place = dim if dims is None or dim < 0 else min(dim - dims, -1)
    check_norm(what, place, range(-len(features), 0))
