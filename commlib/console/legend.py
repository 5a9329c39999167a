"""Legend: explain the symbols that occur in a picture."""

from __future__ import annotations

import re

from commlib.console.width import wrap

# A pattern that finds a symbol, an example of it, and its meaning. More about pictures: `commlib.schedule.render`.
_SIGNS = (
    (r"chunks \d", "chunk", "a part of the data, by number; a message carries one or several"),
    (r"chunks .*\|.*\n", "0-2 | 3-5", "the chunks of one array, then those of the next"),
    (r"\nstep ", "step", "messages that can be in flight at the same time, shown at both ends"),
    (r"→\d+:\d", "→1:0-3", "this rank sends chunks 0 to 3 to rank 1"),
    (r"←\d+:[\d-]+(?!\+|[\d-])", "←2:5", "this rank receives chunk 5 from rank 2, in its place"),
    (r"←\d+:[\d-]+\+", "←2:5+", "this rank receives chunk 5 from rank 2 and combines it with its local one"),
    (r"⇒", "4⇒8", "this rank copies chunk 4 over chunk 8"),
    (r"→\d+:·", "→1:·", "this rank sends a message without chunks to rank 1: only its arrival matters"),
    (r"←\d+:·", "←2:·", "this rank receives one from rank 2"),
    (r"\nstuck ", "stuck", "actions that wait forever"),
)


def legend(picture: str, width: int | None = None) -> str:
    """Return a line for each kind of symbol in a picture drawn by `commlib.schedule.render`."""
    entries = [(sign, meaning) for pattern, sign, meaning in _SIGNS if re.search(pattern, picture)]
    widest = max(len(sign) for sign, _ in entries)
    return wrap("\n".join(f"{sign:<{widest}}  {meaning}" for sign, meaning in entries), width, indent=widest + 2)
