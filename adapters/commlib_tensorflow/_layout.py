"""Which gradient of TensorFlow travels where: in a bucket, in a group of the user's, or gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from commlib.data_parallel import Parameter, make_buckets
from commlib.errors import UsageError
from commlib_tensorflow._bridge import dtype_name

Groups = int | Sequence[Sequence[str]] | None


@dataclass(frozen=True, slots=True)
class Layout:
    """Which gradient travels where. Made from the first gradients that came under these names, and kept."""

    specs: tuple[tuple[Any, Any] | None, ...]
    """The dtype and shape of each gradient, as far as it was known."""
    lines: tuple[str, ...]
    """What each gradient is, for ranks to compare."""
    buckets: tuple[tuple[int, ...], ...]
    """Indices of dense gradients, in launch order."""
    sparse: tuple[int, ...]
    """Indices of gradients that are gathered."""


def make_layout(gradients: Sequence[Any], names: Sequence[str], groups: Groups) -> Layout:
    """Return where each gradient travels. What is None at first has its place among the dense ones."""
    sparse = tuple(index for index, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices))
    dense = [index for index, g in enumerate(gradients) if g is not None and index not in sparse]
    none = [index for index, g in enumerate(gradients) if g is None]
    grouped = _grouped(dense, names, groups)
    rest = [index for index in dense if not any(index in group for group in grouped)]
    specs = [_parameter(gradients[index], names[index]) for index in rest]
    buckets = [tuple(rest[place] for place in bucket.parameters) for bucket in make_buckets(specs)]
    # A group is complete when its lowest gradient is: the later that one stands, the sooner.
    buckets = sorted([*buckets, *grouped], key=lambda members: -min(members))
    if none:
        buckets[-1:] = [(*(buckets[-1] if buckets else ()), *none)]
    lines = [f"the gradient of {name} is {_describe(g)}" for name, g in zip(names, gradients, strict=True)]
    return Layout(tuple(spec_of(gradient) for gradient in gradients), tuple(lines), tuple(buckets), sparse)


def _grouped(dense: Sequence[int], names: Sequence[str], groups: Groups) -> list[tuple[int, ...]]:
    if groups is None:
        return []
    if isinstance(groups, int):
        count = min(groups, len(dense))
        parts = [dense[len(dense) * k // count : len(dense) * (k + 1) // count] for k in range(count)]
        return [tuple(reversed(part)) for part in parts]
    members = [tuple(index for index in reversed(dense) if names[index] in group) for group in groups]
    return [group for group in members if group]


def checked_groups(groups: Groups) -> Groups:
    """Return what `groups=` was given as, as tuples; None for none. Raises UsageError."""
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise UsageError(f"groups must be a number of groups or lists of variables, got {groups}")
        return groups
    lists = tuple(tuple(group) for group in groups)
    names = [name for group in lists for name in group]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{', '.join(twice)}: a variable can only be in one of the groups")
    return lists


def _parameter(gradient: Any, name: str) -> Parameter:
    count = gradient.shape.num_elements() or 0  # the number of elements may be unknown in a graph
    return Parameter(name, count, dtype_name(gradient.dtype), gradient.dtype.size)


def spec_of(gradient: Any) -> tuple[Any, Any] | None:
    """Return the dtype and shape of a gradient, as far as they are known; None for none."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values.dtype, tf.TensorShape([None, *gradient.values.shape[1:]])
    return gradient.dtype, gradient.shape


def compatible(one: tuple[Any, Any] | None, other: tuple[Any, Any] | None) -> bool:
    """Tell whether two gradients may be those of one variable, at different times."""
    return one is None or other is None or (one[0] == other[0] and bool(one[1].is_compatible_with(other[1])))


def _describe(gradient: Any) -> str:
    if gradient is None:
        return "None"
    if isinstance(gradient, tf.IndexedSlices):
        return f"sparse {gradient.values.dtype.name}"
    return f"{gradient.dtype.name} {gradient.shape}"
