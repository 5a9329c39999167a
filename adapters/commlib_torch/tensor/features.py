"""Layers on sharded features: norms per channel or group, and PReLU, with sharded weights."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel import features, moves
from commlib.tensor_parallel.styles import Sequence
from commlib_torch._shards import shard_of
from commlib_torch.tensor._leaves import INSTANCE_NORMS, feature_dim
from commlib_torch.tensor._sharded_layer import ShardedLayer
from commlib_torch.tensor._sharding import shard_parameters
from commlib_torch.tensor.linear import gather_outputs
from commlib_torch.tensor.moves import redistribute


class FeatureLayer(ShardedLayer):
    """A layer with weights and moments per feature: a rank has only its features.

    Numbers of the layer, such as `num_features`, are the unsharded layer's.
    """

    style: Sequence
    layer_name: str
    sharding: Sharding
    """The sharding of the features."""
    takes_whole: bool
    """It slices full features and returns full features: for runs of a sharded model as the unsharded one."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError for another dimension.

        A negative dimension is unknown before the first input.
        """
        if style.dim >= 0 and not isinstance(self, INSTANCE_NORMS):
            features.check_dim(what, style.dim, feature_dim(self, style.dim + 2), mixes=not isinstance(self, nn.PReLU))
        whole, held = features_of(self), {**self._parameters, **self._buffers}
        return {name: whole for name, one in held.items() if one is not None and _whole_shape(one) == whole.shape}

    def become(self, what: str, axis: ParallelAxis, style: Sequence) -> None:
        """Shard a plain layer in place."""
        shardings = self.shardings(what, style)
        shard_parameters(what, self, axis, shardings)
        self.axis, self.style, self.sharding, self.takes_whole = axis, style, features_of(self), False

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for this rank's features."""
        axis, dim = self.axis, feature_dim(self, x.dim())
        features.check_dim(self.layer_name, self.style.dim % x.dim(), dim, mixes=not isinstance(self, nn.PReLU))
        if self.takes_whole:
            x = redistribute(x, axis, moves.scatter(dim, self.sharding.lengths(axis.size)))
        what, expected = (
            f"{self.layer_name} on rank {axis.rank} of {axis.comm.name}",
            self.sharding.length(axis.rank, axis.size),
        )
        features.check_length(what, x.shape[dim], dim, expected)
        out = self.of_part(x)
        return gather_outputs(out, axis, self.sharding, dim) if self.takes_whole else out

    def of_part(self, x: Tensor) -> Tensor:
        """Return the layer's output for its shard of the features, regardless of its numbers."""
        output: Tensor = super().forward(x)
        return output


class FeatureGroupNorm(FeatureLayer, nn.GroupNorm):
    """A group norm of this rank's channels, which are complete groups."""

    def of_part(self, x: Tensor) -> Tensor:
        """Return the norm of this rank's groups."""
        groups = features.own_groups(self.sharding, self.axis.rank, self.axis.size)
        return F.group_norm(x, groups, self.weight, self.bias, self.eps)


class FeatureInstanceNorm(FeatureLayer):
    """An instance norm of this rank's channels."""

    def of_part(self: Any, x: Tensor) -> Tensor:
        """Return the norm of a batch, or of a single instance."""
        by_itself, share = self.training or not self.track_running_stats, self.momentum or 0.0
        batch = x.unsqueeze(0) if feature_dim(self, x.dim()) == 0 else x
        output = F.instance_norm(
            batch, self.running_mean, self.running_var, self.weight, self.bias, by_itself, share, self.eps
        )
        return output.view_as(x)


class FeatureBatchNorm1d(FeatureLayer, nn.BatchNorm1d):
    """A batch norm of this rank's channels, with their moments, running moments and weights."""


class FeatureBatchNorm2d(FeatureLayer, nn.BatchNorm2d):
    """A `FeatureBatchNorm1d` for images."""


class FeatureBatchNorm3d(FeatureLayer, nn.BatchNorm3d):
    """A `FeatureBatchNorm1d` for volumes."""


class FeatureInstanceNorm1d(FeatureInstanceNorm, nn.InstanceNorm1d):
    """A `FeatureInstanceNorm` for sequences."""


class FeatureInstanceNorm2d(FeatureInstanceNorm, nn.InstanceNorm2d):
    """A `FeatureInstanceNorm` for images."""


class FeatureInstanceNorm3d(FeatureInstanceNorm, nn.InstanceNorm3d):
    """A `FeatureInstanceNorm` for volumes."""


class FeaturePReLU(FeatureLayer, nn.PReLU):
    """A PReLU with one slope per feature; a rank has its features' slopes."""


FEATURE_LAYERS: dict[type[nn.Module], type[FeatureLayer]] = {
    nn.BatchNorm1d: FeatureBatchNorm1d,
    nn.BatchNorm2d: FeatureBatchNorm2d,
    nn.BatchNorm3d: FeatureBatchNorm3d,
    nn.InstanceNorm1d: FeatureInstanceNorm1d,
    nn.InstanceNorm2d: FeatureInstanceNorm2d,
    nn.InstanceNorm3d: FeatureInstanceNorm3d,
    nn.GroupNorm: FeatureGroupNorm,
    nn.PReLU: FeaturePReLU,
}
"""Replacements of layers with values per feature, for `Sequence`."""


def features_of(module: Any) -> Sharding:
    """Return the sharding of a layer's features, existing or planned: by groups, if it has groups."""
    match module:
        case nn.GroupNorm():
            return Sharding((module.num_channels,), 0, (), module.num_groups)
        case nn.PReLU():
            return Sharding((module.num_parameters,), 0)
    return Sharding((int(module.num_features),), 0)


def _whole_shape(held: Tensor) -> tuple[int, ...]:
    shard = shard_of(held)
    return tuple(held.shape) if shard is None else shard.sharding.shape
