"""Sources: expand the includes of a kernel's file, for a compiler without access to a folder."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent

# Operations are rounded one by one, as on the host.
OPTIONS = ("--std=c++17", "--fmad=false")

_INCLUDE = re.compile(r'^#include "(?P<name>[\w.]+)".*\n', re.MULTILINE)


@cache
def expand_source(name: str) -> str:
    """Return a file's text with its includes, each once. A cache with the text as its key thus covers all of them."""
    seen: set[str] = set()

    def text(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        written = (FOLDER / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: text(match["name"]), written)

    return text(name)
