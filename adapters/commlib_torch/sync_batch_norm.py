"""Batch normalisation over the joint batch of all ranks: see `commlib.horovod.batch_norm`.

Statistics are computed in float32 or better, and combined in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from commlib import horovod as core
from commlib.errors import UsageError
from commlib.horovod.batch_norm import check_several, compare_layer, gather_statistics, next_layer, running_factors
from commlib_torch._bridge import device_kind, host_array, to_tensor
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._readiness import check_module
from commlib_torch._shards import shards_of
from commlib_torch.named_verbs._named_operations import ProcessSets, Reduction, first, start_allreduce


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm with training statistics over the batches of all ranks. Works on any device.

    Takes inputs of 2 or more dimensions, channels in dimension 1, as nn.SyncBatchNorm does. Batches may differ among
    ranks in all other dimensions, and may be empty; every rank must call it, forward and backward. Operations are named
    by a counter, so ranks must make their layers in the same order. `process_set` is the group of ranks that share a
    batch.

    Args:
        num_features: The number of channels.
        eps: Added to the variance.
        momentum: The weight of a new batch in the running statistics; None: a cumulative average.
        affine: Whether there are a weight and a bias.
        track_running_stats: Whether running statistics are kept.
        process_set: The ranks that share a batch; None: all.
        device: The device of its parameters.
        dtype: The dtype of its parameters.

    Raises:
        MismatchError: On every rank if options differ among ranks.
        ValueError: If there is only one value per channel on all ranks together.

    Examples:
        >>> norm = ct.SyncBatchNorm(3)
        >>> norm(torch.ones(4 + comm.rank, 3)).shape[1]
        3
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSets = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._process_set = process_set
        self._number = next_layer(process_set)
        self._is_compared = False

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` by statistics of all ranks' inputs; in evaluation work like nn.BatchNorm, locally."""
        process_set = core.process_set_of(self._process_set)
        if not self.training or process_set.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got {input.size(1)}")
        if not self._is_compared:
            self._compare(process_set)
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, f"SyncBatchNorm.{self._number}", process_set
        )
        if self.track_running_stats:
            self._track(mean, variance, int(count))
        return output  # type: ignore[no-any-return]

    @disable_compile
    def _compare(self, process_set: core.ProcessSet) -> None:
        """Compare the options of all ranks. Collective, at the first use."""
        names = ("num_features", "eps", "momentum", "affine", "track_running_stats")
        compare_layer(f"SyncBatchNorm.{self._number}", process_set, {name: getattr(self, name) for name in names})
        self._is_compared = True

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        share, unbiasing = running_factors(self.momentum, self.num_batches_tracked, count)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * unbiasing).to(self.running_var.dtype), share)

    @property
    def ranks(self) -> list[int]:
        """The global ranks that share a batch."""
        return list(core.process_set_of(self._process_set).ranks or [])

    def extra_repr(self) -> str:
        """Describe the layer, as torch does."""
        described: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return described if self._process_set is None else f"{described}, process_set={self._process_set}"

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copy the layer. The copy shares the process set, which cannot be copied."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._process_set)] = self._process_set
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


def convert_sync_batchnorm(module: nn.Module, process_set: ProcessSets = None) -> nn.Module:
    """Replace every nn.BatchNorm in `module` by a SyncBatchNorm with equal parameters and statistics; return `module`.

    `module` is changed in place, unless it is an nn.BatchNorm. Optimizers continue to work: parameters are the same
    objects.

    Args:
        module: The module, changed in place, unless it is an nn.BatchNorm.
        process_set: The participating ranks; None: all.

    Raises:
        UsageError: For a norm that is sharded by features: other ranks have other features.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> type(ct.convert_sync_batchnorm(model)[1]).__name__
        'SyncBatchNorm'
    """
    check_module("convert_sync_batchnorm", module)
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        if shards := shards_of(module):
            axis = next(iter(shards.values())).axis
            raise UsageError(
                f"convert_sync_batchnorm: a {type(module).__name__} on rank {axis.rank} of {axis.comm.name} is "
                "sharded by features, and other ranks have other features: convert it before the model is sharded, "
                "where it stays unsharded"
            )
        layer = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_set
        )
        layer.weight, layer.bias = module.weight, module.bias
        layer.running_mean, layer.running_var = module.running_mean, module.running_var
        layer.num_batches_tracked = module.num_batches_tracked
        result = layer.train(module.training)
    for name, child in module.named_children():
        converted = convert_sync_batchnorm(child, process_set)
        if converted is not child:
            result.add_module(name, converted)
    return result


class _Normalise(torch.autograd.Function):
    """Returns (output, mean, biased variance, count) of all ranks; the output is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        name: str,
        process_set: core.ProcessSet,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        mean, variance, count = _statistics(x.to(_working_dtype(x)), f"{name}.forward", process_set)
        centred, inverse = _centred(x, mean), _inverse(x, variance, eps)
        output = centred * _wide(inverse if weight is None else inverse * weight, x)
        if bias is not None:
            output += _wide(bias, x)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.bias, ctx.eps, ctx.count, ctx.name, ctx.process_set = bias is not None, eps, count, name, process_set
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        gradient = gradient.to(_working_dtype(x))
        centred, inverse = _centred(x, mean), _inverse(x, variance, ctx.eps)
        sums = torch.stack([gradient.sum(_other_dims(x)), (gradient * centred).sum(_other_dims(x))])
        of_x = of_weight = of_bias = None
        if weight is not None:
            of_weight = (sums[1] * inverse).to(weight.dtype)
        if ctx.bias:
            of_bias = sums[0].to(weight.dtype)
        if ctx.needs_input_grad[0]:
            how = Reduction(core.Sum, f"{ctx.name}.backward", process_set=ctx.process_set)
            means = first(start_allreduce([sums.double()], how, blocking=True).wait()) / ctx.count
            along = (means[1].to(inverse) * inverse.square()).to(inverse)
            of_x = gradient - _wide(means[0].to(inverse), x) - centred * _wide(along, x)
            of_x = (of_x * _wide(inverse if weight is None else inverse * weight, x)).to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None


def _statistics(x: Tensor, name: str, process_set: core.ProcessSet) -> tuple[Tensor, Tensor, int]:
    """Return the mean and the biased variance per channel of all ranks' inputs, in float64, and their number."""
    channels = x.size(1)
    count = x.numel() // channels if channels else 0
    mine = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if count:
        variance, mean = torch.var_mean(x, _other_dims(x), correction=0)
        mine[0], mine[1 : channels + 1], mine[channels + 1 :] = count, mean, variance.double() * count
    statistics = gather_statistics(host_array(mine), channels, name, process_set, device_kind([x]))
    total = int(statistics.count[0])
    check_several(name, total)
    return to_tensor(statistics.mean).to(x.device), to_tensor(statistics.variance).to(x.device), total


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    working = _working_dtype(x)
    return x.to(working) - _wide(mean.to(working), x)


def _inverse(x: Tensor, variance: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(variance + eps).to(_working_dtype(x))


def _other_dims(x: Tensor) -> list[int]:
    """Return the dimensions that are not channels."""
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    """Reshape values per channel for broadcasting with `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
