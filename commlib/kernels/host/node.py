"""Collectives within a node: one compiled call each, without the GIL, on memory that all ranks map.

Ranks synchronize at *epochs*: each rank's line of the board holds the number of the last epoch that it has reached. It
is written with release and read with acquire order. A call that publishes data writes the data, then its epoch; a call
that reads waits until the peers' lines show that epoch. Two slots of each kind (even and odd epochs) suffice: a rank
that reaches epoch e + 2 has seen all peers at e + 1, so all have finished reading the data published at e.

A rank's line also carries the call's signature (a hash of verb, dtype, count, operation, ...). Peers compare it with
their own before they touch any data, so a mismatch costs nothing to detect and corrupts nothing. The line also holds
the offset of the call's arrays in symmetric memory, 0 for ordinary arrays. If ranks make the same call on memory that
does not correspond, all of them detect it (PLACES_DIFFER) and fall back to the slots.

A rank that gives up the group in the middle of a call may have arrived before its peers. Its line therefore also holds
the epoch from which its arrivals are void: peers wait as if it had not arrived, until Python reports the reason.

All_reduce has special kernels. Every other verb is an *exchange*: a rank publishes parts of its array, and takes the
part for it from each peer, or combines these parts. Tables hold the offsets and lengths of parts.

The arguments of a kernel are in one int64 array, the *call*, whose fields are in `fields.node`. Passing its address
is the cheapest interface. A kernel can return in the middle of a wait (WAITING); the next call continues from that
point.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.fields.arrays import DATA
from commlib.kernels.fields.node import (
    ABANDONED,
    ARRIVED,
    BACKWARD,
    BOARD,
    BROKEN,
    CALL_FIELDS,
    CALLS,
    CONTROL,
    CONTROL_FIELDS,
    COUNT,
    COUNTS,
    DIVISOR,
    DONE,
    EPOCH,
    FAILED,
    INPUTS,
    ITEM_BYTES,
    LINE_BYTES,
    LONGEST,
    MISMATCH,
    NAP_MICROSECONDS,
    NAPS,
    OPERANDS,
    OUTPUTS,
    PARITY,
    PART_BYTES,
    PARTS,
    PLACE,
    PLACES,
    PLACES_DIFFER,
    POSITION,
    RANK,
    RECV_LENGTHS,
    RECV_OFFSETS,
    REDUCE,
    ROOT,
    SEND_LENGTHS,
    SEND_OFFSETS,
    SIGNATURE,
    SIGNATURES,
    SIZE,
    SLOT_BYTES,
    SLOTS,
    SOURCE,
    SPINS,
    STATE,
    TAKE,
    TARGET,
    WAITING,
    YIELDS,
)
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.stream import stream_copy
from commlib.kernels.host.waiting import LONG_WAIT, pause

_PASSED = -1  # within a kernel: this rank has done its part

# Bytes of each buffer that are reduced at once: far less than the L2 cache, far more than the cost of a call.
TILE_BYTES = 1 << 16

# From this size on, results of other ranks are written to ordinary arrays past the caches, to keep other data in them.
STREAMED_BYTES = 4 << 20

# Polls for peers by a rank that only begins a call.
BEGINNING_SPINS = 200


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _call(address: int) -> Any:
    return nb.carray(ins.as_pointer(address), CALL_FIELDS, np.int64)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _control(call: Any) -> Any:
    return nb.carray(ins.as_pointer(call[CONTROL]), CONTROL_FIELDS, np.int64)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _table(address: int, length: int) -> Any:
    return nb.carray(ins.as_pointer(address), length, np.int64)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _count(call: Any, control: Any) -> None:
    """Count a call at its beginning."""
    if call[STATE] == 0:
        control[CALLS] += call[COUNTS]


@kernel(nogil=True)
def _arrive(call: Any, control: Any) -> None:
    """Reach the next epoch, and publish it."""
    control[EPOCH] += 1
    epoch = control[EPOCH]
    line = control[BOARD] + control[RANK] * LINE_BYTES
    ins.store_release(line + SIGNATURES + 8 * (epoch & 1), call[SIGNATURE])
    ins.store_release(line + PLACES + 8 * (epoch & 1), call[PLACE])
    ins.store_release(line + ARRIVED, epoch)


@kernel(nogil=True)
def _await_peers(call: Any, control: Any) -> int:
    """Wait until every rank has reached this rank's epoch with the same signature."""
    epoch, size, board = control[EPOCH], control[SIZE], control[BOARD]
    polls = 0
    verdict = DONE
    for step in range(1, size):
        peer = (control[RANK] + step) % size
        line = board + peer * LINE_BYTES
        while ins.load_acquire(line + ARRIVED) < epoch or ins.load_acquire(line + ABANDONED) <= epoch:
            polls = pause(polls, call[SPINS], call[YIELDS], call[NAPS], call[NAP_MICROSECONDS])
            if polls == LONG_WAIT:
                return WAITING
        # Even after a mismatch, wait for the other ranks: all ranks leave at the same epoch.
        if ins.load_acquire(line + SIGNATURES + 8 * (epoch & 1)) != call[SIGNATURE]:
            verdict = MISMATCH
        elif verdict == DONE and ins.load_acquire(line + PLACES + 8 * (epoch & 1)) != call[PLACE]:
            verdict = PLACES_DIFFER
    return verdict


