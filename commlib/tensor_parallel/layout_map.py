"""Layout map: Keras' LayoutMap, which names axes for the dimensions of variables, as styles. [pure]

    {"up/kernel": (None, "tp"), "down/kernel": ("tp", None)}: "up" is sharded by its outputs, "down" by its inputs

Patterns are regular expressions, searched for in the paths of variables; an exact path has priority.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from commlib.errors import UsageError
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary

LayoutMap = Mapping[str, tuple[str | None, ...]]
Roles = tuple[str | None, ...]
"""The role of each dimension of a variable in its layer: a key of `STYLES`, or None."""

STYLES: dict[str, Style] = {"outputs": Column(), "inputs": Row(), "words": Vocabulary()}


def is_layout_map(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan has layouts instead of styles. Raises UsageError if it has both."""
    kinds = {isinstance(value, tuple | list) for value in plan.values()}
    if len(kinds) > 1:
        raise UsageError("plan: it mixes styles of layers and layouts of variables: use only one kind")
    return True in kinds


def divided_dims(layouts: LayoutMap, variables: Sequence[tuple[str, int]]) -> list[int | None]:
    """Return the sharded dimension of each variable, given by path and number of dimensions; None for none.

    Raises UsageError for a pattern without a variable, two patterns for one variable, and layouts that do not fit.
    """
    axes = {axis for layout in layouts.values() for axis in layout if axis is not None}
    if len(axes) > 1:
        raise UsageError(
            f"plan: layouts name the axes {', '.join(sorted(axes))}: expected only the axis of parallelize"
        )
    paths, used = {path for path, _ in variables}, set()
    result: list[int | None] = []
    for path, dims in variables:
        matched = [path] if path in layouts else [one for one in layouts if one not in paths and re.search(one, path)]
        if len(matched) > 1:
            raise UsageError(f"plan: {path} has several layouts, of {', '.join(map(repr, matched))}: give it only one")
        used.update(matched)
        result.append(_divided(path, dims, layouts[matched[0]]) if matched else None)
    if unused := [pattern for pattern in layouts if pattern not in used]:
        some = ", ".join(sorted(paths)[:8])
        raise UsageError(f"plan: no path of a variable matches {unused[0]!r}; there are {some}, ...")
    return result


def style_of(variables: Sequence[tuple[str, Roles, int | None]]) -> Style | None:
    """Return the style of a layer from its variables: (path, roles, sharded dimension), the kernel first.

    A bias is sharded like its kernel, with or without a layout. Raises UsageError if no style matches.
    """
    kernel, *others = variables
    style = _style(*kernel)
    for path, roles, dim in others:
        if dim is not None and _style(path, roles, dim) != style:
            raise UsageError(f"plan: {path} is sharded along {dim}, but {kernel[0]} is not: give it no layout")
    return style


def _divided(path: str, dims: int, layout: Sequence[str | None]) -> int | None:
    if len(layout) != dims:
        raise UsageError(f"plan: {path} has {dims} dimensions, its layout {tuple(layout)} has {len(layout)}")
    named = [at for at, axis in enumerate(layout) if axis is not None]
    if len(named) > 1:
        raise UsageError(f"plan: {path} has the layout {tuple(layout)}, expected one sharded dimension")
    return named[0] if named else None


def _style(path: str, roles: Roles, dim: int | None) -> Style | None:
    if dim is None:
        return None
    role = roles[dim]
    if role is None:
        able = [str(at) for at, one in enumerate(roles) if one is not None]
        raise UsageError(f"plan: {path} cannot be sharded along {dim}, expected {' or '.join(able) or 'no layout'}")
    return STYLES[role]
