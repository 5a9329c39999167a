"""Layers on divided features: norms of each channel, or of groups of them, and PReLU, their weights divided, too."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel import features, moves
from commlib.tensor_parallel.styles import Sequence
from commlib_torch._shards import KeepsShards, shard_of
from commlib_torch.tensor._dividing import divide
from commlib_torch.tensor._leaves import INSTANCE_NORMS, feature_dim
from commlib_torch.tensor.linear import gathered
from commlib_torch.tensor.moves import moved


class OnFeatures(KeepsShards):
    """A layer that has weights and moments for each feature: a rank has those of its features, and sees no others.

    Numbers that the layer keeps, such as `num_features`, are those of the whole.
    """

    axis: Axis
    style: Sequence
    layer_name: str
    sharding: Sharding
    """Of the features."""
    takes_whole: bool
    """It takes its part of all features, and returns all: as in a model that is run as the whole that it was."""

    def shardings(self, what: str, style: Sequence) -> dict[str, Sharding]:
        """Return how what it has is divided; `self` may be an ordinary layer. Raises UsageError for another dimension.

        A negative one tells nothing before there is an input.
        """
        if style.dim >= 0 and not isinstance(self, INSTANCE_NORMS):
            features.check_dim(what, style.dim, feature_dim(self, style.dim + 2), mixes=not isinstance(self, nn.PReLU))
        whole, held = features_of(self), {**self._parameters, **self._buffers}
        return {name: whole for name, one in held.items() if one is not None and _whole_shape(one) == whole.shape}

    def become(self, what: str, axis: Axis, style: Sequence) -> None:
        """Divide what is an ordinary layer so far."""
        shardings = self.shardings(what, style)
        divide(what, self, axis, shardings)
        self.axis, self.style, self.sharding, self.takes_whole = axis, style, features_of(self), False

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of this rank's features."""
        axis, dim = self.axis, feature_dim(self, x.dim())
        features.check_dim(self.layer_name, self.style.dim % x.dim(), dim, mixes=not isinstance(self, nn.PReLU))
        if self.takes_whole:
            x = moved(x, axis, moves.scatter(dim, self.sharding.lengths(axis.size)))
        what, expected = (
            f"{self.layer_name} on rank {axis.rank} of {axis.comm.name}",
            self.sharding.length(axis.rank, axis.size),
        )
        features.check_length(what, x.shape[dim], dim, expected)
        out = self.of_part(x)
        return gathered(out, axis, self.sharding, dim) if self.takes_whole else out

    def of_part(self, x: Tensor) -> Tensor:
        """Return what the layer makes of its part of the features, whatever its numbers say."""
        found: Tensor = super().forward(x)
        return found

    def extra_repr(self) -> str:
        """Say what is divided."""
        return f"{super().extra_repr()}, {self.style}, {self.axis!r}"


class FeatureGroupNorm(OnFeatures, nn.GroupNorm):
    """A group norm of this rank's channels, which are whole groups."""

    def of_part(self, x: Tensor) -> Tensor:
        """Return the norm of this rank's groups."""
        groups = features.own_groups(self.sharding, self.axis.rank, self.axis.size)
        return F.group_norm(x, groups, self.weight, self.bias, self.eps)


class FeatureInstanceNorm(OnFeatures):
    """An instance norm of this rank's channels."""

    def of_part(self: Any, x: Tensor) -> Tensor:
        """Return the norm of a batch, or of one instance without that."""
        by_itself, share = self.training or not self.track_running_stats, self.momentum or 0.0
        batch = x.unsqueeze(0) if feature_dim(self, x.dim()) == 0 else x
        found = F.instance_norm(
            batch, self.running_mean, self.running_var, self.weight, self.bias, by_itself, share, self.eps
        )
        return found.view_as(x)


class FeatureBatchNorm1d(OnFeatures, nn.BatchNorm1d):
    """A batch norm of this rank's channels: each has its own moments, running ones included, and its own weights."""


class FeatureBatchNorm2d(OnFeatures, nn.BatchNorm2d):
    """See `FeatureBatchNorm1d`."""


class FeatureBatchNorm3d(OnFeatures, nn.BatchNorm3d):
    """See `FeatureBatchNorm1d`."""


class FeatureInstanceNorm1d(FeatureInstanceNorm, nn.InstanceNorm1d):
    """See `FeatureInstanceNorm`."""


class FeatureInstanceNorm2d(FeatureInstanceNorm, nn.InstanceNorm2d):
    """See `FeatureInstanceNorm`."""


class FeatureInstanceNorm3d(FeatureInstanceNorm, nn.InstanceNorm3d):
    """See `FeatureInstanceNorm`."""


class FeaturePReLU(OnFeatures, nn.PReLU):
    """A PReLU with a slope for each feature, of which a rank has those of its features."""


FEATURE_LAYERS: dict[type[nn.Module], type[OnFeatures]] = {
    nn.BatchNorm1d: FeatureBatchNorm1d,
    nn.BatchNorm2d: FeatureBatchNorm2d,
    nn.BatchNorm3d: FeatureBatchNorm3d,
    nn.InstanceNorm1d: FeatureInstanceNorm1d,
    nn.InstanceNorm2d: FeatureInstanceNorm2d,
    nn.InstanceNorm3d: FeatureInstanceNorm3d,
    nn.GroupNorm: FeatureGroupNorm,
    nn.PReLU: FeaturePReLU,
}
"""What layers become by `Sequence`, where they have something for each feature."""


def features_of(module: Any) -> Sharding:
    """Return how the features of a layer are divided, divided or not yet: by groups, where it looks at these."""
    match module:
        case nn.GroupNorm():
            return Sharding((module.num_channels,), 0, (), module.num_groups)
        case nn.PReLU():
            return Sharding((module.num_parameters,), 0)
    return Sharding((int(module.num_features),), 0)


def _whole_shape(held: Tensor) -> tuple[int, ...]:
    shard = shard_of(held)
    return tuple(held.shape) if shard is None else shard.sharding.shape