@kernel(nogil=True)
def barrier(address: int) -> int:
    """Wait for all ranks."""
    call = _call(address)
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    _count(call, control)
    if call[STATE] == 0:
        _arrive(call, control)
        call[STATE] = 1
    status = _await_peers(call, control)
    if status != WAITING:
        call[STATE] = 0
    return status


@kernel(nogil=True)
def _enter(call: Any, control: Any) -> int:
    """Synchronize before symmetric memory is touched.

    DONE: process your part; _PASSED: already processed; else return it.
    """
    if control[FAILED] != 0:
        return BROKEN
    _count(call, control)
    if call[STATE] == 2:
        return _PASSED
    if call[STATE] == 0:
        _arrive(call, control)
        call[STATE] = 1
    status = _await_peers(call, control)
    if status not in (DONE, WAITING):
        call[STATE] = 0
    return status


@kernel(nogil=True)
def _leave(call: Any, control: Any, status: int) -> int:
    """Synchronize again after this rank has processed its part, if `_enter` returned DONE: no rank leaves early."""
    if status == DONE:
        _arrive(call, control)
        call[STATE] = 2
    elif status != _PASSED:
        return status
    status = _await_peers(call, control)
    if status != WAITING:
        call[STATE] = 0
    return status


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def own_share(count: int, item_bytes: int, rank: int, size: int) -> Any:
    """Return the part [start, stop) of `count` elements that `rank` reduces: full cache lines, nearly equal shares."""
    unit = max(1, 64 // item_bytes)
    units = (count + unit - 1) // unit
    return min(count, units * rank // size * unit), min(count, units * (rank + 1) // size * unit)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _reduce_share(call: Any, size: int, n_outputs: int, start: int, stop: int) -> None:
    """Reduce the elements [start, stop) of INPUTS into OUTPUTS, tile by tile, from alternating ends.

    The last tiles of a pass are still in the cache when the next pass begins with them. A pass from the same end would
    find none of its data if a buffer is larger than the cache.
    """
    item = call[ITEM_BYTES]
    tile = TILE_BYTES // item
    tiles = (stop - start + tile - 1) // tile
    for step in range(tiles):
        first = start + tile * (tiles - 1 - step if call[BACKWARD] else step)
        length = min(tile, stop - first)
        ins.call_reduce(call[REDUCE], call[INPUTS], size, call[OUTPUTS], n_outputs, first * item, length, call[DIVISOR])
    call[BACKWARD] ^= 1


@kernel(nogil=True)
def all_reduce_symmetric(address: int) -> int:
    """All-reduce in symmetric memory: reduce this rank's share from all ranks' buffers into all ranks' buffers."""
    call = _call(address)
    control = _control(call)
    status = _enter(call, control)
    if status == DONE:
        size = control[SIZE]
        start, stop = own_share(call[COUNT], call[ITEM_BYTES], control[RANK], size)
        if stop > start:
            _reduce_share(call, size, size, start, stop)
    return _leave(call, control, status)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_except(target: int, source: int, start: int, stop: int, length: int) -> None:
    """Copy `length` bytes except those in [start, stop)."""
    ins.memcpy(target, source, start)
    ins.memcpy(target + stop, source + stop, length - stop)


@kernel(nogil=True)
def all_reduce_staged(address: int) -> int:
    """All-reduce of ordinary arrays, piece by piece, through slots that are then reduced like symmetric memory.

    It takes two barriers per piece, but each rank reduces only its share: best for large arrays on more than two ranks.
    A rank's own share goes from its source directly into its target, because no other rank needs it in the slot.
    """
    call = _call(address)
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    _count(call, control)
    rank, size, item = control[RANK], control[SIZE], call[ITEM_BYTES]
    slots, inputs, outputs = _table(control[SLOTS], size), _table(call[INPUTS], size), _table(call[OUTPUTS], size)
    piece = control[SLOT_BYTES] // item
    while True:
        position = call[POSITION]
        length = min(piece, call[COUNT] - position)
        start, stop = own_share(length, item, rank, size)
        source, target = call[SOURCE] + position * item, call[TARGET] + position * item
        if call[STATE] == 0:
            if position == 0:
                call[PARITY] = (control[EPOCH] + 1) & 1  # a peer may still read the data published at this epoch
            # The two barriers of a piece preserve the parity of the epoch: count pieces instead.
            slot = ((call[PARITY] + position // piece) & 1) * control[SLOT_BYTES]
            for peer in range(size):
                inputs[peer] = outputs[peer] = slots[peer] + slot
            _copy_except(inputs[rank], source, start * item, stop * item, length * item)
            inputs[rank], outputs[rank] = source, target
            _arrive(call, control)
            call[STATE] = 1
        if call[STATE] == 1:
            status = _await_peers(call, control)
            if status == WAITING:
                return WAITING
            if status != DONE:
                call[STATE] = 0
                call[POSITION] = 0
                return status
            if stop > start:
                ins.call_reduce(
                    call[REDUCE], call[INPUTS], size, call[OUTPUTS], size, start * item, stop - start, call[DIVISOR]
                )
            _arrive(call, control)
            call[STATE] = 2
        if _await_peers(call, control) == WAITING:
            return WAITING
        slot = ((call[PARITY] + position // piece) & 1) * control[SLOT_BYTES]
        published = slots[rank] + slot
        if call[COUNT] * item < STREAMED_BYTES:
            _copy_except(target, published, start * item, stop * item, length * item)
        else:
            stream_copy(target, published, start * item)
            stream_copy(target + stop * item, published + stop * item, (length - stop) * item)
        call[STATE] = 0
        call[POSITION] = position + length
        if call[POSITION] >= call[COUNT]:
            call[POSITION] = 0
            return DONE


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _move(target: int, source: int, length: int) -> None:
    if length > 0 and target != source:  # in place, some data is already at its target
        ins.memcpy(target, source, length)


@kernel(nogil=True)
def exchange_symmetric(address: int) -> int:
    """Exchange between symmetric arrays: copy this rank's part directly out of every rank's array.

    INPUTS holds the address of this rank's part in each rank's array. Ranks synchronize before any data is read, and
    after all have read.
    """
    call = _call(address)
    control = _control(call)
    status = _enter(call, control)
    if status == DONE:
        rank, size = control[RANK], control[SIZE]
        offsets, lengths = _table(call[RECV_OFFSETS], size), _table(call[RECV_LENGTHS], size)
        if call[REDUCE] == 0:
            inputs = _table(call[INPUTS], size)
            for step in range(size):  # every rank begins with a different peer
                peer = (rank + step) % size
                _move(call[TARGET] + offsets[peer], inputs[peer], lengths[peer])
        elif lengths[rank] > 0:
            _table(call[OUTPUTS], 1)[0] = call[TARGET] + offsets[rank]
            _reduce_share(call, call[OPERANDS], 1, 0, lengths[rank] // call[ITEM_BYTES])
    return _leave(call, control, status)


@kernel(nogil=True)
def broadcast_symmetric(address: int) -> int:
    """Broadcast COUNT bytes in symmetric memory: every rank, including the root, copies its share to all ranks.

    INPUTS holds the address of each rank's array. If each rank copied everything itself, the root's core would be idle,
    and the root's memory would be read once per rank.
    """
    call = _call(address)
    control = _control(call)
    status = _enter(call, control)
    if status == DONE:
        size, root = control[SIZE], call[ROOT]
        inputs = _table(call[INPUTS], size)
        start, stop = own_share(call[COUNT], 1, control[RANK], size)
        for first in range(start, stop, TILE_BYTES):
            length = min(TILE_BYTES, stop - first)
            for peer in range(size):
                if peer != root:
                    ins.memcpy(inputs[peer] + first, inputs[root] + first, length)
    return _leave(call, control, status)


@kernel(nogil=True)
def exchange_staged(address: int) -> int:
    """Exchange between ordinary arrays, piece by piece: publish a piece of each part, then copy those of all ranks.

    It takes one barrier per piece: while some ranks still read one slot, others fill the next.
    """
    call = _call(address)
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    _count(call, control)
    rank, size, item = control[RANK], control[SIZE], call[ITEM_BYTES]
    parts, room, take = call[PARTS], call[PART_BYTES], call[TAKE]
    slots = _table(control[SLOTS], size)
    from_offsets, from_lengths = _table(call[SEND_OFFSETS], parts), _table(call[SEND_LENGTHS], parts)
    to_offsets, to_lengths = _table(call[RECV_OFFSETS], size), _table(call[RECV_LENGTHS], size)
    while True:
        position = call[POSITION]
        if call[STATE] == 0:
            slot = slots[rank] + ((control[EPOCH] + 1) & 1) * control[SLOT_BYTES]
            for part in range(parts):
                if parts == 1 or part != take:  # the part for this rank need not be published
                    length = min(room, from_lengths[part] - position)
                    _move(slot + part * room, call[SOURCE] + from_offsets[part] + position, length)
            _arrive(call, control)
            call[STATE] = 1
        status = _await_peers(call, control)
        if status == WAITING:
            return WAITING
        call[STATE] = 0
        if status != DONE:
            call[POSITION] = 0
            return status
        shift = (control[EPOCH] & 1) * control[SLOT_BYTES] + take * room
        # A result that overlaps the source can no longer damage published data.
        own = slots[rank] + shift if parts == 1 else call[SOURCE] + from_offsets[take] + position
        if call[REDUCE] == 0:
            for step in range(size):
                peer = (rank + step) % size
                piece = own if peer == rank else slots[peer] + shift
                _move(call[TARGET] + to_offsets[peer] + position, piece, min(room, to_lengths[peer] - position))
        elif to_lengths[rank] > position:
            inputs = _table(call[INPUTS], size)
            for peer in range(size):
                inputs[peer] = slots[peer] + shift
            inputs[rank] = own
            _table(call[OUTPUTS], 1)[0] = call[TARGET] + to_offsets[rank] + position
            count = min(room, to_lengths[rank] - position) // item
            ins.call_reduce(call[REDUCE], call[INPUTS], call[OPERANDS], call[OUTPUTS], 1, 0, count, call[DIVISOR])
        call[POSITION] = position + room
        if call[POSITION] >= call[LONGEST]:
            call[POSITION] = 0
            return DONE


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _set_arrays(call: Any, source: int, target: int) -> None:
    call[SOURCE], call[TARGET] = ins.load_acquire(source + DATA), ins.load_acquire(target + DATA)


@kernel(nogil=True)
def begin_exchange(address: int) -> int:
    """Run `exchange_staged`, but return WAITING soon; this rank's first piece is published by then."""
    call = _call(address)
    spins, yields, naps = call[SPINS], call[YIELDS], call[NAPS]
    call[SPINS], call[YIELDS], call[NAPS] = min(spins, BEGINNING_SPINS), 0, 0
    status = exchange_staged(address)
    call[SPINS], call[YIELDS], call[NAPS] = spins, yields, naps
    return status


@kernel()
def copy_from_array(target: int, array: int, nbytes: int) -> int:
    """Copy a contiguous numpy array, given by its `id`, to an address. For small data, numpy takes thrice as long."""
    return ins.memcpy(target, _table(array + DATA, 1)[0], nbytes)


@kernel()
def copy_to_array(array: int, source: int, nbytes: int) -> int:
    """Copy bytes at an address into a contiguous numpy array, given by its `id`."""
    return ins.memcpy(_table(array + DATA, 1)[0], source, nbytes)


@kernel()
def all_equal(address: int) -> int:
    """Return whether int64 numbers all equal another one, given (their address, their count, its address)."""
    written = _table(address, 3)
    numbers, expected = _table(written[0], written[1]), _table(written[2], 1)[0]
    for number in numbers:  # numba has no generators
        if number != expected:
            return 0
    return 1
