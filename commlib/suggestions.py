"""Suggestions of error messages: the nearest known name, and the command that installs an extra. [pure]"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

_LEAST = 0.6  # similarity, from 0 to 1


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the known name most similar to `name`, whatever its case and separators; "" if none is similar."""
    from difflib import SequenceMatcher, get_close_matches  # imports `re`; errors are rare

    text, by_letters = str(name), defaultdict[str, list[str]](list)
    for each in known:
        by_letters[_letters(each)].append(each)
    matches = get_close_matches(_letters(text), by_letters, 1, _LEAST)
    # Names with the same letters, such as all_reduce and allreduce_.
    return max(by_letters[matches[0]], key=lambda each: SequenceMatcher(None, text, each).ratio()) if matches else ""


def suggest(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the end of an error's text; "" if no known name is similar."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def missing_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that `owner` ("module 'x'") lacks."""
    # Tools probe for many special names.
    hint = "" if name.startswith("__") else suggest(name, known)
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")


def install(*extras: str) -> str:
    """Return an instruction, for a message, to install one of these extras.

    The name commlib on PyPI belongs to another project, so the command installs from this checkout.
    """
    commands = " or ".join(f'pip install ".[{extra}]"' for extra in extras)
    named = " or ".join(f"'{extra}'" for extra in extras)
    return f"install this project with its extra {named}: {commands} in its checkout"


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
