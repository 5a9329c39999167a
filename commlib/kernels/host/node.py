"""Whole collectives among the ranks of a node, each ONE compiled call without the GIL, over memory that all map.

Ranks meet at *epochs*: each rank's line of the board holds the number of the last epoch it has reached, written with
release and read with acquire order. A call that publishes data writes it, then its epoch; a call that reads waits
until the peers' lines show that epoch. Two slots of each kind (even and odd epochs) suffice: a rank that reaches epoch
e + 2 has seen all peers at e + 1, so all have finished reading what was published at e.

A rank's line also carries the call's signature (a hash of verb, dtype, count, operation, ...). Peers compare it with
their own before they touch any data, so a mismatch costs nothing to detect and corrupts nothing. Beside it stands the
place of the call's arrays in symmetric memory, 0 for ordinary ones. If ranks call the same thing on memory that does
not correspond, all of them see that (APART), and all of them fall back to the slots.

A rank that gives up the group in the middle of a call may have arrived there before its peers. So its line also holds
the epoch from which on its arrivals count for nothing: peers wait as if it had not come, until Python says why.

Besides all_reduce, which has kernels of its own, every verb is an *exchange*: a rank publishes parts of its array, and
takes from each peer, or combines, the part that is meant for it. Tables say where parts begin and how long they are.

Everything a kernel needs is in one int64 array, the *call*, whose fields are the constants below: passing its address
costs least, and the kernel can return in the middle of a wait (WAITING) and be called again to go on from there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numba as nb
import numpy as np
from numba.core import types

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compiled import kernel
from commlib.kernels.host.stream import stream_copy
from commlib.kernels.host.waiting import ASK, pause

# What a kernel returns.
DONE, WAITING, MISMATCH, BROKEN, APART = range(5)
_PASSED = -1  # within a kernel: this rank has done its part

# The board: one line per rank, two cache lines wide because CPUs prefetch in pairs. Byte offsets in a line:
LINE_BYTES, ARRIVED, GIVEN_UP, SIGNATURES, PLACES = 128, 0, 8, 16, 32

# What GIVEN_UP holds while a rank has not given up.
NEVER = 1 << 62

# How much of each buffer is reduced at once: far less than the L2 cache, far more than a call costs.
TILE_BYTES = 1 << 16

# Ordinary arrays from here on get what others reduced past the caches, which it would drive other data out of.
STREAMED_BYTES = 4 << 20

# How often a rank that only begins a call polls for its peers.
BEGINNING_SPINS = 200

# Fields of the control array, one for each communicator and rank. SLOTS is the address of a table of P addresses.
# FAILED is set once the ranks are out of step; every kernel then returns BROKEN at once. CALLS are those of the user.
EPOCH, RANK, SIZE, BOARD, SLOTS, SLOT_BYTES, FAILED, CALLS, CONTROL_FIELDS = range(9)

# Fields of a call.
(
    CONTROL,  # address of the control array
    STATE,  # where a kernel that returned WAITING goes on; 0 to begin
    POSITION,  # elements (in an exchange: bytes of each part) done, for kernels that work piece by piece
    PARITY,  # which slot the first piece of all_reduce_staged uses
    SIGNATURE,
    PLACE,
    REDUCE,  # address of the arithmetic; 0 in an exchange that only moves data
    INPUTS,  # address of a table of P addresses, in rank order
    OUTPUTS,
    COUNT,  # elements
    ITEM_BYTES,
    DIVISOR,
    SPINS,  # polls before the first yield
    YIELDS,  # yields before the first nap
    NAPS,  # naps before WAITING is returned
    NAP_MICROSECONDS,
    SOURCE,  # address of this rank's own array, and of the result
    TARGET,
    BACKWARD,  # whether the next sweep over this rank's share begins at its end; it alternates
    PARTS,  # of an exchange: into how many parts each rank's array is cut: one that all take, or one for each rank
    PART_BYTES,  # room for each part in a slot
    TAKE,  # which part of everybody's array this rank takes
    LONGEST,  # bytes of the longest part of any rank: all ranks go through as many pieces
    SEND_OFFSETS,  # addresses of tables: bytes from SOURCE to each part, and its length
    SEND_LENGTHS,
    RECV_OFFSETS,  # bytes from TARGET to where what each peer has for this rank goes, and its length
    RECV_LENGTHS,
    ROOT,  # of a broadcast
    COUNTS,  # 1 for a call of the user's, 0 for a part of one
    CALL_FIELDS,
) = range(30)


@cache
def entry_point(kernel: Any, n_arguments: int = 1) -> Callable[..., int]:
    """Return the compiled function behind a kernel, which takes the address of a call and returns a status.

    Called by itself it costs half of what the dispatcher does, which looks up types that never change here.
    """
    signature = (types.int64,) * n_arguments
    kernel.compile(signature)
    return kernel.overloads[signature].entry_point


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
    """Count a call that begins."""
    if call[STATE] == 0:
        control[CALLS] += call[COUNTS]


@kernel(nogil=True)
def _arrive(call: Any, control: Any) -> None:
    """Reach the next epoch, and say so."""
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
        while ins.load_acquire(line + ARRIVED) < epoch or ins.load_acquire(line + GIVEN_UP) <= epoch:
            polls = pause(polls, call[SPINS], call[YIELDS], call[NAPS], call[NAP_MICROSECONDS])
            if polls == ASK:
                return WAITING
        # Whatever the verdict, wait for the others too: all ranks leave at the same epoch.
        if ins.load_acquire(line + SIGNATURES + 8 * (epoch & 1)) != call[SIGNATURE]:
            verdict = MISMATCH
        elif verdict == DONE and ins.load_acquire(line + PLACES + 8 * (epoch & 1)) != call[PLACE]:
            verdict = APART
    return verdict


@kernel(nogil=True)
def barrier(address: int) -> int:
    """Wait for everybody."""
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
def _meet_before(call: Any, control: Any) -> int:
    """Meet before symmetric memory is touched. DONE: do your part; _PASSED: it is done; else return that."""
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
def _meet_after(call: Any, control: Any, status: int) -> int:
    """Meet again if `_meet_before` returned DONE and this rank has done its part: nobody leaves before all have."""
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
    """Return the part [start, stop) of `count` elements that `rank` reduces: whole cache lines, nearly equal."""
    unit = max(1, 64 // item_bytes)
    units = (count + unit - 1) // unit
    return min(count, units * rank // size * unit), min(count, units * (rank + 1) // size * unit)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _reduce_share(call: Any, size: int, n_outputs: int, start: int, stop: int) -> None:
    """Reduce the elements [start, stop) of INPUTS into OUTPUTS, tile by tile, and the next time from the other end.

    What a sweep touched last is still in the cache when the next one begins there; a sweep from the same end would find
    nothing of what a buffer larger than the cache has left.
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
    """All-reduce in symmetric memory: reduce my share from all ranks' buffers straight into all ranks' buffers."""
    call = _call(address)
    control = _control(call)
    status = _meet_before(call, control)
    if status == DONE:
        size = control[SIZE]
        start, stop = own_share(call[COUNT], call[ITEM_BYTES], control[RANK], size)
        if stop > start:
            _reduce_share(call, size, size, start, stop)
    return _meet_after(call, control, status)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_but(target: int, source: int, start: int, stop: int, length: int) -> None:
    """Copy `length` bytes but those in [start, stop)."""
    ins.memcpy(target, source, start)
    ins.memcpy(target + stop, source + stop, length - stop)


