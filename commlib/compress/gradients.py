"""GradientCompression: make the reductions of one training loop's buckets, and keep their residuals."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.auto import Auto, decide, measure_cost, measure_link
from commlib.compress.bucket import CompressedBucket, SlowLink
from commlib.compress.memory import Memory
from commlib.compress.scheme import COMMON, BucketPart, Scheme, SchemeReducer, State
from commlib.compress.schemes.dgc import DGC
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.errors import UsageError

log = logging.getLogger("commlib")


class GradientCompression:
    """Makes the reductions of buckets, and keeps their states in step with the training. Construction is collective.

    `within_node` also compresses between the ranks of a node. For "auto", `count` is the number of elements of a
    typical bucket, and `device` is the buckets' device; both are the same on all ranks. `why` describes the choice and
    its reason; `scheme` is None if nothing is compressed.
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
        self.why = "none: as requested" if scheme is None else f"{scheme.name}: as requested"
        self.scheme: Scheme | None = None
        self._reductions: dict[str, CompressedBucket] = {}
        self._reducers: list[SchemeReducer] = []  # of the buckets in which this rank has a share
        self._loaded: Mapping[str, Mapping[str, Array]] = {}
        if isinstance(scheme, DGC):  # it carries the momentum, which all ranks need over every link
            within_node = True
            if comm.size == 1:
                raise UsageError(
                    f"compression {scheme.name} carries the momentum, but a single rank reduces nothing: use "
                    "compression none"
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

        # Ranks without a rail measure nothing, and only get the result.
        measurements = np.zeros(2 + 2 * len(auto.codecs))
        if comm is not None:
            memory = Memory(device, comm.watch)
            measurements[:2] = measure_link(comm, memory)
            measurements[2:] = [seconds for codec in auto.codecs for seconds in measure_cost(codec, memory)]
        measurements = slowest(measurements)
        scheme, why = decide(auto, count, self.link.hosts, measurements.tolist())
        return scheme, why if device is HOST else f"{why}, on {device.name}"

    def reduction(self, key: str, array: Any, parts: Sequence[BucketPart], flags: int, op: str) -> CompressedBucket:
        """Return the reduction of a bucket, with the state known for its parts. See `CompressedBucket`."""
        assert self.scheme is not None
        reduction = CompressedBucket(self.link, self.scheme, array, parts, flags, op, key)
        if reduction.reducer is not None and self._loaded:
            reduction.reducer.load(self._loaded)
        self._reductions[key] = reduction
        self._reducers = [one.reducer for one in self._reductions.values() if one.reducer is not None]
        return reduction

    def move(self) -> None:
        """Drop the buckets. The next buckets take over the state, by parameter names."""
        self._loaded = self.state()
        self._reductions.clear()
        self._reducers = []

    def end_step(self) -> None:
        """End the reductions of a step. Undo them if a sum is not finite, because the step will be skipped."""
        for reduction in self._reductions.values():
            if not reduction.finite:
                return self.rollback()

    def rollback(self) -> None:
        """Undo the reductions of a step that was skipped."""
        for reducer in self._reducers:
            reducer.rollback()

    def commit(self) -> None:
        """Accept the reductions of a step that was taken."""
        for reducer in self._reducers:
            reducer.commit()

    def state(self) -> State:
        """Return this rank's state by parameter names, such as residuals."""
        state: State = {name: dict(known) for name, known in self._loaded.items()} if not self._reductions else {}
        for reducer in self._reducers:
            state.update(reducer.state())
        return state

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a state that `state` returned on this rank, for current and later buckets."""
        self._loaded = {name: {what: np.asarray(value) for what, value in of.items()} for name, of in state.items()}
        for reducer in self._reducers:
            reducer.load(self._loaded)

    def drop_common(self) -> None:
        """Drop the state that must be the same on all ranks. For use before the first reduction, if some ranks lack it.

        Each rank keeps its own state: without it, the sum would only be complete later.
        """
        self._loaded = {
            name: {what: value for what, value in known.items() if what not in COMMON}
            for name, known in self._loaded.items()
        }
