"""Random schedules of pipelines, legal and not; stages made of arrays; and oracles without messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commlib.devices.array import DeviceArray
from commlib.errors import PeerError
from commlib.pipeline.schedule import Action, Kind, Link, Schedule
from commlib.pipeline.stage import StageValues

Work = list[Action]


def works(stage: int, microbatch: int, *, split: bool) -> Work:
    """Return a stage's actions for a microbatch, in order."""
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    return [Action(stage, kind, microbatch) for kind in kinds]


def random_schedule(seed: int, *, ranks: int | None = None) -> tuple[Schedule, tuple[Link, ...]]:
    """Return a schedule that ends, made by letting a random rank take a random possible action; and its links."""
    chance = random.Random(seed)
    ranks = ranks or chance.randint(1, 4)
    stages = ranks * chance.randint(1, 2) if chance.random() < 0.5 else chance.randint(ranks, ranks + 3)
    place = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(place)
    microbatches = chance.randint(1, 6)
    links = [Link(stage, stage + 1) for stage in range(stages - 1)]
    if stages > 2 and chance.random() < 0.3:
        source = chance.randrange(stages - 2)
        links.append(Link(source, chance.randint(source + 2, stages - 1)))
    splits = {(stage, mb): chance.random() < 0.4 for stage in range(stages) for mb in range(microbatches)}
    remaining = {key: works(*key, split=split) for key, split in splits.items()}
    done: set[Action] = set()
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    while any(remaining.values()):
        able = [work[0] for work in remaining.values() if work and is_able(work[0], done, links)]
        action = chance.choice(able)
        remaining[action.stage, action.microbatch].pop(0)
        done.add(action)
        programs[place[action.stage]].append(action)
    return Schedule(f"random {seed}", microbatches, tuple(place), tuple(map(tuple, programs))), tuple(links)


