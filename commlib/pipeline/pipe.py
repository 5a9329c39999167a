"""Pipe: what every framework's pipeline is made of, on one rank."""

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
from commlib.pipeline.batch import NONE, Given, difference, wants_x
from commlib.pipeline.runner import Runner
from commlib.pipeline.schedule import Kind, Link, Lowered, Schedule, find, make, render, verify
from commlib.pipeline.schedule.csv import read
from commlib.pipeline.schedule.lower import Way
from commlib.pipeline.stage import Stage, Tensors

AnySchedule = str | Schedule | PathLike[str]

Codecs = Codec | str | None | Mapping[tuple[int, int], Codec | str | None]
"""How floats travel: on all ways, or on those from one stage to another, (0, 1) with activations, (1, 0) with their
gradients; on others as they are."""


def resolve(
    schedule: AnySchedule, ranks: int, microbatches: int, *, stages: int | None = None, every: int | None = None
) -> Schedule:
    """Return a schedule by name ("1f1b"), of a CSV file (a path), or as it is.

    stages: in all, of schedules that take any number. Raises UsageError if it is not for so many ranks or microbatches.
    """
    if isinstance(schedule, str) and not schedule.lower().endswith(".csv"):
        return make(find(schedule).name, ranks, microbatches, stages=stages, every=every)
    found = schedule if isinstance(schedule, Schedule) else read(Path(schedule).read_text(), Path(schedule).stem)
    if (found.ranks, found.microbatches) != (ranks, microbatches):
        raise UsageError(
            f"schedule {found.title}: this pipeline has {ranks} ranks, and {microbatches} microbatches were asked for"
        )
    if stages is not None and stages != found.stages:
        raise UsageError(f"schedule {found.title}: {stages} stages were asked for")
    return found


