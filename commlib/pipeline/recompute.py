"""Recompute: the option for activation checkpointing, for stages or for single layers. [pure]"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, get_args

from commlib.arguments import suggest
from commlib.errors import UsageError
from commlib.literals import CheckpointMode

CHECKPOINTS: tuple[str, ...] = get_args(CheckpointMode)

Checkpoint = CheckpointMode | Mapping[str, CheckpointMode] | Callable[[str, Any], CheckpointMode]
"""One of these modes; or modes by patterns of layers' names, in which `*` matches any characters; or a function of a
layer's name and the layer that returns one.
"""

Recompute = str | dict[str, str]
"""One mode for entire stages, or modes by names of layers, without the layers that recompute nothing."""


def recompute_of(checkpoint: Checkpoint, layers: Sequence[tuple[str, Any]]) -> Recompute:
    """Return the recompute modes of a model, given all its layers by their names.

    An exact name takes precedence over a pattern. Raises UsageError for an unknown mode, for a pattern that matches no
    layer, and for a layer with two modes.
    """
    if isinstance(checkpoint, Mapping):
        modes = _match_patterns(checkpoint, [name for name, _ in layers])
    elif callable(checkpoint):
        modes = {name: _check_mode(checkpoint(name, layer), name) for name, layer in layers}
    else:
        return _check_mode(checkpoint)
    return {name: word for name, word in modes.items() if word != "none"}


def _match_patterns(patterns: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    matches: dict[str, dict[str, str]] = {}
    for pattern, word in patterns.items():
        _check_mode(word, pattern)
        matched = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = get_close_matches(pattern, names, 3, 0.4) or list(names)[:8]
            raise UsageError(
                f"pipeline: checkpoint: no layer matches {pattern!r}; the layers are {', '.join(close) or 'none'}, ..."
            )
        for name in matched:
            matches.setdefault(name, {})[pattern] = word
    return {name: _select_mode(name, modes) for name, modes in matches.items()}


def _select_mode(name: str, modes: Mapping[str, str]) -> str:
    chosen = {modes[name]} if name in modes else set(modes.values())
    if len(chosen) > 1:
        text = ", ".join(f"{pattern!r}: {word!r}" for pattern, word in modes.items())
        raise UsageError(f"pipeline: checkpoint has several modes for {name}: {text}: give one for its full name")
    return chosen.pop()


def _check_mode(word: Any, of: str = "") -> str:
    if word not in CHECKPOINTS:
        place = f" of {of}" if of else ""
        more = "" if of else ", or these by names of layers, or a function of a layer's name and the layer"
        modes = f"{', '.join(CHECKPOINTS)}{more}{suggest(word, CHECKPOINTS)}"
        raise UsageError(f"pipeline: checkpoint{place} is {word!r}, expected one of {modes}")
    return str(word)
