"""Plan tables: read the text with which "auto" reports its plan."""

from __future__ import annotations

import re


def reason(table: str, layer: str) -> str:
    """Return the reason for a layer, from the note below the table that its row names."""
    rows, notes = table.split("\n\n")
    (row,) = [line for line in rows.splitlines() if line.startswith(f"{layer} ")]
    numbered = re.split(r"^(\d+)  ", notes, flags=re.MULTILINE)[1:]
    texts = dict(zip(numbered[::2], numbered[1::2], strict=True))
    return " ".join(texts[row.split()[-1]].split())
