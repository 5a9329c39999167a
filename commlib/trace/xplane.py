"""XPlane: read the profiles that TensorFlow writes (`*.xplane.pb`) as events of a trace.

They are protocol buffers: fields, each a key (number << 3 | kind) and a value. This module parses only the few fields
it needs, so TensorFlow need not be loaded. Source: tsl/profiler/protobuf/xplane.proto. Times of events are offsets from
the time of their line. That is a time of day, or (TensorFlow 2.21) relative to the start of the profile, which is in
the plane "Task Environment".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# XSpace.planes; XPlane.name, lines, event_metadata, stat_metadata, stats;
# XLine.name, timestamp_ns, events, display_name;
# XEvent.metadata_id, offset_ps, duration_ps; XEventMetadata.name, display_name; XStatMetadata.name;
# XStat.metadata_id, uint64_value, int64_value; of a map's entry: key, value.
_PLANES = 1
_NAME, _LINES, _METADATA, _STAT_METADATA, _STATS = 2, 3, 4, 5, 6
_LINE_NAME, _LINE_TIME, _LINE_EVENTS, _LINE_TITLE = 2, 3, 4, 11
_EVENT_KIND, _EVENT_OFFSET, _EVENT_LENGTH = 1, 2, 3
_KIND_NAME, _KIND_TITLE = 2, 4
_STAT_KIND, _STAT_VALUES = 1, (3, 4)
_KEY, _VALUE = 1, 2

_START = "profile_start_time"  # the statistic

_YEAR_2000 = 946_684_800 * 10**9  # ns: any time of day is later

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Field = tuple[int, Any]


def read_xplane(data: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Return the start of a profile (ns since 1970), and its events: "X" with ts and dur (us), and "M" with names.

    A truncated profile yields the events of its complete planes. Raises ValueError for any other content.
    """
    events: list[dict[str, Any]] = []
    planes = [value for number, value in _fields(data, whole=False) if number == _PLANES]
    if not planes or not all(isinstance(plane, bytes) for plane in planes):
        raise ValueError("not a profile: it has no planes")
    parsed = [list(_fields(plane)) for plane in planes]
    lines = [dict(_fields(value)) for plane in parsed for number, value in plane if number == _LINES]
    first = min((line.get(_LINE_TIME, 0) for line in lines if _LINE_EVENTS in line), default=0)
    start = next((value for plane in parsed if (value := _start_of(plane))), first)
    if start < _YEAR_2000:
        raise ValueError("a profile without a start time")
    for pid, fields in enumerate(parsed):
        events += _plane(pid, fields, start if first >= _YEAR_2000 else 0)
    return start, events


def _start_of(plane: list[Field]) -> int:
    """Return the start time of the profile if this plane has it; else 0."""
    names: dict[int, str] = {}
    for number, value in plane:
        if number == _STAT_METADATA:
            entry = dict(_fields(value))
            names[entry.get(_KEY, 0)] = _text(dict(_fields(entry.get(_VALUE, b""))).get(_NAME, b""))
    for number, value in plane:
        stat = dict(_fields(value)) if number == _STATS else {}
        if names.get(stat.get(_STAT_KIND, 0)) == _START:
            return int(next((stat[kind] for kind in _STAT_VALUES if kind in stat), 0))
    return 0


def _plane(pid: int, fields: list[Field], start: int) -> Iterator[dict[str, Any]]:
    name = next((_text(value) for number, value in fields if number == _NAME), "")
    kinds: dict[int, str] = {}
    for number, value in fields:
        if number == _METADATA:
            entry = dict(_fields(value))
            about = dict(_fields(entry.get(_VALUE, b"")))
            kinds[entry.get(_KEY, 0)] = _text(about.get(_KIND_TITLE) or about.get(_KIND_NAME, b""))
    lines = [list(_fields(value)) for number, value in fields if number == _LINES]
    if any(number == _LINE_EVENTS for line in lines for number, _ in line):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for tid, line in enumerate(lines):
        facts = dict(line)
        title = _text(facts.get(_LINE_TITLE) or facts.get(_LINE_NAME, b""))
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}
        for number, value in line:
            if number == _LINE_EVENTS:
                event = dict(_fields(value))
                ts = (facts.get(_LINE_TIME, 0) - start + event.get(_EVENT_OFFSET, 0) / 1e3) / 1e3
                kind = kinds.get(event.get(_EVENT_KIND, 0), "")
                length = event.get(_EVENT_LENGTH, 0) / 1e6
                yield {"ph": "X", "name": kind, "pid": pid, "tid": tid, "ts": ts, "dur": length}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _fields(data: bytes, *, whole: bool = True) -> Iterator[Field]:
    """Return the fields of a message. whole: raise ValueError if the last one is truncated; otherwise stop there."""
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            kind = key & 7
            value: Any = None
            if kind == _VARINT:
                value, at = _varint(data, at)
            elif kind == _BYTES:
                length, at = _varint(data, at)
                value = data[at : at + length]
                at += length
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"a field of kind {kind}")
            if at > len(data):
                raise IndexError
            yield key >> 3, value
    except IndexError:
        if whole:
            raise ValueError("a truncated message") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
