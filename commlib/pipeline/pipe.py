"""Pipe: the core of a pipeline on one rank, shared by all frameworks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.compress.codec import Codec
from commlib.compress.registry import codec_of
from commlib.errors import ShutdownError, UsageError, line
from commlib.literals import ScheduleName, SplitWord
from commlib.pipeline.batch import NONE, BatchDigests, difference, wants_x
from commlib.pipeline.runner import Runner
from commlib.pipeline.schedule import Kind, Link, LoweredSchedule, Schedule, find, make, render, verify
from commlib.pipeline.schedule.csv import read
from commlib.pipeline.schedule.lower import LinkDirection
from commlib.pipeline.stage import Stage, Tensors

AnySchedule = ScheduleName | Schedule | PathLike[str]

# A text is a Sequence[str], too.
Split = SplitWord | Sequence[int] | list[str] | tuple[str, ...] | Callable[[Any], Sequence[int] | Sequence[str]]
"""Values of `split=`. Any sequence of names is accepted; for a checker, a text would be one."""

Codecs = Codec | str | None | Mapping[tuple[int, int], Codec | str | None]
"""The codec for floats: for all links, or by (from stage, to stage): (0, 1) for activations, (1, 0) for gradients.
Other links send floats uncompressed."""


def resolve(
    schedule: AnySchedule, ranks: int, microbatches: int, *, stages: int | None = None, every: int | None = None
) -> Schedule:
    """Return a schedule by name ("1f1b"), from a CSV file (a path), or unchanged.

    stages: the total, for schedules that take any number. Raises UsageError if the schedule is for another number of
    ranks or microbatches.
    """
    if isinstance(schedule, str) and not schedule.lower().endswith(".csv"):
        return make(find(schedule).name, ranks, microbatches, stages=stages, every=every)
    if not isinstance(schedule, str | PathLike | Schedule):
        raise UsageError(f"pipeline: schedule is {schedule!r}, expected a name, a path of a CSV file, or a Schedule")
    resolved = schedule if isinstance(schedule, Schedule) else read(Path(schedule).read_text(), Path(schedule).stem)
    if (resolved.ranks, resolved.microbatches) != (ranks, microbatches):
        raise UsageError(f"schedule {resolved.title}: this pipeline has {ranks} ranks and {microbatches} microbatches")
    if stages is not None and stages != resolved.stages:
        raise UsageError(f"schedule {resolved.title}: stages={stages} was requested")
    return resolved


class Pipe:
    """One rank's part of a pipeline over `comm`: its verified schedule and the runner. The constructor is collective.

    links: pairs of a stage and the stage that takes its results. stages: this rank's stages. lines: settings that must
    be equal on all ranks, for MismatchError. codec: the compression of floats between ranks. Raises ScheduleError on
    all ranks for an invalid schedule.

    If a batch raises an error on one rank, all other ranks raise PeerError, wherever they are in it. If all ranks catch
    it, the next batch starts again.
    """

    def __init__(
        self,
        comm: Communicator,
        schedule: Schedule,
        links: Sequence[Link],
        stages: Mapping[int, Stage],
        tensors: Tensors,
        *,
        codec: Codecs = None,
        lines: Sequence[str] = (),
    ) -> None:
        text = f"{schedule.title}, placed on ranks {schedule.placement}, links {', '.join(map(str, links))}"
        programs = [" ".join(map(str, program)) for program in schedule.programs]
        check_agreement(comm, "a pipeline", [text, *lines, *programs])
        self._codecs = _codecs(codec, links)
        self.stages, self._tensors, self._parent = stages, tensors, comm
        self.lowered: LoweredSchedule = verify(schedule, links, reduce=True)
        self._is_within = self._has_failed = self._is_closed = False
        self._refusal: weakref.ref[UsageError] | None = (
            None  # a strong reference would keep the frames and the values of a batch
        )
        self._open()

    def _open(self) -> None:
        """Create a communicator for this pipeline. Collective."""
        own = self._parent.split(0, name=f"{self._parent.name}.pipeline")
        assert own is not None
        self.comm = own
        """The pipeline's communicator: separate pipelines of the same ranks do not interfere."""
        # A stage without weights may be in host memory while others are on GPUs.
        device = self._tensors.device
        self._devices: list[str] = own.all_gather_object("" if device is None else device.name)
        self.runner = Runner(own, self.lowered, self.stages, self._tensors, codecs=self._codecs, devices=self._devices)
        """The runner of the schedule."""
        self._forward: Runner | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule, with its messages."""
        return self.lowered.schedule

    @property
    def first(self) -> int:
        """The rank of the first stage."""
        return self.schedule.placement[0]

    @property
    def last(self) -> int:
        """The rank of the last stage."""
        return self.schedule.placement[-1]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a complete batch within this context: its errors are sent to the other ranks.

        Collective after a failed batch, otherwise not.
        """
        if self._is_within:
            yield
            return
        if self._is_closed:
            raise UsageError(f"{self.schedule.title}: the pipeline is closed: create a new one on all ranks")
        if self._has_failed:
            self._open()
            self._has_failed = False
        self._is_within = True
        try:
            yield
        except BaseException as error:
            if not self._is_refusal(error):
                self._fail(error)
            raise
        finally:
            self._is_within = False

    @contextmanager
    def reporting_errors(self, what: str) -> Iterator[None]:
        """Run a loop of batches within this context: errors between batches are sent to the other ranks, too.

        what: a description of the loop. Not collective. An error that was already sent, or that all ranks raise, is
        only re-raised.
        """
        try:
            yield
        except BaseException as error:
            if not (self._is_refusal(error) or self._is_within or self._has_failed or self._is_closed):
                self._fail(error, what)
            raise

    @property
    def is_running(self) -> bool:
        """Whether a batch is running."""
        return self._is_within

    def refuse(self, text: str) -> NoReturn:
        """Raise UsageError. All ranks must do so at the same point: none waits, and the pipeline stays usable."""
        refusal = UsageError(text)
        self._refusal = weakref.ref(refusal)
        raise refusal

    def _is_refusal(self, error: BaseException) -> bool:
        return self._refusal is not None and self._refusal() is error

    def reopen_next(self) -> None:
        """Make the next batch start like one after an error: the ranks exchange their devices again."""
        self._has_failed = True

    def _fail(self, error: BaseException, what: str = "a batch") -> None:
        """Release the ranks that wait for this one, in a message or a collective. what: the activity it has left."""
        self._has_failed = True
        for runner in (self.runner, self._forward):
            if runner is not None:
                runner.leave(error)
        text = f"{self.comm.name}: rank {self.comm.rank} has left {what} of {self.schedule.title}: {line(error)}"
        self.comm.group.fail(ShutdownError(text))

    def train(self, empty: Collection[int] = ()) -> None:
        """Run the schedule once. empty: microbatches without rows, on the rank of the first stage."""
        with self.together():
            self.runner.run(empty)

    def forward(self, empty: Collection[int] = ()) -> None:
        """Run only the forwards, in the schedule's order."""
        with self.together():
            if self._forward is None:
                alone = forward_schedule(self.schedule)
                lowered = verify(alone, self.lowered.links)
                self._forward = Runner(
                    self.comm, lowered, self.stages, self._tensors,
                    name="forward", codecs=self._codecs, devices=self._devices,
                )  # fmt: skip
            self._forward.run(empty)

    def broadcast_results(
        self, numbers: Sequence[float], *, rows: int = -1, added: Sequence[float] = (), fault: str = ""
    ) -> list[float]:
        """Return the last stage's numbers on all ranks; the numbers of other ranks are ignored. Collective.

        added: from each rank, summands for the first numbers. rows: the number of rows in the batch, -1 if unknown.
        fault: a fault that this rank has found. Raises UsageError on all ranks if the numbers of rows differ (the
        results then belong to no batch), or with the fault of the lowest rank that has one.
        """
        own = [rows, float(bool(fault)), *numbers, *added]
        gathered = self.comm.all_gather(np.array(own, np.float64)).reshape(self.comm.size, -1)
        counts_of = {rank: int(count) for rank, count in enumerate(gathered[:, 0]) if count >= 0}
        if len(set(counts_of.values())) > 1:
            counts = ", ".join(f"{count} on rank {rank}" for rank, count in counts_of.items())
            raise UsageError(
                f"pipeline: the batch has different numbers of rows: {counts}; x on the first stage's rank and y on "
                "the last stage's rank must belong to the same batch"
            )
        if gathered[:, 1].any():
            self.refuse(self.comm.broadcast_object(fault, int(gathered[:, 1].argmax())))
        totals = gathered[self.last, 2 : 2 + len(numbers)].copy()
        totals[: len(added)] += gathered[:, 2 + len(numbers) :].sum(axis=0)
        return [float(value) for value in totals]

    def broadcast_rows(self, rows: Sequence[int]) -> list[int]:
        """Broadcast the number of rows of each microbatch from the first stage's rank. Collective."""
        own = list(rows) or [0] * self.schedule.microbatches
        return [int(count) for count in self.comm.broadcast(np.array(own, np.int64), self.first)]

    def compare_batches(self, digest_of_x: Callable[[], int], digest_of_y: Callable[[], int]) -> None:
        """Compare the batches of the ranks of the first and the last stage. Collective.

        Raises UsageError on all ranks if they differ.
        """
        if self.first == self.last:
            return
        y = digest_of_y() if self.comm.rank in (self.first, self.last) else NONE
        digests = [
            BatchDigests(*map(int, gathered)) for gathered in self.comm.all_gather(np.array([BatchDigests(y=y)]))
        ]
        if fault := self.difference(digests, digest_of_x):
            self.refuse(fault)

    def difference(self, given: Sequence[BatchDigests], digest_of_x: Callable[[], int]) -> str:
        """Return the fault in the ranks' inputs for a batch; "" if there is none. Collective.

        given: the digests of all ranks, without x, whose digests are exchanged only if they are needed.
        """
        if wants_x(self.first, self.last, given):
            x = digest_of_x() if self.comm.rank in (self.first, self.last) else NONE
            digests = self.comm.all_gather(np.array([x], np.int64))
            given = [own._replace(x=int(one)) for own, one in zip(given, digests, strict=True)]
        return difference(self.first, self.last, given)

    def picture(self, *, width: int | None = None) -> str:
        """Render the schedule as text."""
        return render(replace(self.schedule, programs=compute_actions(self.schedule)), width=width)

    def close(self) -> None:
        """End this rank's part, and notify the other ranks. Idempotent."""
        self._is_closed = True
        self.runner.close()
        if self._forward is not None:
            self._forward.close()