@kernel(nogil=True)
def all_reduce_staged(address: int) -> int:
    """All-reduce of ordinary arrays, piece by piece, through slots that are then reduced like symmetric memory.

    Two meetings for each piece, but each rank reduces only its share: best for large arrays on more than two ranks.
    Its own share goes from its source straight into its target: nobody else needs that in its slot.
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
                call[PARITY] = (control[EPOCH] + 1) & 1  # a peer may still read what was published at this epoch
            # The two meetings of a piece leave the epoch's parity as it was: count pieces instead.
            slot = ((call[PARITY] + position // piece) & 1) * control[SLOT_BYTES]
            for peer in range(size):
                inputs[peer] = outputs[peer] = slots[peer] + slot
            _copy_but(inputs[rank], source, start * item, stop * item, length * item)
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
            _copy_but(target, published, start * item, stop * item, length * item)
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
    if length > 0 and target != source:  # in place, some data is where it belongs
        ins.memcpy(target, source, length)


@kernel(nogil=True)
def exchange_symmetric(address: int) -> int:
    """Exchange among symmetric arrays: take my part straight out of everybody's array.

    INPUTS holds where the part that this rank takes begins in each rank's array. One meeting before anything is read,
    one after all have read.
    """
    call = _call(address)
    control = _control(call)
    status = _meet_before(call, control)
    if status == DONE:
        rank, size = control[RANK], control[SIZE]
        offsets, lengths = _table(call[RECV_OFFSETS], size), _table(call[RECV_LENGTHS], size)
        if call[REDUCE] == 0:
            inputs = _table(call[INPUTS], size)
            for step in range(size):  # every rank begins with another one
                peer = (rank + step) % size
                _move(call[TARGET] + offsets[peer], inputs[peer], lengths[peer])
        elif lengths[rank] > 0:
            _table(call[OUTPUTS], 1)[0] = call[TARGET] + offsets[rank]
            _reduce_share(call, size, 1, 0, lengths[rank] // call[ITEM_BYTES])
    return _meet_after(call, control, status)


@kernel(nogil=True)
def broadcast_symmetric(address: int) -> int:
    """Broadcast COUNT bytes in symmetric memory: every rank, also the root, copies its share to all.

    INPUTS holds where each rank's array begins. If each took everything for itself, the root's core would have nothing
    to do, and the root's memory would be read once for every rank.
    """
    call = _call(address)
    control = _control(call)
    status = _meet_before(call, control)
    if status == DONE:
        size, root = control[SIZE], call[ROOT]
        inputs = _table(call[INPUTS], size)
        start, stop = own_share(call[COUNT], 1, control[RANK], size)
        for first in range(start, stop, TILE_BYTES):
            length = min(TILE_BYTES, stop - first)
            for peer in range(size):
                if peer != root:
                    ins.memcpy(inputs[peer] + first, inputs[root] + first, length)
    return _meet_after(call, control, status)


@kernel(nogil=True)
def exchange_staged(address: int) -> int:
    """Exchange among ordinary arrays, piece by piece: publish a piece of each of my parts, then take everybody's.

    One meeting for each piece: while some still read one slot, others fill the next.
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
                if parts == 1 or part != take:  # what nobody else takes need not be published
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
        # What has been published is safe from a result that overlaps the source.
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
            ins.call_reduce(call[REDUCE], call[INPUTS], size, call[OUTPUTS], 1, 0, count, call[DIVISOR])
        call[POSITION] = position + room
        if call[POSITION] >= call[LONGEST]:
            call[POSITION] = 0
            return DONE


