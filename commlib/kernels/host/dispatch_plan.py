"""Dispatch plans: record the destinations of rows once as int32, and move rows by them repeatedly.

A rank stores the rows of its experts expert by expert, and within an expert by sending rank. The rows that one rank has
sent to one expert form a *segment*. The block of a dispatch plan is

    sizes          numbers of assignments, tokens, experts, ranks, experts of this rank
    tokens         [assignments] the token of each, expert by expert
    token_starts   [tokens + 1] start of each token's assignments in slots
    slots          [assignments] assignments, token by token
    starts         [experts + 1] start of each expert's assignments among this rank's
    bases          [experts] their start among the rows of the expert's rank
    totals         [ranks] number of rows of each rank
    local          [experts of this rank] number of rows of each

Rows are given by addresses, because most are in the memory of other ranks.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.dtypes import Array
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel

HEAD = 5
LINE = 64

# Prefetch distance, in lines that other cores own. Without it, stores would wait for one line after another.
AHEAD = 2048


def block_length(assignments: int, tokens: int, experts: int, ranks: int, local: int) -> int:
    """Return the length of a block."""
    return HEAD + 2 * assignments + tokens + 1 + 2 * experts + 1 + ranks + local


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def parts(block: Any) -> Any:
    """Return (tokens, token_starts, slots, starts, bases, totals, local)."""
    n, tokens, experts, ranks, local = block[0], block[1], block[2], block[3], block[4]
    a = HEAD + n
    b = a + tokens + 1
    c = b + n
    d = c + experts + 1
    e = d + experts
    f = e + ranks
    return block[HEAD:a], block[a:b], block[b:c], block[c:d], block[d:e], block[e:f], block[f : f + local]


def parts_of(block: Array) -> tuple[Array, ...]:
    """Return the same as `parts`, for Python."""
    n, tokens, experts, ranks, local = block[:HEAD].tolist()
    parts, at = [], HEAD
    for length in (n, tokens + 1, n, experts + 1, experts, ranks, local):
        parts.append(block[at : at + length])
        at += length
    return tuple(parts)


@kernel(nogil=True)
def write_block(
    counts: Any, order: Any, owners: Any, rank: int, tokens: Any, token_starts: Any, slots: Any, block: Any
) -> None:
    """Write a plan's block. counts: of assignments, [ranks, experts]. order: experts by rank. owners: their ranks."""
    ranks, experts = counts.shape
    local: Any = 0
    for expert in range(experts):
        local += owners[expert] == rank
    block[0], block[1], block[2], block[3], block[4] = len(tokens), len(token_starts) - 1, experts, ranks, local
    own_tokens, own_starts, own_slots, starts, bases, totals, rows = parts(block)
    own_tokens[:] = tokens
    own_starts[:] = token_starts
    own_slots[:] = slots
    starts[0] = 0
    for expert in range(experts):
        starts[expert + 1] = starts[expert] + counts[rank, expert]
    totals[:] = 0
    place = 0
    for expert in order:
        owner = owners[expert]
        before = totals[owner]
        for source in range(ranks):
            if source == rank:
                bases[expert] = totals[owner]
            totals[owner] += counts[source, expert]
        if owner == rank:
            rows[place] = totals[owner] - before
            place += 1


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def pad_bytes(nbytes: int) -> int:
    """Return the offset of the numbers that follow rows of `nbytes` bytes: the next cache line."""
    return (nbytes + LINE - 1) // LINE * LINE


@kernel(nogil=True)
def bytes_needed(block: Any, item_bytes: int, numbers: bool, sizes: Any, chosen: Any, needs: Any) -> int:
    """Write the bytes that each rank's rows need; return the maximum if a rank has no region of this size, else 0.

    item_bytes: bytes of a row. numbers: whether each row has a float32. chosen: the region of each rank or -1. sizes:
    of all regions.
    """
    totals = parts(block)[5]
    most: Any = 0
    short = False
    for rank in range(len(totals)):
        rows = np.int64(totals[rank])
        need = pad_bytes(rows * item_bytes) + 4 * rows if numbers else rows * item_bytes
        needs[rank] = need
        most = max(most, need)
        short = short or chosen[rank] < 0 or sizes[chosen[rank]] < need
    return max(most, 1) if short else 0


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def prefetch_row(at: int, item_bytes: int) -> None:
    """Prefetch the memory to write soon, about one row ahead, because readers have it in their caches."""
    for line in range(AHEAD, AHEAD + item_bytes, LINE):
        ins.prefetch_to_write(at + line)


