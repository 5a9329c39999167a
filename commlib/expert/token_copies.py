"""Token copies: tokens between ranks that share no memory. A token goes to a rank once, for all its experts there.

A rank receives *copies* of tokens, grouped by source rank, and the experts of each copy. It sends back one row for each
copy. The plan holds, as int32, the data needed on both sides:

    copied        [sent] the token of each copy that this rank sends, by rank, then by token
    by_token      [sent] the same copies token by token, and the start of each token's copies [tokens + 1]
    order         [assignments] this rank's assignments in the order in which they are sent: by rank, expert, token
    copy_of       [rows] the copy of each row, in the order of the experts' rows
    row_positions [rows] the position of each row among the assignments received
    by_copy       [rows] the rows copy by copy, and the start of each copy's rows [received + 1]
    sends, takes  [ranks] number of copies sent to each rank, and received from it
    send_counts, receive_counts  [ranks] number of assignments sent and received
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
from commlib.expert.dispatch_plan import Assignments, DispatchPlan
from commlib.expert.dispatcher import Empty
from commlib.expert.placement import ExpertPlacement
from commlib.expert.token_buffers import CountExchange, digest_for, lines
from commlib.kernels.host.rows import sum_rows


class CopyPlan(NamedTuple):
    """The arrays of a plan."""

    copied: Array
    by_token: Array
    token_starts: Array
    order: Array
    copy_of: Array
    row_positions: Array
    by_copy: Array
    copy_starts: Array
    sends: Array
    takes: Array
    send_counts: Array
    receive_counts: Array
    local: Array


class TokenCopies:
    """Copies of tokens between the ranks of a communicator that is used for nothing else.

    placement: the rank of each expert. codec: fixed-length codec for floats on the network; None: no encoding.
    """

    def __init__(self, comm: Communicator, placement: ExpertPlacement, codec: Codec | None = None) -> None:
        self._comm, self._codec = comm, codec
        self._owners, self._order = (np.array(each, np.int64) for each in (placement.owners, placement.order))
        self._own = np.array(placement.of_rank(comm.rank), np.int64)
        self._counting = CountExchange(comm, len(placement.owners) + comm.size)

    def name(self, purpose: str) -> None:
        """Set the purpose, a layer and step, that the group reports for calls that wait from now on."""
        self._comm.group.waits.purpose = purpose

    def send(self, what: str, assigned: Assignments, x: Array, gates: Array) -> tuple[DispatchPlan, Array, Array]:
        """Send tokens and a number for each assignment; return (plan, received copies, numbers of the rows)."""
        self.name(f"{what}, dispatch")
        size, experts = self._comm.size, len(self._owners)
        call = what, "dispatch", x.shape[1], x.dtype
        counts, tokens = assigned.counts, assigned.tokens.astype(np.int64)
        # The copies that this rank sends.
        number = max(len(x), 1)
        wanted, which = np.unique(np.repeat(self._owners, counts) * number + tokens, return_inverse=True)
        copied = wanted % number
        sends = np.bincount(wanted // number, minlength=size)
        every = self._exchange_counts(call, [*counts, *sends])
        by_token = np.argsort(copied, kind="stable")
        order = _segments(np.cumsum([0, *counts]), self._order)
        send_counts = np.bincount(self._owners, weights=counts, minlength=size).astype(np.int64)
        firsts = np.repeat(np.cumsum([0, *sends])[:-1], send_counts)  # each assignment's rank: its first copy
        # The copies and assignments received.
        takes, here = every[:, experts + self._comm.rank], every[:, self._own]
        receive_counts = here.sum(1)
        received = self._exchange(
            x[copied], sends, takes, (which[order] - firsts).astype(np.int32), gates[order], send_counts, receive_counts
        )
        copies, numbers, indices = received
        indices += np.repeat(np.cumsum([0, *takes])[:-1], receive_counts).astype(np.int32)
        expert_of = np.repeat(np.tile(np.arange(len(self._own)), size), here.reshape(-1))
        positions = np.argsort(expert_of, kind="stable")
        copy_of = indices[positions]
        plan = pack_plan(
            copied=copied,
            by_token=by_token,
            token_starts=_starts(copied, len(x)),
            order=order,
            copy_of=copy_of,
            row_positions=positions,
            by_copy=np.argsort(copy_of, kind="stable"),
            copy_starts=_starts(copy_of, int(takes.sum())),
            sends=sends,
            takes=takes,
            send_counts=send_counts,
            receive_counts=receive_counts,
            local=here.sum(0),
        )
        return plan, copies, numbers[positions]

    def send_again(self, p: CopyPlan, x: Array) -> Array:
        """Send other rows for the same tokens; return the received copies."""
        return self._exchange(x[p.copied], p.sends, p.takes)[0]

    def send_back(self, p: CopyPlan, copies: Array, numbers: Array | None, empty: Empty) -> tuple[Array, Any]:
        """Send a row for each copy back, and a number for each row; return sums by token, and numbers by assignment."""
        if numbers is None:
            received, result = self._exchange(copies, p.takes, p.sends)[0], None
        else:
            sent_numbers = np.empty_like(numbers)
            sent_numbers[p.row_positions] = numbers
            received, returned, _ = self._exchange(
                copies, p.takes, p.sends, None, sent_numbers, p.receive_counts, p.send_counts
            )
            result = np.empty_like(returned)
            result[p.order] = returned
        sums: Array = empty((len(p.token_starts) - 1, copies.shape[1]), copies.dtype)
        add_up(sums, p.token_starts, p.by_token, received, np.ones(len(received), np.float32))
        return sums, result

    def _exchange_counts(self, call: tuple[object, ...], numbers: Sequence[int]) -> Array:
        counting = self._counting
        counting.own[0], counting.own[2:] = digest_for(call), numbers
        counting.gather()
        if (counting.every[:, 0] != counting.own[0]).any():
            check_agreement(self._comm, "experts", lines(call))
        return counting.counts.copy()

    def _exchange(
        self,
        rows: Array,
        sends: Array,
        takes: Array,
        indices: Array | None = None,
        numbers: Array | None = None,
        send_counts: Array | None = None,
        receive_counts: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Send rows, and an index and a number for each assignment; return those received."""
        size = self._comm.size
        width, item = rows.shape[1], rows.itemsize * rows.shape[1]
        messages, splits, at, number_at = list[Array](), list[int](), 0, 0
        for peer in range(size):
            count, more = int(sends[peer]), 0 if send_counts is None else int(send_counts[peer])
            message = [self._encode(rows[at : at + count])]
            if indices is not None:
                message.append(indices[number_at : number_at + more].view(np.uint8))
            if numbers is not None:
                message.append(numbers[number_at : number_at + more].view(np.uint8))
            messages += message
            splits.append(sum(map(len, message)))
            at, number_at = at + count, number_at + more
        extra = 4 * ((indices is not None) + (numbers is not None))
        more_in = [0] * size if receive_counts is None else receive_counts.tolist()
        wanted = [
            self._payload(count, item, width) + extra * n for count, n in zip(takes.tolist(), more_in, strict=True)
        ]
        received, _ = self._comm.all_to_all_v(np.concatenate(messages), splits, takes=wanted)
        ends = [0, *accumulate(wanted)]
        rows_in = np.empty((int(takes.sum()), width), rows.dtype)
        their_indices, their_numbers = np.empty(sum(more_in), np.int32), np.empty(sum(more_in), np.float32)
        at = number_at = 0
        for peer in range(size):
            message_in, count, more = received[ends[peer] : ends[peer + 1]], int(takes[peer]), more_in[peer]
            rest = self._payload(count, item, width)
            self._decode(message_in[:rest], rows_in[at : at + count])
            if indices is not None:
                their_indices[number_at : number_at + more] = message_in[rest : rest + 4 * more].view(np.int32)
                rest += 4 * more
            if numbers is not None:
                their_numbers[number_at : number_at + more] = message_in[rest:].view(np.float32)
            at, number_at = at + count, number_at + more
        return rows_in, their_numbers, their_indices

    def _payload(self, count: int, item: int, width: int) -> int:
        """Return the bytes of `count` rows: a multiple of 4."""
        return -(-(count * item if self._codec is None else self._codec.payload_bytes(count * width)) // 4) * 4

    def _encode(self, rows: Array) -> Array:
        flat = rows.reshape(-1)
        payload = flat.view(np.uint8) if self._codec is None else encode(self._codec, flat)
        missing = self._payload(len(rows), rows.itemsize * rows.shape[1], rows.shape[1]) - len(payload)
        return np.concatenate([payload, np.zeros(missing, np.uint8)]) if missing else payload

    def _decode(self, payload: Array, out: Array) -> None:
        if self._codec is None:
            out.reshape(-1).view(np.uint8)[:] = payload[: out.nbytes]
        else:
            decode(self._codec, payload, out)


def pack_plan(**parts: Array) -> DispatchPlan:
    """Pack these arrays into a plan."""
    each = [parts[name] for name in CopyPlan._fields]
    return np.concatenate([np.array([len(part) for part in each]), *each], dtype=np.int32, casting="unsafe")


def unpack_plan(plan: DispatchPlan) -> CopyPlan:
    """Return the arrays of a plan."""
    count = len(CopyPlan._fields)
    ends = accumulate(plan[:count].tolist(), initial=count)
    return CopyPlan(*(plan[start:stop] for start, stop in pairwise(ends)))


def _starts(numbers: Array, count: int) -> Array:
    """Return the start of each of `count` numbers in their sorted list."""
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=count), out=starts[1:])
    return starts


def _segments(starts: Array, order: Array) -> Array:
    """Return the indices of all segments, starts[e] to starts[e + 1], with the segments permuted by `order`."""
    return np.concatenate([np.arange(starts[each], starts[each + 1]) for each in order])


def add_up(sums: Array, starts: Array, members: Array, rows: Array, factors: Array) -> None:
    """Write to sums[i] the sum of the rows in members[starts[i] : starts[i + 1]], weighted by factors."""
    addresses = address_of(rows) + np.arange(len(rows)) * (rows.itemsize * rows.shape[1])
    sum_rows(sums, starts, members, addresses, factors)