class Pipe:
    """One rank's part of a pipeline over `comm`: its schedule, proved, and what runs it. Collective to make.

    links: which stages take what from which. stages: this rank's. lines: what must be alike on all ranks, for
    MismatchError. codec: how floats travel between ranks. Raises ScheduleError on all ranks where a schedule
    is none.

    An error that comes out of a batch on one rank is told to all: they raise PeerError, wherever they are in it. Where
    all catch it, the next batch begins anew.
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
        self.lowered: Lowered = verify(schedule, links, reduce=True)
        self._is_within = self._has_failed = self._is_closed = False
        self._refusal: weakref.ref[UsageError] | None = None  # it has frames, and these what a batch computes
        self._open()

    def _open(self) -> None:
        """Let the ranks of this pipeline meet by themselves. Collective."""
        own = self._parent.split(0, name=f"{self._parent.name}.pipeline")
        assert own is not None
        self.comm = own
        """A communicator of its own: several pipelines of the same ranks do not meet."""
        # A stage without weights may be on the host among others on GPUs.
        device = self._tensors.device
        self._devices: list[str] = own.all_gather_object("" if device is None else device.name)
        self.runner = Runner(own, self.lowered, self.stages, self._tensors, codecs=self._codecs, devices=self._devices)
        """What runs the schedule."""
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
        """Run a batch within, from its beginning to its end: what comes out of it is told to the other ranks.

        Collective after one that failed, else not.
        """
        if self._is_within:
            yield
            return
        if self._is_closed:
            raise UsageError(f"{self.schedule.title}: it is closed: make another pipeline, on all ranks")
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
    def telling(self, what: str) -> Iterator[None]:
        """Run a loop of batches within: what comes out of it between them is told to the other ranks, too.

        what: it is, in words. Not collective. An error that was told already, or that all ranks raise, stays as it is.
        """
        try:
            yield
        except BaseException as error:
            if not (self._is_refusal(error) or self._is_within or self._has_failed or self._is_closed):
                self._fail(error, what)
            raise

    @property
    def is_running(self) -> bool:
        """Whether a batch is under way."""
        return self._is_within

    def refuse(self, text: str) -> NoReturn:
        """Raise UsageError, as all ranks do at the same place: none waits for another, and the pipeline goes on."""
        refusal = UsageError(text)
        self._refusal = weakref.ref(refusal)
        raise refusal

    def _is_refusal(self, error: BaseException) -> bool:
        return self._refusal is not None and self._refusal() is error

    def meet_anew(self) -> None:
        """Let the next batch begin as one after an error does: the ranks tell each other again where they compute."""
        self._has_failed = True

    def _fail(self, error: BaseException, what: str = "a batch") -> None:
        """Let no rank wait for this one: neither for a message nor in a call of all. what: it has left."""
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
        """Run the forwards alone, in the schedule's order."""
        with self.together():
            if self._forward is None:
                alone = only_forward(self.schedule)
                lowered = verify(alone, self.lowered.links)
                self._forward = Runner(
                    self.comm, lowered, self.stages, self._tensors,
                    name="forward", codecs=self._codecs, devices=self._devices,
                )  # fmt: skip
            self._forward.run(empty)

    def tell(
        self, numbers: Sequence[float], *, rows: int = -1, added: Sequence[float] = (), fault: str = ""
    ) -> list[float]:
        """Return the last stage's numbers on all ranks; other ranks give as many, whatever they are. Collective.

        added: what is added to the first numbers, from each rank. rows: how many the batch has, where that is known
        (-1: it is not). Raises UsageError on all ranks if they differ: what was computed is of no batch then; and for a
        fault that any rank has found, the first of which is told.
        """
        own = [rows, float(bool(fault)), *numbers, *added]
        told = self.comm.all_gather(np.array(own, np.float64)).reshape(self.comm.size, -1)
        known = {rank: int(count) for rank, count in enumerate(told[:, 0]) if count >= 0}
        if len(set(known.values())) > 1:
            counts = ", ".join(f"{count} on rank {rank}" for rank, count in known.items())
            raise UsageError(
                f"pipeline: the batch has different numbers of rows: {counts}; x of the first stage's rank and y of "
                "the last one's must be of one batch"
            )
        if told[:, 1].any():
            self.refuse(self.comm.broadcast_object(fault, int(told[:, 1].argmax())))
        found = told[self.last, 2 : 2 + len(numbers)].copy()
        found[: len(added)] += told[:, 2 + len(numbers) :].sum(axis=0)
        return [float(value) for value in found]

    def tell_rows(self, rows: Sequence[int]) -> list[int]:
        """Return on all ranks how many rows each microbatch has, which the first stage's rank knows. Collective."""
        own = list(rows) or [0] * self.schedule.microbatches
        return [int(count) for count in self.comm.broadcast(np.array(own, np.int64), self.first)]

    def compare_batches(self, digest_of_x: Callable[[], int], digest_of_y: Callable[[], int]) -> None:
        """Compare what the ranks of the first and the last stage were given for a batch. Collective.

        Raises UsageError on all ranks if they differ.
        """
        if self.first == self.last:
            return
        y = digest_of_y() if self.comm.rank in (self.first, self.last) else NONE
        given = [Given(*map(int, told)) for told in self.comm.all_gather(np.array([Given(y=y)]))]
        if fault := self.difference(given, digest_of_x):
            self.refuse(fault)

    def difference(self, given: Sequence[Given], digest_of_x: Callable[[], int]) -> str:
        """Return what is wrong with what ranks were given for a batch; "" if nothing is. Collective.

        given: by all ranks, without x, of which digests travel where they are wanted.
        """
        if wants_x(self.first, self.last, given):
            x = digest_of_x() if self.comm.rank in (self.first, self.last) else NONE
            digests = self.comm.all_gather(np.array([x], np.int64))
            given = [own._replace(x=int(one)) for own, one in zip(given, digests, strict=True)]
        return difference(self.first, self.last, given)

    def picture(self, *, width: int | None = None) -> str:
        """Draw the schedule."""
        return render(replace(self.schedule, programs=bare(self.schedule)), width=width)

    def close(self) -> None:
        """End this rank's part: the others are told. Idempotent."""
        self._is_closed = True
        self.runner.close()
        if self._forward is not None:
            self._forward.close()


def _codecs(codec: Codecs, links: Sequence[Link]) -> dict[Way, Codec]:
    """Return how floats travel on each way that has a codec. Raises UsageError for stages without a way."""
    ways: dict[tuple[int, int], Way] = {(link.source, link.target): (link, Kind.F) for link in links}
    ways |= {(link.target, link.source): (link, Kind.B) for link in links}
    each = codec if isinstance(codec, Mapping) else dict.fromkeys(ways, codec)
    if unknown := [stages for stages in each if stages not in ways]:
        raise UsageError(
            f"pipeline: codec: nothing goes from stage to stage as {unknown[0]!r} says; expected some of "
            f"{', '.join(map(str, ways)) or 'none'}"
        )
    return {ways[stages]: codec_of(one) for stages, one in each.items() if one is not None}


def bare(schedule: Schedule) -> tuple[tuple[Any, ...], ...]:
    """Return the programs without messages and reductions."""
    return tuple(
        tuple(action for action in program if action.peer < 0 and action.kind is not Kind.REDUCE)
        for program in schedule.programs
    )


def only_forward(schedule: Schedule) -> Schedule:
    """Return a schedule of the same forwards in the same order, which is legal if the whole was."""
    programs = tuple(tuple(action for action in program if action.kind is Kind.F) for program in schedule.programs)
    return Schedule(f"{schedule.name}, forward only", schedule.microbatches, schedule.placement, programs)
