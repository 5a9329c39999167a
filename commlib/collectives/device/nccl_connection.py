"""NCCL connection: the NCCL communicator of a group's ranks, made by the first call that uses it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.config.settings import ranks_text
from commlib.devices.cuda import nccl
from commlib.devices.cuda.nccl import NcclRanks
from commlib.devices.protocol import Device
from commlib.errors import TransportError
from commlib.group.group import Group

log = logging.getLogger("commlib")

# Seconds for all ranks to join. All have started joining, but with thousands of ranks NCCL takes a while.
SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class NcclReport:
    """One rank's report of its NCCL: why it has none, or its version and its GPU."""

    error: str = ""
    version: int = 0
    place: tuple[str, str] = ("", "")
    shares: bool = False  # the user allows ranks to share a GPU, and this NCCL supports it


class NcclConnection:
    """The NCCL communicator of a group's ranks, once it is made. refusal: why there is none, as far as is known."""

    def __init__(self, group: Group, device: Device) -> None:
        self._group, self._device = group, device
        self.ranks: NcclRanks | None = None
        self.refusal = ""

    def open(self, text: str) -> NcclRanks | None:
        """Return the communicator; the first call of all ranks makes it. None if they cannot have one."""
        if self.ranks is None and not self.refusal:
            first = f"{text}, first starting NCCL"
            self._group.calls.perform(first, self._make, first, must_match=True)
        return self.ranks

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
        self.ranks = ranks
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
