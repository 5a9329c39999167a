"""Schedules of pipelines over MPI: every one in the table, random ones, growing messages, several pipelines at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.errors import MismatchError
from commlib.pipeline.pipe import Pipe
from commlib.pipeline.schedule import Link, Schedule, chain, make, simulate, table
from tests.bodies.pipelines import ArrayStage, ArrayTensors, batch_of, expected, random_schedule


def start(comm: Any, schedule: Schedule, links: tuple[Link, ...], **options: Any) -> tuple[Pipe, dict[int, ArrayStage]]:
    stages = {
        stage: ArrayStage(stage, links, options.pop("inputs", batch_of)) for stage in schedule.stages_of(comm.rank)
    }
    return Pipe(comm, schedule, links, stages, ArrayTensors(), **options), stages


def check(schedule: Schedule, links: tuple[Link, ...], stages: dict[int, ArrayStage], steps: int) -> None:
    losses, gradients = expected(links, schedule.stages, range(schedule.microbatches))
    for number, stage in stages.items():
        assert stage.gradient == steps * gradients[number]
        if number == schedule.stages - 1:
            assert stage.losses == losses


@pytest.mark.parametrize("name", [name for name, plan in table.items() if not plan.updates])
def test_every_schedule(comm: Any, name: str) -> None:
    for microbatches in (2, 7):
        schedule = make(name, comm.size, microbatches)
        links = chain(schedule.stages)
        pipe, stages = start(comm, schedule, links)
        for _ in range(3):
            pipe.train()
        assert pipe.runner.peak == simulate(pipe.lowered).peak[comm.rank]
        check(schedule, links, stages, 3)
        losses = pipe.broadcast_results([float(sum(stage.losses.values())) for stage in stages.values()][-1:])
        assert losses == [sum(expected(links, schedule.stages, range(microbatches))[0].values())]
        pipe.close()


def test_random_schedules(comm: Any) -> None:
    for seed in range(30):
        schedule, links = random_schedule(seed, ranks=comm.size)
        pipe, stages = start(comm, schedule, links)
        pipe.train()
        check(schedule, links, stages, 1)
        pipe.close()


def test_two_pipelines_in_turn(comm: Any) -> None:
    """Each has channels of its own, so neither receives the other's messages."""
    schedule = make("1f1b", comm.size, 4)
    links = chain(comm.size)
    pairs = [start(comm, schedule, links) for _ in range(2)]
    for _ in range(3):
        for pipe, _ in pairs:
            pipe.train()
    for pipe, stages in pairs:
        check(schedule, links, stages, 3)
        pipe.close()


def test_long_messages(comm: Any) -> None:
    """From bytes to megabytes, and back: between nodes, a message of 64 KiB or more needs its receiver's help."""

    def inputs(microbatch: int) -> Any:
        return np.full((1, 3, 1 << 16, 1 << 19)[microbatch % 4], 1.0 + microbatch)

    schedule = make("gpipe", comm.size, 8)
    links = chain(comm.size)
    pipe, stages = start(comm, schedule, links, inputs=inputs)
    for _ in range(2):
        pipe.train()
    factor = np.prod([stage + 2.0 for stage in range(comm.size)])
    if comm.size - 1 in stages:
        losses = {m: 3 * factor * float(inputs(m).sum()) for m in range(8)}
        assert stages[comm.size - 1].losses == losses
    for number, stage in stages.items():
        assert stage.gradient == 2 * sum(3 * factor / (number + 2.0) * float(inputs(m).sum()) for m in range(8))
    pipe.close()


@pytest.mark.ranks(min=2)
def test_ranks_that_request_different_schedules(comm: Any) -> None:
    schedule = make("gpipe" if comm.rank == 0 else "1f1b", comm.size, 4)
    with pytest.raises(MismatchError, match=r"gpipe.* on rank 0 but .*1f1b"):
        start(comm, schedule, chain(comm.size))
