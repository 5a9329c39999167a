"""Recompute: what a user says is computed again in backwards, of stages or of single layers. [pure]"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from commlib.errors import UsageError

CHECKPOINTS = ("none", "selective", "full")
"""What is computed again of a stage, or of a layer, in its backward: nothing, all but products, all."""

Checkpoint = str | Mapping[str, str] | Callable[[str, Any], str]
"""One of these words; or words by patterns of layers' names, in which `*` stands for any characters; or a function of
a layer's name and the layer that returns one.
"""

Recompute = str | dict[str, str]
"""One word for whole stages, or words by names of layers, but for those of which nothing is computed again."""


def recompute_of(checkpoint: Checkpoint, layers: Sequence[tuple[str, Any]]) -> Recompute:
    """Return what is computed again of a model, all of whose layers are given by their names.

    A whole name counts before a pattern. Raises UsageError for what is none of the words, for a pattern that no layer
    has, and for a layer with two words.
    """
    if isinstance(checkpoint, Mapping):
        found = _by_patterns(checkpoint, [name for name, _ in layers])
    elif callable(checkpoint):
        found = {name: _word(checkpoint(name, layer), name) for name, layer in layers}
    else:
        return _word(checkpoint)
    return {name: word for name, word in found.items() if word != "none"}


def _by_patterns(given: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    found: dict[str, dict[str, str]] = {}
    for pattern, word in given.items():
        _word(word, pattern)
        matched = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = get_close_matches(pattern, names, 3, 0.4) or list(names)[:8]
            raise UsageError(
                f"pipeline: checkpoint: no layer is called {pattern!r}; there are {', '.join(close) or 'none'}, ..."
            )
        for name in matched:
            found.setdefault(name, {})[pattern] = word
    return {name: _one(name, said) for name, said in found.items()}


def _one(name: str, said: Mapping[str, str]) -> str:
    words = {said[name]} if name in said else set(said.values())
    if len(words) > 1:
        text = ", ".join(f"{pattern!r}: {word!r}" for pattern, word in said.items())
        raise UsageError(f"pipeline: checkpoint says several things of {name}: {text}: say one, of its whole name")
    return words.pop()


def _word(word: Any, of: str = "") -> str:
    if word not in CHECKPOINTS:
        place = f" of {of}" if of else ""
        more = "" if of else ", or these by names of layers, or a function of a layer's name and the layer"
        raise UsageError(f"pipeline: checkpoint{place} is {word!r}, expected one of {', '.join(CHECKPOINTS)}{more}")
    return str(word)
