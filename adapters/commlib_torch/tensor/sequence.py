"""Layers between divided ones: norms and dropout on shards, and whole layers whose output goes into divided ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.styles import Replicate, Sequence
from commlib_torch._uncompiled import uncompiled
from commlib_torch._unnoticed import unnoticed
from commlib_torch.tensor._alike import given
from commlib_torch.tensor.moves import copy
from commlib_torch.tensor.streams import divided

_MIXING = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
"""Layers without weights, perhaps, whose outputs depend on several positions of a sequence."""


class SequenceLayerNorm(nn.LayerNorm):
    """A LayerNorm of a shard of a sequence: weights are whole, and the ranks' parts of their gradient are added."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return how its weights are divided: none is. Raises UsageError for a dimension that the norm looks at."""
        _check_features(what, self.normalized_shape, style.dim)
        return {}

    def become(self, what: str, axis: Axis, style: Sequence) -> None:
        """Take shards instead of whole sequences."""
        self.axis, self.style = axis, style

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of a shard."""
        _check_features(type(self).__name__, self.normalized_shape, self.style.dim, x.dim())
        weight, bias = _copied(self.axis, self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SequenceRMSNorm(nn.RMSNorm):
    """An RMSNorm of a shard of a sequence: weights are whole, and the ranks' parts of their gradient are added."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return how its weights are divided: none is. Raises UsageError for a dimension that the norm looks at."""
        _check_features(what, self.normalized_shape, style.dim)
        return {}

    def become(self, what: str, axis: Axis, style: Sequence) -> None:
        """Take shards instead of whole sequences."""
        self.axis, self.style = axis, style

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of a shard."""
        _check_features(type(self).__name__, self.normalized_shape, self.style.dim, x.dim())
        weight, _ = _copied(self.axis, self.weight, None)
        return F.rms_norm(x, list(self.normalized_shape), weight, self.eps)


class OnShards(nn.Module):
    """A layer without weights, such as dropout, that draws other random numbers on each rank in training."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return how its weights are divided: none is. Raises UsageError for a layer that sees several positions."""
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        if names or isinstance(self, _MIXING):
            why = f"has {', '.join(names)}" if names else "looks at a whole sequence"
            raise UsageError(
                f"plan: {what} {why}: Sequence is for LayerNorm, RMSNorm, and layers without weights or statistics "
                "that look at each position by itself"
            )
        return {}

    def become(self, what: str, axis: Axis, style: Sequence) -> None:
        """Take shards instead of whole tensors."""
        self.axis, self.style = axis, style

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer makes of a shard."""
        if not self.training:
            return super().forward(*args, **kwargs)
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        with divided(self.axis, "cpu" if given is None else given.device):
            return super().forward(*args, **kwargs)


class OwnNorm(nn.Module):
    """A layer that treats each row by itself, as norms that a model has written do: weights are whole."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return how its weights are divided: none is."""
        return {}

    def become(self, what: str, axis: Axis, style: Sequence) -> None:
        """Take shards instead of whole tensors, and add up the ranks' parts of the gradients of weights."""
        self.axis, self.style = axis, style

    @uncompiled
    def forward(self, x: Tensor) -> Any:
        """Return what the layer makes of a shard."""
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
    """Return whether a layer has weights for the last dimension alone, and treats each row by itself, as tried."""
    weights = list(module.parameters())
    width = weights[0].shape[-1] if weights and weights[0].dim() == 1 else 0
    if any(True for _ in (*module.children(), *module.buffers())) or any(one.shape != (width,) for one in weights):
        return False
    if not width or weights[0].is_meta or module._forward_hooks or module._forward_pre_hooks:
        return False
    with unnoticed(module), torch.no_grad():
        found = {_treats_rows(module, torch.randn(*rows, width).to(weights[0])) for rows in ((2, 3, 4), (3, 4), (3,))}
    return found - {None} == {True}


def _treats_rows(module: nn.Module, x: Tensor) -> bool | None:
    """Return whether a layer makes the same of rows, alone and among others; None if it takes no input like this."""
    try:
        whole = module(x)
        parts = [(module(x.narrow(dim, 1, 1)), whole.narrow(dim, 1, 1)) for dim in range(x.dim() - 1)]
        return all(torch.allclose(own, part, rtol=1e-2, atol=1e-3) for own, part in parts)
    except Exception:
        return None


class IntoSharded(nn.Module):
    """A whole layer whose output is used by what is divided: the ranks' parts of its gradient are added."""

    def shardings(self, what: str, style: Replicate) -> dict[str, Sharding]:
        """Return how its weights are divided: none is."""
        return {}

    def become(self, what: str, axis: Axis, style: Replicate) -> None:
        """Add the gradients of the output."""
        self.axis, self.style, self.layer_name = axis, style, what

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer gives."""
        return _into_sharded(super().forward(*args, **kwargs), self)


@cache
def mixed(kind: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules that are `plain`, with the forward of `kind` around theirs."""
    return type(f"{kind.__name__}{plain.__name__}", (kind, plain), {"__doc__": plain.__doc__})


def _into_sharded(found: Any, layer: IntoSharded) -> Any:
    if isinstance(found, Tensor):
        given(layer, found, "the output")
        return copy(found, layer.axis) if found.is_floating_point() else found
    if isinstance(found, dict):
        return {key: _into_sharded(value, layer) for key, value in found.items()}
    if isinstance(found, list | tuple) and type(found) in (list, tuple):
        return type(found)(_into_sharded(value, layer) for value in found)
    if found is None:
        return None
    raise UsageError(
        f"Replicate(into_sharded=True): a layer gave a {type(found).__name__}, expected tensors, alone or in tuples, "
        "lists and dicts: call commlib_torch.tensor.copy on its tensors yourself"
    )


def _copied(axis: Axis, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return both as they are; their gradients are added up by one small reduction."""
    if axis.size == 1 or weight is None:
        return weight, bias
    if bias is None:
        return copy(weight, axis), None
    both = copy(torch.stack((weight, bias)), axis)
    return both[0], both[1]


def _check_features(what: str, features: tuple[int, ...], dim: int, dims: int | None = None) -> None:
    """Raise UsageError if the dimension that is divided is one of those that a norm looks at as a whole."""
    if dim >= 0 and dims is None:
        return  # until there is an input
    if (dim if dims is None or dim < 0 else dim - dims) >= -len(features):
        raise UsageError(
            f"{what}: Sequence(dim={dim}), but this is a norm over the last {len(features)} dimensions, and would see "
            "a part of them: gather the features first"
        )
