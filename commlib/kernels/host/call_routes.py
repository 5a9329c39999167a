"""Routes: run a node's collective on any arrays, in symmetric memory if they are in it, else through the slots.

A *route* has the data of one kind of call: an int64 array with the fields of `fields.call_routes`. It contains two
calls of `kernels.host.node`: one through the slots, one on symmetric memory. The location of the arrays is looked up in
compiled code, so a call from Python costs no more than one of the kernels.

The table of symmetric memory has sorted rows of int64: start and end of a segment in this process, its number (the same
on all ranks), and the address of each rank's part in this process.
"""

from __future__ import annotations

import numba as nb

from commlib.kernels.fields.call_routes import (
    ACTIVE,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    COUNTED,
    KIND,
    LOOKED_UP,
    NBYTES,
    OFFSETS,
    PLACES,
    RANKS,
    ROUTE_FIELDS,
    STAGED,
    SYMMETRIC,
)
from commlib.kernels.fields.node import (
    COUNTS,
    INPUTS,
    OUTPUTS,
    PLACE,
    PLACES_DIFFER,
    SOURCE,
    TARGET,
    WAITING,
)
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.node import (
    _call,
    _set_arrays,
    _table,
    all_reduce_staged,
    all_reduce_symmetric,
    barrier,
    begin_exchange,
    broadcast_symmetric,
    exchange_staged,
    exchange_symmetric,
)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _find(places: int, ranks: int, address: int, nbytes: int) -> int:
    """Return the address of the row of the segment that contains these bytes, or 0."""
    head = _table(places, 2)
    width = 3 + ranks
    low, high = 0, head[1]
    while low < high:  # find the last row that does not begin after the address
        middle = (low + high) // 2
        if _table(head[0] + 8 * width * middle, 1)[0] <= address:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return 0
    row = head[0] + 8 * width * (low - 1)
    return row if address + nbytes <= _table(row, 2)[1] else 0


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _place(row: int, address: int) -> int:
    """Return a number that is the same on all ranks if and only if their arrays correspond."""
    segment = _table(row, 3)
    return (segment[2] << 44) | (address - segment[0])


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _spread(row: int, ranks: int, address: int, offsets: int, into: int) -> None:
    """Write the addresses on all ranks that correspond to `address` on this rank to the table `into`."""
    behind = address - _table(row, 1)[0]
    bases, addresses = _table(row + 24, ranks), _table(into, ranks)
    for rank in range(ranks):
        addresses[rank] = bases[rank] + behind
        if offsets != 0:
            addresses[rank] += _table(offsets, ranks)[rank]


@kernel(nogil=True)
def _choose(address: int) -> int:
    """Return the call to run, after setting it up for the arrays of the call through the slots."""
    route = _table(address, ROUTE_FIELDS)
    staged = _call(route[STAGED])
    staged[COUNTS] = route[COUNTED]
    places, ranks, nbytes = route[PLACES], route[RANKS], route[NBYTES]
    looked_up = staged[route[LOOKED_UP]]
    first = _find(places, ranks, looked_up, nbytes)
    if first == 0:
        return STAGED
    call = _call(route[SYMMETRIC])
    call[SOURCE], call[TARGET] = staged[SOURCE], staged[TARGET]
    place = _place(first, looked_up)
    if route[KIND] == ALL_REDUCE:
        second = first
        if staged[TARGET] != looked_up:
            second = _find(places, ranks, staged[TARGET], nbytes)
            if second == 0:
                return STAGED
            place = (place * 0x9E3779B97F4A7C1 + _place(second, staged[TARGET])) | 1
        _spread(second, ranks, staged[TARGET], 0, call[OUTPUTS])
    _spread(first, ranks, looked_up, route[OFFSETS], call[INPUTS])
    call[PLACE] = place
    call[COUNTS] = route[COUNTED]
    return SYMMETRIC


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _run_symmetric(kind: int, address: int) -> int:
    if kind == ALL_REDUCE:
        return all_reduce_symmetric(address)
    if kind == BROADCAST:
        return broadcast_symmetric(address)
    return exchange_symmetric(address)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _run_staged(kind: int, address: int) -> int:
    if kind == ALL_REDUCE:
        return all_reduce_staged(address)
    if kind == BARRIER:
        return barrier(address)
    return exchange_staged(address)


@kernel(nogil=True)
def run(address: int) -> int:
    """Run a route on the arrays of its call through the slots, or continue it after WAITING.

    If the ranks' arrays do not correspond, all ranks detect it, and all use the slots.
    """
    route = _table(address, ROUTE_FIELDS)
    if route[PLACES] == 0:
        return _run_staged(route[KIND], route[STAGED])
    if route[ACTIVE] == 0:
        route[ACTIVE] = _choose(address)
    status = PLACES_DIFFER
    if route[ACTIVE] == SYMMETRIC:
        status = _run_symmetric(route[KIND], route[SYMMETRIC])
        if status == PLACES_DIFFER:
            route[ACTIVE] = STAGED
            _call(route[STAGED])[COUNTS] = 0  # it was already counted
    if route[ACTIVE] == STAGED:
        status = _run_staged(route[KIND], route[STAGED])
        if status == PLACES_DIFFER:  # the array is not in symmetric memory on this rank, but on others
            _call(route[STAGED])[COUNTS] = 0
            status = _run_staged(route[KIND], route[STAGED])
    if status != WAITING:
        route[ACTIVE] = 0
    return status


@kernel(nogil=True)
def run_on_arrays(address: int, source: int, target: int) -> int:
    """Run a route on two numpy arrays, given by their `id`: in Python, the address lookups cost as much."""
    _set_arrays(_call(_table(address, ROUTE_FIELDS)[STAGED]), source, target)
    return run(address)


@kernel(nogil=True)
def begin_on_arrays(address: int, source: int, target: int) -> int:
    """Begin a small exchange, always through the slots, on two numpy arrays: see `node.begin_exchange`."""
    staged = _table(address, ROUTE_FIELDS)[STAGED]
    _set_arrays(_call(staged), source, target)
    return begin_exchange(staged)


@kernel(nogil=True)
def begin(address: int) -> int:
    """Begin a small exchange on the arrays of its call through the slots."""
    return begin_exchange(_table(address, ROUTE_FIELDS)[STAGED])
