"""The runner on loopback: ranks as threads, stages of arrays, every schedule and thousands of random ones."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import PeerError, StallError, UsageError
from commlib.pipeline.pipe import Pipe
from commlib.pipeline.runner import Runner
from commlib.pipeline.schedule import (
    Action,
    Kind,
    Link,
    PipelineScheduleError,
    Schedule,
    chain,
    make,
    simulate,
    table,
    verify,
)
from commlib.pipeline.stage import StageValues
from tests.bodies import loopback
from tests.bodies.pipelines import ArrayStage, ArrayTensors, batch_of, disturbed, expected, random_schedule


def run_all(
    schedule: Schedule, links: tuple[Link, ...], *, steps: int = 1, empty: tuple[int, ...] = (), **options: Any
) -> list[int]:
    """Run a schedule on loopback, and compare losses and gradients with those of one process; return ranks' peaks."""
    lowered = verify(schedule, links, reduce=True)

    def rank_main(comm: Any) -> Any:
        stages = {stage: ArrayStage(stage, links, batch_of) for stage in schedule.stages_of(comm.rank)}
        runner = Runner(comm, lowered, stages, ArrayTensors())
        for _ in range(steps):
            runner.run(empty)
        runner.close()
        return stages, runner.peak

    ranks = loopback.run(schedule.ranks, rank_main, **options)
    stages = {number: stage for own, _ in ranks for number, stage in own.items()}
    there = [microbatch for microbatch in range(schedule.microbatches) if microbatch not in empty]
    losses, gradients = expected(links, schedule.stages, there)
    assert stages[schedule.stages - 1].losses == losses
    assert [stages[stage].gradient / steps for stage in range(schedule.stages)] == gradients
    for stage in stages.values():
        assert not stage.given and not stage.pending
        assert stage.reduced == steps
        if not empty:
            assert stage.finals == [*[False] * (schedule.microbatches - 1), True] * steps
    return [peak for _, peak in ranks]


@pytest.mark.parametrize("nodes", [None, (0, 1, 2, 3)], ids=["on a node", "between nodes"])
@pytest.mark.parametrize("name", [name for name, plan in table.items() if not plan.updates])
def test_every_schedule_matches_one_process(name: str, nodes: tuple[int, ...] | None) -> None:
    for ranks, microbatches in ((1, 3), (2, 5), (3, 2), (4, 8)):
        schedule = make(name, ranks, microbatches)
        peaks = run_all(schedule, chain(schedule.stages), steps=2, nodes=nodes and nodes[:ranks])
        assert tuple(peaks) == simulate(schedule).peak


