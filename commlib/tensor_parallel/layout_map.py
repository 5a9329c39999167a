"""Layout map: styles as Keras' LayoutMap says them, by axes for the dimensions of variables. [pure]

    {"up/kernel": (None, "tp"), "down/kernel": ("tp", None)}: "up" is divided by its outputs, "down" by its inputs

Patterns are regular expressions, which are searched for in the paths of variables; a whole path counts before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from commlib.errors import UsageError
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary

LayoutMap = Mapping[str, tuple[str | None, ...]]
Roles = tuple[str | None, ...]
"""What each dimension of a variable is for its layer: a key of `STYLES`, or None."""

STYLES: dict[str, Style] = {"outputs": Column(), "inputs": Row(), "words": Vocabulary()}


def is_layout_map(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan has layouts instead of styles. Raises UsageError if it has both."""
    kinds = {isinstance(value, tuple | list) for value in plan.values()}
    if len(kinds) > 1:
        raise UsageError("plan: it has styles of layers and layouts of variables: give all of one kind")
    return True in kinds


def divided_dims(layouts: LayoutMap, variables: Sequence[tuple[str, int]]) -> list[int | None]:
    """Return the dimension that is divided of each variable, given by its path and number of dimensions; None for none.

    Raises UsageError for a pattern that no variable has, two for one variable, and layouts that do not fit.
    """
    axes = {axis for layout in layouts.values() for axis in layout if axis is not None}
    if len(axes) > 1:
        raise UsageError(f"plan: layouts name the axes {', '.join(sorted(axes))}: expected one, that of parallelize")
    paths, used = {path for path, _ in variables}, set()
    found: list[int | None] = []
    for path, dims in variables:
        matched = [path] if path in layouts else [one for one in layouts if one not in paths and re.search(one, path)]
        if len(matched) > 1:
            raise UsageError(f"plan: {path} has several layouts, of {', '.join(map(repr, matched))}: give it one")
        used.update(matched)
        found.append(_divided(path, dims, layouts[matched[0]]) if matched else None)
    if unused := [pattern for pattern in layouts if pattern not in used]:
        some = ", ".join(sorted(paths)[:8])
        raise UsageError(f"plan: no variable has a path with {unused[0]!r}; there are {some}, ...")
    return found


def style_of(variables: Sequence[tuple[str, Roles, int | None]]) -> Style | None:
    """Return the style of a layer, of its variables: (path, roles, the dimension that is divided), the kernel first.

    A bias is divided as its kernel is, whether it has a layout or not. Raises UsageError for what no style does.
    """
    kernel, *others = variables
    style = _style(*kernel)
    for path, roles, dim in others:
        if dim is not None and _style(path, roles, dim) != style:
            raise UsageError(f"plan: {path} is divided along {dim}, but {kernel[0]} is not so: give it no layout")
    return style


def _divided(path: str, dims: int, layout: Sequence[str | None]) -> int | None:
    if len(layout) != dims:
        raise UsageError(f"plan: {path} has {dims} dimensions, its layout {tuple(layout)} has {len(layout)}")
    named = [at for at, axis in enumerate(layout) if axis is not None]
    if len(named) > 1:
        raise UsageError(f"plan: {path} has the layout {tuple(layout)}, expected one dimension that is divided")
    return named[0] if named else None


def _style(path: str, roles: Roles, dim: int | None) -> Style | None:
    if dim is None:
        return None
    role = roles[dim]
    if role is None:
        able = [str(at) for at, one in enumerate(roles) if one is not None]
        raise UsageError(f"plan: {path} cannot be divided along {dim}, expected {' or '.join(able) or 'no layout'}")
    return STYLES[role]
