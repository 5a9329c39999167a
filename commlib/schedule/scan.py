"""Scan and exscan: every rank ends with the combination of the inputs of all ranks up to itself, or before itself.

They have only one algorithm, so it is not in the table.
"""

from __future__ import annotations

from collections.abc import Iterator

from commlib.schedule.ir import Program, Recv, Round, Send
from commlib.schedule.spans import ceil_log2, chunk

_OWN, _BEFORE = chunk(0), chunk(1)


def scan_program(verb: str, rank: int, size: int) -> Program:
    """Return the program of `rank` among `size` ranks for a "scan" or an "exscan".

    A scan has one chunk. An exscan runs a scan and sends its result to the next rank, into a second chunk.
    """
    rounds = tuple(_scan(rank, size))
    if verb == "scan":
        return Program(verb, "recursive_doubling", rank, size, 0, (1,), rounds)
    return Program(verb, "recursive_doubling", rank, size, 0, (1, 1), (*rounds, *_shift(rank, size)))


def _scan(rank: int, size: int) -> Iterator[Round]:
    """Send the combination so far to the rank at twice the distance of the last round.

    Rounds: log2 P, rounded up. Bytes sent per rank: at most log2 P n, rounded up; the first rank sends most.
    Source: Hillis & Steele 1986, "Data parallel algorithms".
    """
    for power in range(ceil_log2(size)):
        distance = 1 << power
        sends = (Send(rank + distance, _OWN),) if rank + distance < size else ()
        recvs = (Recv(rank - distance, _OWN, reduce=True),) if rank >= distance else ()
        yield Round(sends, recvs)


def _shift(rank: int, size: int) -> Iterator[Round]:
    sends = (Send(rank + 1, _OWN),) if rank + 1 < size else ()
    recvs = (Recv(rank - 1, _BEFORE),) if rank else ()
    yield Round(sends, recvs)
