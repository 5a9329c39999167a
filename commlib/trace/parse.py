"""Parse: the events of a trace in Chrome's format, of which the end may be missing. Source: "Trace Event Format"."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

_GZIP = b"\x1f\x8b"
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_NEXT = re.compile(r"[\s,]*")


def unpacked(data: bytes) -> bytes:
    """Return what a gzip file holds, as far as it goes; other bytes as they are."""
    if not data.startswith(_GZIP):
        return data
    parts = []
    while data.startswith(_GZIP):  # a file may be several, one after another
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(data))
        except zlib.error:
            break
        data = member.unused_data
    return b"".join(parts)


def parse(data: bytes) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """Return the events of a trace, what else its file says, and whether the file is whole.

    An array of events, or an object with them under "traceEvents". Of a file that ends early, those that are whole.
    Raises ValueError for anything else.
    """
    text = unpacked(data).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        found = json.loads(text)
    except ValueError:
        return _cut_off(text)
    if isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
        events = found.pop("traceEvents")
        return _events(events), found, True
    if isinstance(found, list):
        return _events(found), {}, True
    raise ValueError("no array of events, and no object that has one under 'traceEvents'")


def _cut_off(text: str) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    facts: dict[str, Any] = {}
    if text.startswith("["):
        at = 1
    elif text.startswith("{") and (there := _LIST.search(text)) is not None:
        at, head = there.end(), text[: there.start()].rstrip().rstrip(",")
        try:
            facts = json.loads(head + "}")
        except ValueError:
            facts = {}  # what else the file says is lost; its events are not
    else:
        raise ValueError("no JSON that begins as a trace does")
    decoder = json.JSONDecoder()
    found: list[Any] = []
    while True:
        at = _NEXT.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:
            return _events(found), facts, False
        found.append(event)


def _events(found: list[Any]) -> list[dict[str, Any]]:
    return [event for event in found if isinstance(event, dict) and "ph" in event]