def _codecs(codec: Codecs, links: Sequence[Link]) -> dict[LinkDirection, Codec]:
    """Return the codec of each link direction that has one. Raises UsageError for stages without a link."""
    ways: dict[tuple[int, int], LinkDirection] = {(link.source, link.target): (link, Kind.F) for link in links}
    ways |= {(link.target, link.source): (link, Kind.B) for link in links}
    each = codec if isinstance(codec, Mapping) else dict.fromkeys(ways, codec)
    if unknown := [stages for stages in each if stages not in ways]:
        raise UsageError(
            f"pipeline: codec: no link connects the stages {unknown[0]!r}; expected some of "
            f"{', '.join(map(str, ways)) or 'none'}"
        )
    return {ways[stages]: codec_of(one) for stages, one in each.items() if one is not None}


def compute_actions(schedule: Schedule) -> tuple[tuple[Any, ...], ...]:
    """Return the programs without messages and reductions."""
    return tuple(
        tuple(action for action in program if action.peer < 0 and action.kind is not Kind.REDUCE)
        for program in schedule.programs
    )


def forward_schedule(schedule: Schedule) -> Schedule:
    """Return a schedule with the same forwards in the same order, which is legal if the full schedule is."""
    programs = tuple(tuple(action for action in program if action.kind is Kind.F) for program in schedule.programs)
    return Schedule(f"{schedule.name}, forward only", schedule.microbatches, schedule.placement, programs)