# Where numpy's arrays keep the address of their data: it comes first in the C struct, after the object's head.
DATA = object.__basicsize__


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _set_arrays(call: Any, source: int, target: int) -> None:
    call[SOURCE], call[TARGET] = ins.load_acquire(source + DATA), ins.load_acquire(target + DATA)


@kernel(nogil=True)
def exchange_arrays(address: int, source: int, target: int) -> int:
    """Do `exchange_staged` on two numpy arrays, given by their `id`: in Python, asking for addresses costs as much."""
    _set_arrays(_call(address), source, target)
    return exchange_staged(address)


@kernel(nogil=True)
def begin_exchange(address: int) -> int:
    """Do `exchange_staged`, but return WAITING soon: this rank's first piece is then published."""
    call = _call(address)
    spins, yields, naps = call[SPINS], call[YIELDS], call[NAPS]
    call[SPINS], call[YIELDS], call[NAPS] = min(spins, BEGINNING_SPINS), 0, 0
    status = exchange_staged(address)
    call[SPINS], call[YIELDS], call[NAPS] = spins, yields, naps
    return status


@kernel(nogil=True)
def begin_exchange_of_arrays(address: int, source: int, target: int) -> int:
    """Do `begin_exchange` on two numpy arrays, given by their `id`."""
    _set_arrays(_call(address), source, target)
    return begin_exchange(address)


@kernel()
def copy_from_array(target: int, array: int, nbytes: int) -> int:
    """Copy a contiguous numpy array, given by its `id`, to an address. For little data: numpy takes thrice as long."""
    return ins.memcpy(target, _table(array + DATA, 1)[0], nbytes)


@kernel()
def copy_to_array(array: int, source: int, nbytes: int) -> int:
    """Copy what is at an address into a contiguous numpy array, given by its `id`."""
    return ins.memcpy(_table(array + DATA, 1)[0], source, nbytes)


@kernel()
def all_equal(address: int) -> int:
    """Return whether int64 numbers are all the same as another one: (their address, how many, its address)."""
    written = _table(address, 3)
    numbers, expected = _table(written[0], written[1]), _table(written[2], 1)[0]
    for number in numbers:  # numba has no generators
        if number != expected:
            return 0
    return 1


def arrays_are_where_expected() -> bool:
    """Return whether numpy's arrays are laid out as the kernels need it that are given arrays by their `id`."""
    probe = np.zeros(3)[1:]
    return bool(ctypes.c_int64.from_address(id(probe) + DATA).value == probe.ctypes.data)
