"""Auto: choose a schedule by simulated time, from the costs of a model's layers, within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commlib.errors import UsageError
from commlib.pipeline.schedule.balance import balance
from commlib.pipeline.schedule.clock import Timing
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.depths import deepen
from commlib.pipeline.schedule.ir import Kind, Link, Schedule
from commlib.pipeline.schedule.lower import lower
from commlib.pipeline.schedule.registry import make, table
from commlib.pipeline.schedule.simulate import simulate

_MOST_CHUNKS = 4  # stages per rank to try
_ENOUGH = 0.01  # the least speedup that is worth more activations


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of each layer of a model for one microbatch: seconds of F, I and W, and bytes.

    activations: kept for the layer's backward. outputs: passed to the next layer. keeps_inputs: a stage keeps only its
    inputs, and its backward recomputes the forward. again: the same in schedules with split backwards, where both I and
    W recompute.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    activations: tuple[int, ...]
    outputs: tuple[int, ...]
    keeps_inputs: bool = False
    again: bool = False

    @property
    def whole(self) -> tuple[float, ...]:
        """Seconds of forward and backward of each layer."""
        return tuple(map(sum, zip(self.forward, self.input, self.weight, strict=True)))

    def of_stages(self, counts: Sequence[int], *, splits: bool = False) -> Costs:
        """Return the costs of stages with `counts` layers each. splits: for a schedule with I and W."""
        parts = [slice(start, end) for start, end in pairwise((0, *accumulate(counts)))]
        forward = tuple(sum(self.forward[part]) for part in parts)
        twice = splits and self.again
        once = twice or self.keeps_inputs
        inputs = tuple(self.outputs[part.start - 1] if part.start else 0 for part in parts)
        return Costs(
            forward,
            tuple(sum(self.input[part]) + once * more for part, more in zip(parts, forward, strict=True)),
            tuple(sum(self.weight[part]) + twice * more for part, more in zip(parts, forward, strict=True)),
            activations=inputs if once else tuple(sum(self.activations[part]) for part in parts),
            messages={Link(s, s + 1): self.outputs[part.stop - 1] for s, part in enumerate(parts[:-1])},
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that was tried. counts: layers in each stage. fits: its activations are within the limit."""

    schedule: Schedule
    counts: tuple[int, ...]
    timing: Timing
    fits: bool

    @property
    def nbytes(self) -> int:
        """The most bytes of activations that a rank holds."""
        return max(self.timing.peak_bytes)


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The chosen schedule, all candidates, the fastest first, and the reason."""

    best: Candidate
    tried: tuple[Candidate, ...]
    why: str


def choose(layers: LayerCosts, ranks: int, microbatches: int, *, memory: int | None = None) -> ScheduleChoice:
    """Return the fastest schedule whose ranks hold at most `memory` bytes of activations.

    Tries all schedules that leave updates to the optimizer, with up to 4 stages on a rank. Layers are cut to minimize
    the cost of the most expensive stage. Among the schedules within 1 % of the fastest, the one with the least
    activations is chosen. Raises UsageError if none fits, with the least that any schedule holds.
    """
    tried = sorted(_candidates(layers, ranks, microbatches, memory), key=lambda one: (one.timing.seconds, one.nbytes))
    if not tried:
        raise UsageError(f"{len(layers.forward)} layers cannot be cut into stages for {ranks} ranks")
    fitting = [one for one in tried if one.fits]
    if not fitting:
        least = min(tried, key=lambda one: one.nbytes)
        raise UsageError(
            f"no schedule holds at most {memory} bytes of activations on each of {ranks} ranks; the least is "
            f"{least.nbytes}, with {least.schedule.name}: use more microbatches, or recompute activations"
        )
    fastest = fitting[0]
    near = [one for one in fitting if one.timing.seconds <= fastest.timing.seconds * (1 + _ENOUGH)]
    best = min(near, key=lambda one: (one.nbytes, one.schedule.stages, one.timing.seconds))
    return ScheduleChoice(best, tuple(tried), _why(best, tried, memory))


def _candidates(layers: LayerCosts, ranks: int, microbatches: int, memory: int | None) -> list[Candidate]:
    candidates = []
    for name, plan in table.items():
        if plan.updates:
            continue
        for chunks in range(2, _MOST_CHUNKS + 1) if plan.is_looped else (plan.chunks,):
            if chunks * ranks > len(layers.forward):
                continue
            schedule = make(name, ranks, microbatches, stages=chunks * ranks)
            counts = balance(layers.whole, schedule.stages)
            splits = any(action.kind is Kind.I for program in schedule.programs for action in program)
            timing = simulate(deepen(lower(schedule)), layers.of_stages(counts, splits=splits))
            fits = memory is None or max(timing.peak_bytes) <= memory
            candidates.append(Candidate(schedule, counts, timing, fits))
    return candidates


def _why(best: Candidate, tried: Sequence[Candidate], memory: int | None) -> str:
    """Return the reason for the choice, and the schedules that are faster or hold less."""
    milliseconds = f"{best.timing.seconds * 1e3:.3g} ms"
    text = (
        f"{best.schedule.name} with {best.schedule.stages} stages: simulated {milliseconds} a batch, "
        f"{best.timing.bubble:.1%} idle, {best.nbytes} bytes of activations at most"
    )
    others = [one for one in tried if one is not best]
    faster = next((one for one in others if one.timing.seconds < best.timing.seconds), None)
    if faster is not None:
        gain = 1 - faster.timing.seconds / best.timing.seconds
        reason = f"holds {faster.nbytes}" if faster.fits else f"holds {faster.nbytes}, more than the {memory} allowed"
        text += f"; {faster.schedule.name} ({faster.schedule.stages} stages) is {gain:.1%} faster, but {reason}"
    return text
