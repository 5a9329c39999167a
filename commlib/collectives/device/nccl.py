"""NCCL path: collectives on GPU arrays by NVIDIA's library. Each rank needs its own GPU.

The first call of a group that uses this path creates the NCCL communicator. All ranks get bitwise equal results. NCCL
chooses the order of summation, so float results may differ bitwise from other paths and from run to run. Half precision
accumulates in float32 and is rounded once, and commlib's kernel divides means, as on all paths. NaN is an exception:
NCCL's min and max may ignore it, so "auto" does not choose NCCL for min and max of floats.

As with NCCL in general, call groups that share GPUs in the same order on all ranks: kernels of two groups may wait for
each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.device.nccl_verbs import MOVES, is_once
from commlib.collectives.device.staging_queue import OnWait, Run
from commlib.collectives.paths import Verb
from commlib.config.settings import ranks_text
from commlib.devices.array import DeviceArray
from commlib.devices.cuda import nccl
from commlib.devices.cuda.nccl import NcclRanks
from commlib.devices.protocol import Device
from commlib.dtypes import FLOATS, accumulator_dtype, kernel_operation, name_of
from commlib.errors import TransportError, UsageError
from commlib.group.group import Group

log = logging.getLogger("commlib")

NAME = "nccl"

# Seconds for all ranks to join. All have started joining, but with thousands of ranks NCCL takes a while.
SECONDS = 120.0


def refusal(group: Group, verb: Verb, call: Call) -> str:
    """Return why NCCL cannot run a call on any machine, or "". The same on all ranks."""
    if call.device != "cuda":
        return "it supports only arrays on a GPU"
    if not group.config.nccl:
        return "COMMLIB_NCCL=0 turns it off"
    if verb.name not in MOVES:
        return f"it supports only {', '.join(MOVES)}"
    if call.op:
        dtype, operation = name_of(call.dtype), kernel_operation(name_of(call.dtype), call.op)
        combined = dtype if is_once(call, group.size) else accumulator_dtype(dtype, operation)
        if combined not in nccl.DTYPES or operation not in (*nccl.OPERATIONS, "mean"):
            return f"it does not support {call.op} of {dtype}"
    if verb.name == "reduce_scatter" and isinstance(call.size, tuple) and call.size[0] % group.size:
        return f"the length of dimension 0, {call.size[0]}, must be a multiple of {group.size}, the number of ranks"
    return ""


def check(group: Group, verb: Verb, call: Call) -> None:
    """Raise UsageError if a call names NCCL and NCCL cannot run it."""
    if call.algorithm == NAME and (why := refusal(group, verb, call)):
        raise UsageError(f"{verb.name}: algorithm {NAME!r}: {why}")


@dataclass(frozen=True, slots=True)
class NcclReport:
    """One rank's report of its NCCL: why it has none, or its version and its GPU."""

    error: str = ""
    version: int = 0
    place: tuple[str, str] = ("", "")
    shares: bool = False  # the user allows ranks to share a GPU, and this NCCL supports it


class Nccl:
    """The device path by NCCL. It holds the group's NCCL communicator once it is made."""

    name, only_queues = NAME, False

    def __init__(self, group: Group, device: Device) -> None:
        self._group, self._device = group, device
        self._ranks: NcclRanks | None = None
        self.refusal = ""

    @property
    def is_open(self) -> bool:
        return self._ranks is not None

    def takes(self, verb: Verb, call: Call) -> bool:
        if call.algorithm != "auto" or self._group.size == 1 or self.refusal or refusal(self._group, verb, call):
            return False
        return not (call.op in ("min", "max") and name_of(call.dtype) in FLOATS)  # NCCL may ignore NaN

    def run(self, verb: Verb, call: Call) -> Run:
        group, text, move = self._group, call.text, partial(self._move, verb, call)

        def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> Any:
            return group.calls.perform(text, move, x.reshape(-1), target.reshape(-1))

        return run

    def _move(self, verb: Verb, call: Call, x: DeviceArray, target: DeviceArray) -> None:
        assert self._ranks is not None
        if call.count:
            MOVES[verb.name](self._ranks, call, self._group.size, x, target)

    def open(self, text: str, on_wait: OnWait) -> bool:
        if self._ranks is None and not self.refusal:
            first = f"{text}, first starting NCCL"
            self._group.calls.perform(first, partial(self._make, first), must_match=True)
        return self.is_open

    def _make(self, text: str) -> None:
        group = self._group
        self.refusal = disagreement(group.programs.gather_objects(self._report()))
        if self.refusal:
            self._log(logging.INFO)
            return
        unique, error = None, ""
        if group.rank == 0:
            try:
                unique = nccl.unique_id()
            except TransportError as caught:
                error = f"rank 0: {caught}"
        unique, error = group.programs.gather_objects((unique, error))[0]
        ranks = None
        if not error:
            try:
                watch = group.waits.watch(text)
                ranks = NcclRanks.join(self._device, group.size, unique, group.rank, group.name, watch, SECONDS)
            except TransportError as caught:
                error = f"rank {group.rank}: {caught}"
        self.refusal = "; ".join(sorted({text for text in group.programs.gather_objects(error) if text}))
        if self.refusal:
            self._log(logging.WARNING)
            if ranks is not None:
                ranks.leave(self.refusal)
            return
        assert ranks is not None
        self._ranks = ranks
        group.attach(ranks)
        group.end_with(ranks)  # for a group that is dropped, not closed: NCCL's shutdown may wait for the other ranks

    def _log(self, level: int) -> None:
        level = level if self._group.rank == 0 else logging.DEBUG
        log.log(level, "%s: NCCL is not used: %s", self._group.name, self.refusal)

    def _report(self) -> NcclReport:
        try:
            version, place = nccl.version(), nccl.place(self._device)
        except TransportError as error:
            return NcclReport(error=str(error))
        shares = version >= nccl.SHARES_GPUS and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return NcclReport("", version, place, shares)


def disagreement(everyone: Sequence[NcclReport]) -> str:
    """Return why these ranks cannot use NCCL together, or ""."""
    errors = _ranks_by(report.error for report in everyone)
    errors.pop("", None)
    if errors:
        return "; ".join(f"{error} ({ranks_text(on)})" for error, on in errors.items())
    versions = _ranks_by(report.version for report in everyone)
    if len(versions) > 1:
        texts = (f"{version} on {ranks_text(on)}" for version, on in versions.items())
        return f"its version must be the same on all ranks: {'; '.join(texts)}"
    shared = {place: on for place, on in _ranks_by(report.place for report in everyone).items() if len(on) > 1}
    if not shared or all(report.shares for report in everyone):
        return ""
    texts = (f"{ranks_text(on)} share the GPU {bus}" for (_, bus), on in shared.items())
    return (
        f"{'; '.join(texts)}, but NCCL needs one GPU for each rank (from version 2.30 on, ranks may share a GPU if "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 on all of them)"
    )


def _ranks_by(values: Iterable[Any]) -> dict[Any, list[int]]:
    by_value: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    return by_value
