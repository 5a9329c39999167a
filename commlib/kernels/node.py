"""Whole collectives among the ranks of a node, each ONE compiled call without the GIL, over memory that all map.

Ranks meet at *epochs*: each rank's line of the board holds the number of the last epoch it has reached, written with
release and read with acquire order. A call that publishes data writes it, then its epoch; a call that reads waits
until the peers' lines show that epoch. Two slots of each kind (even and odd epochs) suffice: a rank that reaches epoch
e + 2 has seen all peers at e + 1, so all have finished reading what was published at e.

A rank's line also carries the call's signature (a hash of verb, dtype, count, operation, ...). Peers compare it with
their own before they touch any data, so a mismatch costs nothing to detect and corrupts nothing.

Everything a kernel needs is in one int64 array, the *call*, whose fields are the constants below: passing its address
costs least, and the kernel can return in the middle of a wait (WAITING) and be called again to go on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from numba.core import types

from commlib.kernels import intrinsics as ins

# What a kernel returns.
DONE, WAITING, MISMATCH, BROKEN = range(4)

# The board: one line per rank, two cache lines wide because CPUs prefetch in pairs. Byte offsets in a line:
LINE_BYTES, ARRIVED, SIGNATURES = 128, 0, 16

# How much of each buffer is reduced at once: far less than the L2 cache, far more than a call costs.
TILE_BYTES = 1 << 16

# Fields of the control array, one for each communicator and rank. SLOTS is the address of a table of P addresses.
# FAILED is set once the ranks are out of step; every kernel then returns BROKEN at once.
EPOCH, RANK, SIZE, BOARD, SLOTS, SLOT_BYTES, FAILED, CONTROL_FIELDS = range(8)

# Fields of a call.
(
    CONTROL,  # address of the control array
    STATE,  # where a kernel that returned WAITING goes on; 0 to begin
    POSITION,  # elements done, for kernels that work piece by piece
    PARITY,  # which slot the first piece of all_reduce_staged uses
    SIGNATURE,
    REDUCE,  # address of the arithmetic
    INPUTS,  # address of a table of P addresses, in rank order
    OUTPUTS,
    COUNT,  # elements
    ITEM_BYTES,
    DIVISOR,
    SPINS,  # polls before the first yield
    YIELDS,  # yields before the first nap
    NAPS,  # naps before WAITING is returned
    NAP_MICROSECONDS,
    SOURCE,  # address of this rank's own array, and of the result, where they are not shared
    TARGET,
    BACKWARD,  # whether all_reduce_symmetric begins at the end of its share; it alternates
    CALL_FIELDS,
) = range(19)


def entry_point(kernel: Any) -> Callable[[int], int]:
    """Return the compiled function behind a kernel, which takes the address of a call and returns a status.

    Called by itself it costs half of what the dispatcher does, which looks up types that never change here.
    """
    kernel.compile((types.int64,))
    return kernel.overloads[(types.int64,)].entry_point


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _call(address: int) -> Any:
    return nb.carray(ins.as_pointer(address), CALL_FIELDS, np.int64)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _control(call: Any) -> Any:
    return nb.carray(ins.as_pointer(call[CONTROL]), CONTROL_FIELDS, np.int64)


@nb.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _arrive(control: Any, signature: int) -> None:
    """Reach the next epoch, and say so."""
    control[EPOCH] += 1
    epoch = control[EPOCH]
    line = control[BOARD] + control[RANK] * LINE_BYTES
    ins.store_release(line + SIGNATURES + 8 * (epoch & 1), signature)
    ins.store_release(line + ARRIVED, epoch)


@nb.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _await_peers(call: Any, control: Any) -> int:
    """Wait until every rank has reached this rank's epoch with the same signature."""
    epoch, size, board = control[EPOCH], control[SIZE], control[BOARD]
    polls, naps = 0, 0
    verdict = DONE
    for step in range(1, size):
        peer = (control[RANK] + step) % size
        line = board + peer * LINE_BYTES
        while ins.load_acquire(line + ARRIVED) < epoch:
            polls += 1
            if polls <= call[SPINS]:
                ins.pause()
            elif polls <= call[SPINS] + call[YIELDS]:
                ins.sched_yield()
            elif naps < call[NAPS]:
                naps += 1
                ins.usleep(call[NAP_MICROSECONDS])
            else:
                return WAITING
        if ins.load_acquire(line + SIGNATURES + 8 * (epoch & 1)) != call[SIGNATURE]:
            verdict = MISMATCH  # but wait for the others too, so that all ranks leave at the same epoch
    return verdict