@kernel(nogil=True)
def put_rows(block: Any, owners: Any, source: int, item_bytes: int, numbers: int, bases: Any, chosen: Any) -> None:
    """Copy the rows of tokens, at `source`, to their experts' regions, and numbers, at `numbers` unless 0.

    bases: address of each region of each rank, [regions, ranks]. chosen: the region of each rank.
    """
    tokens, _, _, starts, offsets, totals, _ = parts(block)
    for expert in range(len(offsets)):
        owner = owners[expert]
        begin = bases[chosen[owner], owner]
        at = begin + offsets[expert] * item_bytes
        for i in range(starts[expert], starts[expert + 1]):
            ins.memcpy(at, source + tokens[i] * item_bytes, item_bytes)
            prefetch_row(at, item_bytes)
            at += item_bytes
        if numbers != 0:
            at = begin + pad_bytes(totals[owner] * item_bytes) + 4 * offsets[expert]
            ins.memcpy(at, numbers + 4 * starts[expert], 4 * (starts[expert + 1] - starts[expert]))


@kernel(nogil=True)
def find_rows(
    block: Any,
    owners: Any,
    rank: int,
    item_bytes: int,
    bases: Any,
    chosen: Any,
    own: int,
    gates: Any,
    addresses: Any,
    factors: Any,
) -> None:
    """Write the address of each assignment's row, and its remaining factor.

    Rows of this rank's experts are at `own`, unscaled, with their factors in `gates`, unless that is empty.
    """
    _, _, _, starts, offsets, _, _ = parts(block)
    for expert in range(len(offsets)):
        owner = owners[expert]
        begin = own if owner == rank else bases[chosen[owner], owner]
        for i in range(starts[expert], starts[expert + 1]):
            row = offsets[expert] + i - starts[expert]
            addresses[i] = begin + row * item_bytes
            factors[i] = gates[row] if owner == rank and len(gates) > 0 else np.float32(1)


@kernel(nogil=True)
def take_numbers(
    block: Any, owners: Any, rank: int, item_bytes: int, bases: Any, chosen: Any, own: Any, out: Any
) -> None:
    """Take the number of each assignment from behind the rows, for this rank's experts from `own`."""
    _, _, _, starts, offsets, totals, _ = parts(block)
    for expert in range(len(offsets)):
        owner, count = owners[expert], starts[expert + 1] - starts[expert]
        at = own.ctypes.data if owner == rank else bases[chosen[owner], owner] + pad_bytes(totals[owner] * item_bytes)
        ins.memcpy(out.ctypes.data + 4 * starts[expert], at + 4 * offsets[expert], 4 * count)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def next_of_others(block: Any, owners: Any, order: Any, rank: int, row: int, place: int) -> Any:
    """Return the next span of rows from `row` on that other ranks have sent: (start, stop, next row, next place).

    place: the number of experts, by `order`, already processed. A span with start >= stop has no rows.
    """
    _, _, _, starts, offsets, totals, _ = parts(block)
    while place < len(order):
        expert = order[place]
        place += 1
        if owners[expert] == rank:
            own = offsets[expert]
            return row, own, own + starts[expert + 1] - starts[expert], place
    return row, totals[rank], totals[rank], place + 1


@kernel(nogil=True)
def publish_rows(block: Any, owners: Any, order: Any, rank: int, item_bytes: int, rows: int, target: int) -> None:
    """Copy the rows that other ranks have sent to `target`, each to its place."""
    row, place = 0, 0
    while place <= len(order):
        start, stop, row, place = next_of_others(block, owners, order, rank, row, place)
        for i in range(start, stop):
            at = target + i * item_bytes
            prefetch_row(at, item_bytes)
            ins.memcpy(at, rows + i * item_bytes, item_bytes)


@kernel(nogil=True)
def read_choices(every: Any, digest: int, chosen: Any) -> bool:
    """Read the region that each rank has chosen from an exchange; return whether all ranks agree on the plan.

    every: [ranks, numbers]; the first number is a digest of the rank's plan, the second its region.
    """
    same = True
    for rank in range(len(every)):
        same = same and every[rank, 0] == digest
        chosen[rank] = every[rank, 1]
    return same
