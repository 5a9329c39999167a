"""Do all ranks make the same call? Asked before data moves.

Within a node the board answers at the price of one meeting. Across nodes the ranks gather a number each, which costs
some network latencies, so 'auto' does it for a group's first calls only; after that the signature is part of every
message's tag, so that different calls can never take each other's data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.errors import MismatchError
from commlib.executor import Region, execute
from commlib.schedule import program
from commlib.schedule.layout import even
from commlib.transport.base import Idle, Transport
from commlib.verbs.operation import signature

_TEXT_BYTES = 1024


def mismatch(group: str, sequence: int, rank: int, texts: list[str]) -> MismatchError:
    """Return the error that says who called what."""
    callers: dict[str, list[int]] = {}
    for caller, text in enumerate(texts):
        callers.setdefault(text, []).append(caller)
    lines = [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}" for text, ranks in callers.items()
    ]
    return MismatchError(
        f"{group}: the ranks do not make the same call (call number {sequence}; this is rank {rank}):\n"
        + "\n".join(lines)
        + "\nAll ranks of a group must make the same calls in the same order. Nothing was sent; the group stays usable."
    )


def compare_messages(transport: Transport, sequence: int, text: str, idle: Idle) -> list[str] | None:
    """Return None if all ranks have the same text, else all texts. All ranks must call it as often."""

    def gather(own: Any, tag: str) -> Any:
        gathered = np.zeros((transport.size, own.size), own.dtype)
        gathered[transport.rank] = own
        region = Region(gathered.reshape(-1), even(gathered.size, transport.size))
        bruck = program("all_gather", "bruck", transport.rank, transport.size)
        execute(bruck, [region], transport, tag=signature(f"{tag} {sequence}"), idle=idle)
        return gathered

    numbers = gather(np.array([signature(text)], np.int64), "compare")
    if (numbers == numbers[0]).all():
        return None
    own = np.zeros(_TEXT_BYTES, np.uint8)
    data = text.encode()[:_TEXT_BYTES]
    own[: len(data)] = np.frombuffer(data, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gather(own, "texts")]
