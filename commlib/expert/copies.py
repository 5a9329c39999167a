"""Copies: tokens between ranks that share no memory. A token goes to a rank once, however many experts it has there.

What a rank gets are *copies* of tokens, rank by rank, and which of its experts want each; what comes back is one row
for each copy. The passage has, as int32, what both ends need:

    copied        [sent] the token of each copy that this rank sends, by rank, then by token
    by_token      [sent] the same copies token by token, and where each token's begin [tokens + 1]
    order         [assignments] this rank's assignments as they are told to others: by rank, expert, token
    copy_of       [rows] which copy each row is of, in the order in which experts have their rows
    told          [rows] where each row was among those that others told
    by_copy       [rows] the rows copy by copy, and where each copy's begin [received + 1]
    sends, takes  [ranks] how many copies go to each rank, and come from it
    tells, hears  [ranks] how many assignments
    local         [experts here] rows of each
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from commlib.buffers.views import address_of
from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.dtypes import Array
from commlib.expert.exchange import Empty
from commlib.expert.passage import Assigned, Passage
from commlib.expert.placement import Placement
from commlib.expert.regions import Meeting, digest_for, lines
from commlib.kernels.host.rows import sum_rows


class Parts(NamedTuple):
    """What is in a passage."""

    copied: Array
    by_token: Array
    token_starts: Array
    order: Array
    copy_of: Array
    told: Array
    by_copy: Array
    copy_starts: Array
    sends: Array
    takes: Array
    tells: Array
    hears: Array
    local: Array


class Copies:
    """Copies of tokens between the ranks of a communicator that nothing else uses.

    owners: the rank of each expert. codec: how floats travel, of a fixed length, or as they are.
    """

    def __init__(self, comm: Communicator, placement: Placement, codec: Codec | None = None) -> None:
        self._comm, self._codec = comm, codec
        self._owners, self._order = (np.array(each, np.int64) for each in (placement.owners, placement.order))
        self._own = np.array(placement.of_rank(comm.rank), np.int64)
        self._counting = Meeting(comm, len(placement.owners) + comm.size)

    def name(self, purpose: str) -> None:
        """Let what waits from now on say so: that it is of this layer and step."""
        self._comm.group.purpose = purpose

    def send(self, what: str, assigned: Assigned, x: Array, gates: Array) -> tuple[Passage, Array, Array]:
        """Send tokens, and a number for each assignment; return (passage, copies that came, the numbers of rows)."""
        self.name(f"{what}, dispatch")
        size, experts = self._comm.size, len(self._owners)
        call = what, "dispatch", x.shape[1], x.dtype
        counts, tokens = assigned.counts, assigned.tokens.astype(np.int64)
        # The copies that this rank sends.
        number = max(len(x), 1)
        wanted, which = np.unique(np.repeat(self._owners, counts) * number + tokens, return_inverse=True)
        copied = wanted % number
        sends = np.bincount(wanted // number, minlength=size)
        every = self._met(call, [*counts, *sends])
        by_token = np.argsort(copied, kind="stable")
        order = _segments(np.cumsum([0, *counts]), self._order)
        tells = np.bincount(self._owners, weights=counts, minlength=size).astype(np.int64)
        firsts = np.repeat(np.cumsum([0, *sends])[:-1], tells)  # of the rank's copies, for each assignment told
        # What comes here.
        takes, here = every[:, experts + self._comm.rank], every[:, self._own]
        hears = here.sum(1)
        came = self._move(x[copied], sends, takes, (which[order] - firsts).astype(np.int32), gates[order], tells, hears)
        copies, numbers, heard = came
        heard += np.repeat(np.cumsum([0, *takes])[:-1], hears).astype(np.int32)
        expert_of = np.repeat(np.tile(np.arange(len(self._own)), size), here.reshape(-1))
        told = np.argsort(expert_of, kind="stable")
        copy_of = heard[told]
        passage = packed(
            copied=copied,
            by_token=by_token,
            token_starts=_starts(copied, len(x)),
            order=order,
            copy_of=copy_of,
            told=told,
            by_copy=np.argsort(copy_of, kind="stable"),
            copy_starts=_starts(copy_of, int(takes.sum())),
            sends=sends,
            takes=takes,
            tells=tells,
            hears=hears,
            local=here.sum(0),
        )
        return passage, copies, numbers[told]

    def send_again(self, p: Parts, x: Array) -> Array:
        """Send other rows for the same tokens; return the copies that came."""
        return self._move(x[p.copied], p.sends, p.takes)[0]

    def send_back(self, p: Parts, copies: Array, numbers: Array | None, empty: Empty) -> tuple[Array, Any]:
        """Send a row for each copy back, and a number for each row; return sums by token, and numbers by assignment."""
        if numbers is None:
            came, found = self._move(copies, p.takes, p.sends)[0], None
        else:
            told = np.empty_like(numbers)
            told[p.told] = numbers
            came, heard, _ = self._move(copies, p.takes, p.sends, None, told, p.hears, p.tells)
            found = np.empty_like(heard)
            found[p.order] = heard
        sums: Array = empty((len(p.token_starts) - 1, copies.shape[1]), copies.dtype)
        add_up(sums, p.token_starts, p.by_token, came, np.ones(len(came), np.float32))
        return sums, found

    def _met(self, call: tuple[object, ...], numbers: Sequence[int]) -> Array:
        meeting = self._counting
        meeting.own[0], meeting.own[2:] = digest_for(call), numbers
        meeting.gather()
        if (meeting.every[:, 0] != meeting.own[0]).any():
            check_agreement(self._comm, "experts", lines(call))
        return meeting.told.copy()

    def _move(
        self,
        rows: Array,
        sends: Array,
        takes: Array,
        indices: Array | None = None,
        numbers: Array | None = None,
        tells: Array | None = None,
        hears: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Send rows, and an index and a number for each assignment; return those that come."""
        size = self._comm.size
        width, item = rows.shape[1], rows.itemsize * rows.shape[1]
        messages, splits, at, told = list[Array](), list[int](), 0, 0
        for peer in range(size):
            count, more = int(sends[peer]), 0 if tells is None else int(tells[peer])
            message = [self._encoded(rows[at : at + count])]
            if indices is not None:
                message.append(indices[told : told + more].view(np.uint8))
            if numbers is not None:
                message.append(numbers[told : told + more].view(np.uint8))
            messages += message
            splits.append(sum(map(len, message)))
            at, told = at + count, told + more
        extra = 4 * ((indices is not None) + (numbers is not None))
        heard = [0] * size if hears is None else hears.tolist()
        wanted = [self._payload(count, item, width) + extra * n for count, n in zip(takes.tolist(), heard, strict=True)]
        came, _ = self._comm.all_to_all_v(np.concatenate(messages), splits, takes=wanted)
        ends = [0, *accumulate(wanted)]
        found = np.empty((int(takes.sum()), width), rows.dtype)
        their_indices, their_numbers = np.empty(sum(heard), np.int32), np.empty(sum(heard), np.float32)
        at = told = 0
        for peer in range(size):
            message_in, count, more = came[ends[peer] : ends[peer + 1]], int(takes[peer]), heard[peer]
            rest = self._payload(count, item, width)
            self._decoded(message_in[:rest], found[at : at + count])
            if indices is not None:
                their_indices[told : told + more] = message_in[rest : rest + 4 * more].view(np.int32)
                rest += 4 * more
            if numbers is not None:
                their_numbers[told : told + more] = message_in[rest:].view(np.float32)
            at, told = at + count, told + more
        return found, their_numbers, their_indices

    def _payload(self, count: int, item: int, width: int) -> int:
        """Return the bytes of so many rows: a multiple of 4."""
        return -(-(count * item if self._codec is None else self._codec.payload_bytes(count * width)) // 4) * 4

    def _encoded(self, rows: Array) -> Array:
        flat = rows.reshape(-1)
        payload = flat.view(np.uint8) if self._codec is None else encode(self._codec, flat)
        missing = self._payload(len(rows), rows.itemsize * rows.shape[1], rows.shape[1]) - len(payload)
        return np.concatenate([payload, np.zeros(missing, np.uint8)]) if missing else payload

    def _decoded(self, payload: Array, out: Array) -> None:
        if self._codec is None:
            out.reshape(-1).view(np.uint8)[:] = payload[: out.nbytes]
        else:
            decode(self._codec, payload, out)


def packed(**parts: Array) -> Passage:
    """Return a passage of its parts."""
    each = [parts[name] for name in Parts._fields]
    return np.concatenate([np.array([len(part) for part in each]), *each], dtype=np.int32, casting="unsafe")


def unpacked(passage: Passage) -> Parts:
    """Return the parts of a passage."""
    count = len(Parts._fields)
    ends = accumulate(passage[:count].tolist(), initial=count)
    return Parts(*(passage[start:stop] for start, stop in pairwise(ends)))


def _starts(numbers: Array, count: int) -> Array:
    """Return where each of `count` numbers begins in a sorted list of these."""
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=count), out=starts[1:])
    return starts


def _segments(starts: Array, order: Array) -> Array:
    """Return the numbers of all segments, those from starts[e] to starts[e + 1], in another order of these."""
    return np.concatenate([np.arange(starts[each], starts[each + 1]) for each in order])


def add_up(sums: Array, starts: Array, members: Array, rows: Array, factors: Array) -> None:
    """Let sums be those of rows, times factors: of members[starts[i] : starts[i + 1]] each."""
    addresses = address_of(rows) + np.arange(len(rows)) * (rows.itemsize * rows.shape[1])
    sum_rows(sums, starts, members, addresses, factors)
