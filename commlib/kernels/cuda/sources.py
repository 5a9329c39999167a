"""Sources: the text of a kernel's file with the files that it includes, as a compiler that sees no folder needs it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent

# Each operation is rounded as it is written, as on the host.
OPTIONS = ("--std=c++17", "--fmad=false")

_INCLUDE = re.compile(r'^#include "(?P<name>[\w.]+)".*\n', re.MULTILINE)


@cache
def whole(name: str) -> str:
    """Return a file's text with those that it includes, each once. So a cache that knows the text knows all of it."""
    seen: set[str] = set()

    def text(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        written = (FOLDER / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda found: text(found["name"]), written)

    return text(name)
