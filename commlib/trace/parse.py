"""Parse: read the events of a trace in Chrome's format, even if its end is missing. Source: "Trace Event Format"."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

_GZIP = b"\x1f\x8b"
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_NEXT = re.compile(r"[\s,]*")


def unpack(data: bytes) -> bytes:
    """Return the decompressed content of a gzip file, as far as it is intact; other data unchanged."""
    if not data.startswith(_GZIP):
        return data
    parts = []
    while data.startswith(_GZIP):  # a file may have several members
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(data))
        except zlib.error:
            break
        data = member.unused_data
    return b"".join(parts)


def parse(data: bytes) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """Return the events of a trace, the other fields of its file, and whether the file is complete.

    The file is an array of events, or an object with one under "traceEvents". A truncated file yields its complete
    events. Raises ValueError for any other content.
    """
    text = unpack(data).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        document = json.loads(text)
    except ValueError:
        return _cut_off(text)
    if isinstance(document, dict) and isinstance(document.get("traceEvents"), list):
        events = document.pop("traceEvents")
        return _events(events), document, True
    if isinstance(document, list):
        return _events(document), {}, True
    raise ValueError("neither an array of events nor an object with one under 'traceEvents'")


def _cut_off(text: str) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    facts: dict[str, Any] = {}
    if text.startswith("["):
        at = 1
    elif text.startswith("{") and (start := _LIST.search(text)) is not None:
        at, head = start.end(), text[: start.start()].rstrip().rstrip(",")
        try:
            facts = json.loads(head + "}")
        except ValueError:
            facts = {}  # the other fields are lost; the events are not
    else:
        raise ValueError("not JSON that begins like a trace")
    decoder = json.JSONDecoder()
    events: list[Any] = []
    while True:
        at = _NEXT.match(text, at).end()  # type: ignore[union-attr]  # it matches any text
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:
            return _events(events), facts, False
        events.append(event)


def _events(items: list[Any]) -> list[dict[str, Any]]:
    return [event for event in items if isinstance(event, dict) and "ph" in event]
