"""Plan: map layers to styles, by patterns of names. [pure]"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from commlib.arguments import describe_type, nearest
from commlib.errors import UsageError
from commlib.tensor_parallel.styles import Column, PerRank, Replicate, Row, Slice, Style, Vocabulary
from commlib.tensor_parallel.styles import Sequence as SequenceStyle

Plan = Mapping[str, Style]
"""Styles by patterns of names, in which `*` matches any characters: {"layers.*.up": Column(), "*.down": Row()}."""

_STYLES = (Column, Row, Vocabulary, SequenceStyle, Replicate, PerRank, Slice)

S = TypeVar("S")


def resolve(
    plan: Mapping[str, S],
    names: Sequence[str],
    kinds: tuple[type, ...] = _STYLES,
    numbers: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> dict[str, S]:
    """Return the style of each layer that the plan names, in the order of `names`, which lists all layers.

    An exact name has priority over a pattern. kinds: the classes of styles. numbers, arguments: names for `PerRank` and
    `Slice`; they are last. Raises UsageError for other objects, for a pattern that matches no layer, and for a layer
    with two styles.
    """
    if not isinstance(plan, Mapping):
        raise UsageError(f"plan: expected a mapping of layers' names to {kinds[0].__name__}, got {describe_type(plan)}")
    matches: dict[str, list[tuple[str, S]]] = {name: [] for name in (*names, *numbers, *arguments)}
    for pattern, style in plan.items():
        if not isinstance(style, kinds):
            known = [kind.__name__ for kind in kinds]
            near = nearest(style, known) if isinstance(style, str) else ""
            hint = f"; did you mean {near}()?" if near else ""
            raise UsageError(f"plan: {pattern!r} is {style!r}, expected an instance of {', '.join(known)}{hint}")
        able = numbers if isinstance(style, PerRank) else arguments if isinstance(style, Slice) else names
        named = [pattern] if pattern in able else [name for name in able if fnmatchcase(name, pattern)]
        # `*.num_heads` does not match numbers of a configuration object.
        matched = [name for name in named if able is not numbers or ".config." in pattern or ".config." not in name]
        if not matched:
            close = get_close_matches(pattern, able, 3, 0.4) or [name or "the model itself" for name in able[:8]]
            what = "number" if isinstance(style, PerRank) else "argument" if isinstance(style, Slice) else "layer"
            raise UsageError(f"plan: no {what} is called {pattern!r}; there are {', '.join(close)}, ...")
        for name in matched:
            matches[name].append((pattern, style))
    return {name: _one(name, styles) for name, styles in matches.items() if styles}


def no_layer(name: str, plain: type, style: Style, layers: Iterable[tuple[type, type[Style]]]) -> UsageError:
    """Return the error for a layer that a style cannot shard. layers: the (plain layer, style) that can be."""
    able = sorted({kind.__name__ for kind, one in layers if isinstance(style, one)})
    return UsageError(
        f"plan: {name} is a {plain.__name__}, but {type(style).__name__} is for {', '.join(able) or 'no layer'}"
    )


def _one(name: str, matches: list[tuple[str, S]]) -> S:
    exact = [style for pattern, style in matches if pattern == name]
    styles = exact or [style for _, style in matches]
    if any(style != styles[0] for style in styles):
        text = ", ".join(f"{pattern!r}: {style}" for pattern, style in matches)
        what = name or "the model itself"
        raise UsageError(f"plan: {what} has several styles: {text}: give it only one, under its full name")
    return styles[0]


def lines(styles: Mapping[str, object]) -> list[str]:
    """Return the styles as text that ranks compare, one line for each layer."""
    return [f"{name}: {style}" for name, style in styles.items()]