@nb.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def barrier(address: int) -> int:
    """Wait for everybody."""
    call = _call(address)
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    if call[STATE] == 0:
        _arrive(control, call[SIGNATURE])
        call[STATE] = 1
    status = _await_peers(call, control)
    if status != WAITING:
        call[STATE] = 0
    return status


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _own_share(count: int, item_bytes: int, rank: int, size: int) -> Any:
    """Return the part [start, stop) of `count` elements that `rank` reduces: whole cache lines, nearly equal."""
    unit = max(1, 64 // item_bytes)
    units = (count + unit - 1) // unit
    return min(count, units * rank // size * unit), min(count, units * (rank + 1) // size * unit)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _reduce_share(call: Any, size: int, start: int, stop: int) -> None:
    """Reduce the elements [start, stop), tile by tile, and the next time from the other end.

    What a sweep touched last is still in the cache when the next one begins there; a sweep from the same end would find
    nothing of what a buffer larger than the cache has left.
    """
    item = call[ITEM_BYTES]
    tile = TILE_BYTES // item
    tiles = (stop - start + tile - 1) // tile
    for step in range(tiles):
        first = start + tile * (tiles - 1 - step if call[BACKWARD] else step)
        length = min(tile, stop - first)
        ins.call_reduce(call[REDUCE], call[INPUTS], size, call[OUTPUTS], size, first * item, length, call[DIVISOR])
    call[BACKWARD] ^= 1


@nb.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def all_reduce_symmetric(address: int) -> int:
    """All-reduce in symmetric memory: reduce my share from all ranks' buffers straight into all ranks' buffers."""
    call = _call(address)
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    if call[STATE] == 0:
        _arrive(control, call[SIGNATURE])
        call[STATE] = 1
    if call[STATE] == 1:
        status = _await_peers(call, control)
        if status == WAITING:
            return WAITING
        if status == MISMATCH:
            call[STATE] = 0
            return MISMATCH
        size = control[SIZE]
        start, stop = _own_share(call[COUNT], call[ITEM_BYTES], control[RANK], size)
        if stop > start:
            _reduce_share(call, size, start, stop)
        _arrive(control, call[SIGNATURE])
        call[STATE] = 2
    status = _await_peers(call, control)
    if status != WAITING:
        call[STATE] = 0
    return status


@nb.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def all_reduce_exchange(address: int) -> int:
    """All-reduce of ordinary arrays, piece by piece: publish my piece, then reduce everybody's into my result.

    One meeting for each piece, P reads of each element: best for two ranks, and for small arrays.
    """
    call = _call(address)
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    rank, size, item = control[RANK], control[SIZE], call[ITEM_BYTES]
    slots = nb.carray(ins.as_pointer(control[SLOTS]), size, np.int64)
    inputs = nb.carray(ins.as_pointer(call[INPUTS]), size, np.int64)
    outputs = nb.carray(ins.as_pointer(call[OUTPUTS]), 1, np.int64)
    piece = control[SLOT_BYTES] // item
    while True:
        position = call[POSITION]
        length = min(piece, call[COUNT] - position)
        if call[STATE] == 0:
            slot = slots[rank] + ((control[EPOCH] + 1) & 1) * control[SLOT_BYTES]
            ins.memcpy(slot, call[SOURCE] + position * item, length * item)
            _arrive(control, call[SIGNATURE])
            call[STATE] = 1
        status = _await_peers(call, control)
        if status == WAITING:
            return WAITING
        call[STATE] = 0
        if status == MISMATCH:
            call[POSITION] = 0
            return MISMATCH
        for peer in range(size):
            inputs[peer] = slots[peer] + (control[EPOCH] & 1) * control[SLOT_BYTES]
        inputs[rank] = call[SOURCE] + position * item
        outputs[0] = call[TARGET] + position * item
        ins.call_reduce(call[REDUCE], call[INPUTS], size, call[OUTPUTS], 1, 0, length, call[DIVISOR])
        call[POSITION] = position + length
        if call[POSITION] >= call[COUNT]:
            call[POSITION] = 0
            return DONE


@nb.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def all_reduce_staged(address: int) -> int:
    """All-reduce of ordinary arrays, piece by piece, through slots that are then reduced like symmetric memory.

    Two meetings for each piece, but each rank reduces only its share: best for large arrays on more than two ranks.
    """
    call = _call(address)
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    rank, size, item = control[RANK], control[SIZE], call[ITEM_BYTES]
    slots = nb.carray(ins.as_pointer(control[SLOTS]), size, np.int64)
    inputs = nb.carray(ins.as_pointer(call[INPUTS]), size, np.int64)
    piece = control[SLOT_BYTES] // item
    while True:
        position = call[POSITION]
        length = min(piece, call[COUNT] - position)
        if call[STATE] == 0:
            if position == 0:
                call[PARITY] = (control[EPOCH] + 1) & 1  # a peer may still read what was published at this epoch
            # The two meetings of a piece leave the epoch's parity as it was: count pieces instead.
            slot = (call[PARITY] + position // piece) & 1
            for peer in range(size):
                inputs[peer] = slots[peer] + slot * control[SLOT_BYTES]
            ins.memcpy(inputs[rank], call[SOURCE] + position * item, length * item)
            _arrive(control, call[SIGNATURE])
            call[STATE] = 1
        if call[STATE] == 1:
            status = _await_peers(call, control)
            if status == WAITING:
                return WAITING
            if status == MISMATCH:
                call[STATE] = 0
                call[POSITION] = 0
                return MISMATCH
            start, stop = _own_share(length, item, rank, size)
            if stop > start:
                ins.call_reduce(
                    call[REDUCE], call[INPUTS], size, call[INPUTS], size, start * item, stop - start, call[DIVISOR]
                )
            _arrive(control, call[SIGNATURE])
            call[STATE] = 2
        if _await_peers(call, control) == WAITING:
            return WAITING
        ins.memcpy(call[TARGET] + position * item, inputs[rank], length * item)
        call[STATE] = 0
        call[POSITION] = position + length
        if call[POSITION] >= call[COUNT]:
            call[POSITION] = 0
            return DONE