def is_able(action: Action, done: set[Action], links: list[Link] | tuple[Link, ...]) -> bool:
    """Return whether the requirements of an action are done, on any rank."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.W:
        return Action(stage, Kind.I, microbatch) in done
    if kind is Kind.F:
        return all(Action(link.source, Kind.F, microbatch) in done for link in links if link.target == stage)
    behind = [link.target for link in links if link.source == stage]
    return Action(stage, Kind.F, microbatch) in done and all(
        {Action(other, Kind.I, microbatch), Action(other, Kind.B, microbatch)} & done for other in behind
    )


def disturbed(schedule: Schedule, seed: int) -> Schedule:
    """Return a schedule in which some actions have swapped places, or are missing: legal or not."""
    chance = random.Random(seed)
    programs = [list(program) for program in schedule.programs]
    for _ in range(chance.randint(1, 2)):
        program = chance.choice(programs)
        if len(program) > 1:
            first = chance.randrange(len(program) - 1)
            second = first + 1 if chance.random() < 0.7 else chance.randrange(len(program))
            program[first], program[second] = program[second], program[first]
        if program and chance.random() < 0.03:
            program.pop(chance.randrange(len(program)))
    return replace(schedule, programs=tuple(map(tuple, programs)))


def ends(schedule: Schedule, links: tuple[Link, ...]) -> bool:
    """Return whether all programs run to their ends, each action once its requirements are done.

    Messages that are received in the order in which they were sent add no other wait: earlier ones arrive earlier.
    """
    expected = {
        Action(stage, Kind.F, microbatch)
        for stage in range(schedule.stages)
        for microbatch in range(schedule.microbatches)
    }
    everything = [action for program in schedule.programs for action in program]
    if len(set(everything)) < len(everything) or not expected <= set(everything):
        return False
    backwards = (Kind.B, Kind.I, Kind.W)
    forward_only = not any(action.kind in backwards for action in everything)
    for stage, _, microbatch, _ in expected:
        rest = {kind for kind in backwards if Action(stage, kind, microbatch) in everything}
        if rest not in ({Kind.B}, {Kind.I, Kind.W}) and not forward_only:
            return False
    done: set[Action] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            while at[rank] < len(program) and is_able(program[at[rank]], done, links):
                done.add(program[at[rank]])
                at[rank] += 1
                moved = True
    return all(place == len(program) for place, program in zip(at, schedule.programs, strict=True))


class ArrayTensors:
    """Arrays are tensors that always want a gradient, if they are floats."""

    device: Any = None

    def array(self, value: Any) -> Any:
        return value

    def read(self, value: Any) -> Any:
        return value

    def wants_gradient(self, value: Any) -> bool:
        return bool(value.dtype.kind == "f")

    def tensor(self, array: Any, *, wants_gradient: bool) -> Any:
        return array

    def memory(self, value: Any) -> Any:
        return None

    def is_used(self, memory: Any) -> bool:
        return False

    def move(self, memory: Any) -> None:
        pass


class ArraysOnDevice(ArrayTensors):
    """The same, for stages that compute on the host. Arrays travel over a device, by `put` and `fetch` of the place."""

    def __init__(self, place: Any, device: Any) -> None:
        self._place, self.device = place, device

    def read(self, value: Any) -> Any:
        return self.device.wrap(self._place.put(value), "read")

    def tensor(self, array: Any, *, wants_gradient: bool) -> Any:
        if type(array) is not DeviceArray:
            return array
        values = self._place.fetch(self.device.at(array.address, array.shape, array.dtype, array.owner))
        values.flags.writeable = False
        return values


class ArrayStage:
    """Send w times the sum of the inputs to all targets; the last stage's loss is the sum of that times 3.

    All numbers are small integers, so that sums are exact in any order. Inputs are compared again in the backward, to
    detect a message that was released too early.
    """

    def __init__(
        self,
        stage: int,
        links: Sequence[Link],
        inputs: Callable[[int], Any] | None = None,
        *,
        before: Callable[[Action], None] = lambda action: None,
        changes_nothing: bool = False,
    ) -> None:
        self.stage, self.inputs, self.before = stage, inputs, before
        self.changes_nothing = changes_nothing
        self.targets = [link.target for link in links if link.source == stage]
        self.sources = [link.source for link in links if link.target == stage]
        self.weight, self.gradient = 1.0 if changes_nothing else stage + 2.0, 0.0
        self.losses: dict[int, float] = {}
        self.given: dict[int, tuple[dict[int, Any], Any]] = {}
        self.pending: dict[int, tuple[Any, Any]] = {}
        self.finals: list[bool] = []
        self.reduced = 0

    def forward(self, microbatch: int, inputs: Mapping[int, StageValues]) -> dict[int, StageValues]:
        self.before(Action(self.stage, Kind.F, microbatch))
        received = {}
        for source, (tensors, note) in inputs.items():
            assert note == f"of {source}"
            received[source] = tensors[0]
        assert set(received) == set(self.sources)
        if len(received) == 1:
            (total,) = received.values()
        else:
            total = sum(received.values()) if received else self.inputs(microbatch)  # type: ignore[misc]
        self.given[microbatch] = received, np.array(total)
        # A stage that changes nothing returns its input: in the memory of the message that contained it.
        out = total if self.changes_nothing else self.weight * total
        if not self.targets:
            self.losses[microbatch] = float(3 * out.sum())
        values = StageValues([out, np.array([microbatch], np.int64), None], f"of {self.stage}")
        return dict.fromkeys(self.targets, values)

    def _gradients(self, microbatch: int, gradients: Mapping[int, StageValues]) -> tuple[Any, Any]:
        received, total = self.given.pop(microbatch)
        if received:
            assert (sum(received.values()) == total).all(), "an input has changed since its forward"
        assert set(gradients) == set(self.targets)
        for values in gradients.values():
            assert len(values.tensors) == 3 and values.tensors[1] is None and values.tensors[2] is None
        if len(gradients) == 1:
            (values,) = gradients.values()
            return total, values.tensors[0]
        gradient = sum(values.tensors[0] for values in gradients.values()) if gradients else np.full_like(total, 3.0)
        return total, gradient

    def _back(self, gradient: Any) -> dict[int, StageValues]:
        input_gradient = gradient if self.changes_nothing else self.weight * gradient
        return dict.fromkeys(self.sources, StageValues([input_gradient, None, None]))

    def backward(self, microbatch: int, gradients: Any, *, final: bool) -> dict[int, StageValues]:
        self.before(Action(self.stage, Kind.B, microbatch))
        total, gradient = self._gradients(microbatch, gradients)
        self.gradient += float((total * gradient).sum())
        self.finals.append(final)
        return self._back(gradient)

    def backward_input(self, microbatch: int, gradients: Any) -> dict[int, StageValues]:
        self.before(Action(self.stage, Kind.I, microbatch))
        total, gradient = self._gradients(microbatch, gradients)
        self.pending[microbatch] = total, gradient
        return self._back(gradient)

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        self.before(Action(self.stage, Kind.W, microbatch))
        total, gradient = self.pending.pop(microbatch)
        self.gradient += float((total * gradient).sum())
        self.finals.append(final)

    def reduce(self) -> None:
        self.reduced += 1

    def step(self) -> None:
        raise AssertionError("no schedule of these tests updates weights")

    def use(self, version: int) -> None:
        raise AssertionError("no schedule of these tests has versions")


def batch_of(microbatch: int) -> Any:
    """Return the input of a microbatch: some small integers, whose number differs between microbatches."""
    return (np.arange(5 + microbatch % 3) + microbatch).astype(np.float64)


def expected(links: Sequence[Link], stages: int, microbatches: Sequence[int]) -> tuple[dict[int, float], list[float]]:
    """Return the loss of each microbatch, and the gradient of each stage's weight."""
    losses: dict[int, float] = {}
    weights = [stage + 2.0 for stage in range(stages)]
    gradients = [0.0] * stages
    for microbatch in microbatches:
        totals: list[Any] = []
        for stage in range(stages):
            sources = [link.source for link in links if link.target == stage]
            totals.append(sum(weights[s] * totals[s] for s in sources) if sources else batch_of(microbatch))
        losses[microbatch] = float(3 * (weights[-1] * totals[-1]).sum())
        input_gradients: list[Any] = [None] * stages
        for stage in reversed(range(stages)):
            targets = [link.target for link in links if link.source == stage]
            ones = np.full_like(totals[stage], 3.0)
            input_gradients[stage] = sum(weights[t] * input_gradients[t] for t in targets) if targets else ones
            gradients[stage] += float((totals[stage] * input_gradients[stage]).sum())
    return losses, gradients


def assert_a_failing_loss_is_reported(comm: Any, step: Callable[[], object]) -> None:
    """Check the ranks' errors in a step whose loss raises ZeroDivisionError("no rows") on the last stage's rank."""
    with pytest.raises((ZeroDivisionError, PeerError)) as caught:
        step()
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    last = comm.size - 1
    if comm.rank == last:
        assert caught.type is ZeroDivisionError and f"at {last}F0 (forward of microbatch 0 in stage {last})" in text
    elif comm.rank == last - 1:
        assert f"it failed at {last}F0 (ZeroDivisionError: no rows)" in text
