"""Gradient compression: make the reductions of one training loop's buckets, and remember what they lose."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.auto import Auto, decide, measure_cost, measure_link
from commlib.compress.bucket import CompressedBucket, SlowLink
from commlib.compress.memory import Memory
from commlib.compress.scheme import COMMON, Part, Scheme, State
from commlib.compress.schemes.dgc import DGC
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.errors import UsageError

log = logging.getLogger("commlib")


class GradientCompression:
    """Makes the reductions of buckets, and keeps their states in step with the training. Collective to make.

    `within_node` compresses between the ranks of a node too. For "auto": `count` is the number of elements of a typical
    bucket, `device` where buckets are, and the same on all ranks. `why` says what was chosen, and for what reason;
    `scheme` is None where nothing is compressed.
    """

    def __init__(
        self,
        comm: Communicator,
        scheme: Scheme | None,
        *,
        within_node: bool = False,
        count: int = 1,
        device: Device = HOST,
    ) -> None:
        self.why = "none: as asked" if scheme is None else f"{scheme.name}: as asked"
        self.scheme: Scheme | None = None
        self._reductions: dict[str, CompressedBucket] = {}
        self._loaded: Mapping[str, Mapping[str, Array]] = {}
        if isinstance(scheme, DGC):  # momentum is in it, and must be whatever lies between the ranks
            within_node = True
            if comm.size == 1:
                raise UsageError(
                    f"compression {scheme.name} carries the momentum, but one rank reduces nothing: use none"
                )
        if scheme is None or comm.size == 1:
            return
        self.link = SlowLink(comm, within_node=within_node)
        if not self.link.compresses:
            self.why = "none: all ranks are on one node, whose memory is faster than any codec"
        elif isinstance(scheme, Auto):
            self.scheme, self.why = self._decide(scheme, count, device)
        else:
            self.scheme = scheme
        if comm.rank == 0 and scheme is not None:
            log.info("compression %s", self.why)

    def _decide(self, auto: Auto, count: int, device: Device) -> tuple[Scheme | None, str]:
        whole, comm = self.link.whole, self.link.comm

        def slowest(values: Array) -> Array:
            return np.asarray(whole.all_reduce(values, "max"))

        # Ranks without a rail only learn what the others find.
        found = np.zeros(2 + 2 * len(auto.codecs))
        if comm is not None:
            memory = Memory(device, comm.watch)
            found[:2] = measure_link(comm, memory)
            found[2:] = [seconds for codec in auto.codecs for seconds in measure_cost(codec, memory)]
        found = slowest(found)
        scheme, why = decide(auto, count, self.link.hosts, found.tolist())
        return scheme, why if device is HOST else f"{why}, on {device.name}"

    def reduction(self, key: str, array: Any, parts: Sequence[Part], flags: int, op: str) -> CompressedBucket:
        """Return the reduction of a bucket, which takes over what is known of its parts. See `CompressedBucket`."""
        assert self.scheme is not None
        reduction = CompressedBucket(self.link, self.scheme, array, parts, flags, op, key)
        if reduction.reducer is not None and self._loaded:
            reduction.reducer.load(self._loaded)
        self._reductions[key] = reduction
        return reduction

    def move(self) -> None:
        """Forget the buckets; those that are made next take over what is remembered, by the names of parameters."""
        self._loaded = self.state()
        self._reductions.clear()

    def end_step(self) -> None:
        """Note that all buckets were reduced: if a sum is not finite, the step will be skipped and leaves no trace."""
        if not all(reduction.finite for reduction in self._reductions.values()):
            self.rollback()

    def rollback(self) -> None:
        """Note that the step was skipped."""
        for reducer in self._reducers():
            reducer.rollback()

    def commit(self) -> None:
        """Note that the step was taken."""
        for reducer in self._reducers():
            reducer.commit()

    def state(self) -> State:
        """Return what is remembered on this rank, by parameter names: residuals and the like."""
        state: State = {name: dict(known) for name, known in self._loaded.items()} if not self._reductions else {}
        for reducer in self._reducers():
            state.update(reducer.state())
        return state

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what this rank's `state` returned, now and for buckets that are made later."""
        self._loaded = {name: {what: np.asarray(value) for what, value in of.items()} for name, of in state.items()}
        for reducer in self._reducers():
            reducer.load(self._loaded)

    def forget_common(self) -> None:
        """Forget what must be the same on all ranks, where not all of them have loaded it; before the first reduction.

        What is each rank's own stays: a sum that lacks it is only later complete.
        """
        self._loaded = {
            name: {what: value for what, value in known.items() if what not in COMMON}
            for name, known in self._loaded.items()
        }

    def _reducers(self) -> Any:
        return [reduction.reducer for reduction in self._reductions.values() if reduction.reducer is not None]