@pytest.mark.parametrize("first", range(0, 3_000, 100))
def test_random_schedules_run_or_are_refused(first: int) -> None:
    ran = refused = 0
    for seed in range(first, first + 100):
        schedule, links = random_schedule(seed)
        if seed % 2:
            schedule = disturbed(schedule, seed)
        try:
            verify(schedule, links)
        except PipelineScheduleError:
            refused += 1
            continue
        if not schedule.has_backward:  # its only backward was left out: legal, and without gradients
            continue
        nodes = tuple(seed // 2 * rank % 2 for rank in range(schedule.ranks))
        run_all(schedule, links, nodes=nodes)
        ran += 1
    assert ran >= 50 and refused


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipev", "interleaved"])
def test_identity_layers_pass_on_the_memory_of_messages(name: str) -> None:
    """Their results alias their inputs: that memory must not be released before it has been sent or used."""
    ranks, microbatches = 3, 9
    schedule = make(name, ranks, microbatches)
    links = chain(schedule.stages)
    last = schedule.stages - 1

    def rank_main(comm: Any) -> Any:
        stages = {s: ArrayStage(s, links, batch_of, changes_nothing=True) for s in schedule.stages_of(comm.rank)}
        pipe = Pipe(comm, schedule, links, stages, ArrayTensors())
        for kind in ("train", "forward", "forward", "train"):
            if kind == "forward":
                for stage in stages.values():
                    stage.losses.clear()
            getattr(pipe, kind)()
            if last in stages:
                assert stages[last].losses == {m: 3 * batch_of(m).sum() for m in range(microbatches)}, kind
        pipe.close()
        return {number: stage.gradient for number, stage in stages.items()}

    gradients = {number: value for own in loopback.run(ranks, rank_main) for number, value in own.items()}
    total = 2 * 3 * sum(float(batch_of(m).sum()) for m in range(microbatches))
    assert gradients == dict.fromkeys(range(schedule.stages), total)


def test_microbatches_may_be_empty() -> None:
    for name in ("1f1b", "zb_v", "interleaved"):
        schedule = make(name, 2, 6)
        run_all(schedule, chain(schedule.stages), steps=2, empty=(1, 4, 5))
        run_all(schedule, (*chain(schedule.stages), *([Link(0, 3)] if schedule.stages > 3 else [])), empty=(0, 5))


def test_shapes_and_dtypes_may_change_at_any_time() -> None:
    """The next shapes are announced again, also with more bytes than before, and with another number of values."""
    lowered = verify(make("1f1b", 2, 6))
    kinds = [("float32", (3,)), ("float64", (2, 5)), ("float32", (3,)), ("float16", (300, 70)), ("int8", (0, 2))]

    class Changing(ArrayStage):
        def forward(self, microbatch: int, inputs: Any) -> Any:
            if self.stage == 0:
                values = [np.full(shape, microbatch, dtype) for dtype, shape in kinds[: 1 + microbatch % 5]]
                return {1: StageValues(values[::-1])}
            for (dtype, shape), got in zip(kinds[microbatch % 5 :: -1], inputs[0].tensors, strict=True):
                assert got.dtype == dtype and got.shape == shape and (got == microbatch).all()
            self.given[microbatch] = inputs[0].tensors, None
            return {}

        def backward(self, microbatch: int, gradients: Any, *, final: bool) -> Any:
            if self.stage == 1:
                given: Any = self.given.pop(microbatch)[0]
                return {0: StageValues([one * 2 if one.dtype.kind == "f" else None for one in given])}
            for (dtype, shape), got in zip(kinds[microbatch % 5 :: -1], gradients[1].tensors, strict=True):
                assert got is None if dtype == "int8" else (got.shape == shape and (got == 2 * microbatch).all())
            return {}

    def rank_main(comm: Any) -> None:
        runner = Runner(comm, lowered, {comm.rank: Changing(comm.rank, chain(2))}, ArrayTensors())
        for _ in range(3):
            runner.run()

    for nodes in (None, (0, 1)):
        loopback.run(2, rank_main, nodes=nodes)


def failing(schedule: Schedule, at: Action, error: BaseException) -> list[str]:
    """Let one action raise; return the error of each rank."""
    lowered, links = verify(schedule), chain(schedule.stages)

    def before(action: Action) -> None:
        if action == at:
            raise error

    def rank_main(comm: Any) -> str:
        stages = {s: ArrayStage(s, links, batch_of, before=before) for s in schedule.stages_of(comm.rank)}
        runner = Runner(comm, lowered, stages, ArrayTensors())
        try:
            runner.run()
        except BaseException as caught:
            with pytest.raises(UsageError, match="create a new pipeline on all ranks"):
                runner.run()
            return "\n".join([type(caught).__name__, str(caught), *caught.__notes__])
        return "ended"

    return loopback.run(schedule.ranks, rank_main)


@pytest.mark.parametrize("action", ["0F2", "1B1", "2F3", "0B3", "2B0", "3F0"])
def test_an_exception_names_its_action_and_ends_all_ranks(action: str) -> None:
    schedule = make("1f1b", 4, 4)
    stage, kind, microbatch = int(action[0]), Kind(action[1]), int(action[2])
    texts = failing(schedule, Action(stage, kind, microbatch), ValueError("no such word"))
    assert texts[stage].startswith("ValueError\nno such word\ncommlib: in a pipeline, 1f1b, 4 ranks")
    assert f"at {action} (" in texts[stage] and "↑" in texts[stage]
    why = f"rank {stage} has left the pipeline: it failed at {action} (ValueError: no such word)"
    for rank, text in enumerate(texts):  # other ranks than neighbours only name a rank that waited in vain
        if rank != stage:
            assert (text.startswith("PeerError") and text.count(why) == 1) or text == "ended", text


def test_a_rank_that_is_late_is_named_with_the_action_it_waits_for() -> None:
    schedule = make("1f1b", 2, 2)
    lowered, links = verify(schedule), chain(2)

    def rank_main(comm: Any) -> str:
        def before(action: Action) -> None:
            if action == Action(0, Kind.F, 1):
                time.sleep(1.5)

        runner = Runner(
            comm, lowered, {comm.rank: ArrayStage(comm.rank, links, batch_of, before=before)}, ArrayTensors()
        )
        try:
            runner.run()
        except (StallError, PeerError) as error:
            return str(error)
        return ""

    config = Config(timeout=0.5)
    texts = loopback.run(2, rank_main, config=config)
    assert (
        "for 1RECV_F1 (activations of microbatch 1 from stage 0 to stage 1); action 5 of 8 of rank 1, 1f1b" in texts[1]
    )


def test_another_number_of_ranks_is_refused() -> None:
    lowered = verify(make("1f1b", 2, 2))

    def rank_main(comm: Any) -> None:
        with pytest.raises(UsageError, match="has 3 ranks"):
            Runner(comm, lowered, {}, ArrayTensors())

    loopback.run(3, rank_main)
