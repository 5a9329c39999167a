"""Shared-memory dispatcher: ranks write rows directly into the memory of their experts, and read sums from it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.expert.dispatch_plan import (
    Assignments,
    DispatchPlan,
    assignments_of,
    list_by_token,
    local_counts,
    make_plan,
    rows_here,
    tokens_of,
)
from commlib.expert.dispatcher import Empty
from commlib.expert.placement import ExpertPlacement
from commlib.expert.token_buffers import NONE, CountExchange, TokenBuffers, digest_for
from commlib.kernels.host.dispatch_plan import (
    LINE,
    bytes_needed,
    find_rows,
    publish_rows,
    put_rows,
    take_numbers,
)
from commlib.kernels.host.rows import publish_scaled, sum_rows

_NO_GATES = np.empty(0, np.float32)
_digest = lru_cache(4096)(lambda *what: digest_for(what))


class SharedMemoryDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`. comm: used only by dispatchers that share its regions.

    A region holds a rank's rows, then, from the next cache line, a number (float32) for each row.
    """

    def __init__(
        self,
        comm: Communicator,
        placement: ExpertPlacement,
        empty: Empty = np.empty,
        *,
        regions: TokenBuffers | None = None,
    ) -> None:
        self.placement, self._empty, self._rank = placement, empty, comm.rank
        self._owners, self._order = (np.array(each, np.int32) for each in (placement.owners, placement.order))
        self._local = placement.owners.count(comm.rank)
        self.regions = TokenBuffers(comm) if regions is None else regions
        self._counting, self._written, self._published = (
            CountExchange(comm, count) for count in (len(placement.owners), 0, 1)
        )
        self._needs = np.zeros(comm.size, np.int64)

    def dispatch(
        self, what: str, assigned: Assignments, x: Array, gates: Array
    ) -> tuple[DispatchPlan, Array, Array, Array]:
        self.regions.name(f"{what}, dispatch")
        call = what, "dispatch", x.shape[1], x.dtype
        self._counting.own[2:] = assigned.counts
        self.regions.synchronize(self._counting, _digest(*call), call)
        plan = make_plan(assigned, self._counting.counts, self._order, self._owners, self._rank, self._local)
        rows, numbers = self._put(call, plan, x, gates)
        return plan, rows, numbers, local_counts(plan)

    def combine_back(self, what: str, plan: DispatchPlan, x: Array) -> Array:
        self.regions.name(f"{what}, combine, backward")
        return self._put((what, "combine, backward", x.shape[1], x.dtype), plan, x, None)[0]

    def combine(self, what: str, plan: DispatchPlan, rows: Array, gates: Array) -> Array:
        self.regions.name(f"{what}, combine")

        def write(at: int) -> None:
            publish_scaled(plan, self._owners, self._order, self._rank, rows, gates, at)

        sums, _ = self._read_sums((what, "combine", rows.shape[1], rows.dtype), plan, rows, gates, write)
        return sums

    def dispatch_back(self, what: str, plan: DispatchPlan, rows: Array, numbers: Array) -> tuple[Array, Array]:
        self.regions.name(f"{what}, dispatch, backward")
        item = rows.itemsize * rows.shape[1]

        def write(at: int) -> None:
            publish_rows(plan, self._owners, self._order, self._rank, item, address_of(rows), at)
            ctypes.memmove(at + _pad(rows.nbytes), address_of(numbers), numbers.nbytes)

        call = what, "dispatch, backward", rows.shape[1], rows.dtype
        sums, chosen_regions = self._read_sums(call, plan, rows, _NO_GATES, write)
        result = np.empty(assignments_of(plan), np.float32)
        take_numbers(plan, self._owners, self._rank, item, self.regions.bases, chosen_regions, numbers, result)
        return sums, result

    def _put(self, call: Any, plan: DispatchPlan, x: Array, numbers: Array | None) -> tuple[Array, Array]:
        """Write rows, and numbers, to the ranks of their experts; return those that others have written here."""
        regions, rank, item = self.regions, self._rank, x.itemsize * x.shape[1]
        has_numbers = numbers is not None
        short = bytes_needed(plan, item, has_numbers, regions.sizes, regions.next, self._needs)
        chosen = regions.next
        if short:
            new_region = regions.grow(short)
            for other, need in enumerate(self._needs.tolist()):
                if chosen[other] == NONE or regions.sizes[chosen[other]] < need:
                    chosen[other] = new_region
        region = regions.written(int(chosen[rank]), int(self._needs[rank]))
        numbers_at = 0 if numbers is None else address_of(numbers)
        put_rows(plan, self._owners, address_of(x), item, numbers_at, regions.bases, chosen)
        written = (*call, "written")
        regions.synchronize(self._written, _digest(*written), written)
        mine = rows_here(plan, rank)
        rows = region[: mine * item].view(x.dtype).reshape(mine, x.shape[1])
        return rows, region[_pad(mine * item) :].view(np.float32)

    def _read_sums(
        self, call: Any, plan: DispatchPlan, rows: Array, gates: Array, write: Callable[[int], None]
    ) -> tuple[Array, Array]:
        """Publish the output of `write(address)` to other ranks; return the sum for each token of this rank.

        Rows of this rank's own tokens are read in place, and multiplied by their gates, if given. The second result is
        the region of each rank.
        """
        regions, rank, item = self.regions, self._rank, rows.itemsize * rows.shape[1]
        bytes_needed(plan, item, True, regions.sizes, regions.next, self._needs)
        needs = self._needs
        at = regions.free(int(needs[rank]))
        if at != NONE:
            regions.hold(at)
            write(int(regions.bases[at, rank]))
        counting = self._published
        counting.own[2] = at
        regions.synchronize(counting, _digest(*call), call)
        chosen_regions = counting.counts[:, 0].copy()
        if min(chosen_regions.tolist()) == NONE:  # all ranks see the same values
            chosen_regions[chosen_regions == NONE] = regions.grow(int(needs.max()))
            if at == NONE:
                at = int(chosen_regions[rank])
                write(int(regions.bases[at, rank]))
            regions.hold(at)
            late = (*call, "late")
            regions.synchronize(self._written, _digest(*late), late)
        number = assignments_of(plan)
        addresses, factors = np.empty(number, np.int64), np.empty(number, np.float32)
        own = address_of(rows)
        find_rows(plan, self._owners, rank, item, regions.bases, chosen_regions, own, gates, addresses, factors)
        sums: Array = self._empty((tokens_of(plan), rows.shape[1]), rows.dtype)
        sum_rows(sums, *list_by_token(plan), addresses, factors)
        return sums, chosen_regions


def _pad(nbytes: int) -> int:
    return (nbytes + LINE - 1) // LINE * LINE
