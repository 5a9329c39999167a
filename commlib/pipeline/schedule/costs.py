"""Costs: the duration of a pipeline's actions, and the bytes of activations and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commlib.errors import UsageError
from commlib.pipeline.schedule.ir import RECVS, SENDS, Action, Kind, Link, Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of each stage: seconds (or any unit of time) for one microbatch, and bytes.

    B takes as long as I and W together. step: of a STEP. send, receive: the time that a rank is busy with each message,
    in addition to the transit time of `latency` and bytes / `bandwidth` (0: no limit). activations: bytes that a stage
    holds for a microbatch from its F to the end of its backward. messages: bytes sent along a link, and of the
    gradients that come back.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    step: tuple[float, ...] = ()
    activations: tuple[int, ...] = ()
    messages: Mapping[Link, int] = field(default_factory=dict)
    send: float = 0.0
    receive: float = 0.0
    latency: float = 0.0
    bandwidth: float = 0.0

    @classmethod
    def even(cls, stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> Costs:
        """Return equal costs for all stages, with free messages."""
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages)

    def seconds(self, action: Action) -> float:
        """Return the time that a rank is busy with an action."""
        stage = action.stage
        match action.kind:
            case Kind.F:
                return self.forward[stage]
            case Kind.B:
                return self.input[stage] + self.weight[stage]
            case Kind.I:
                return self.input[stage]
            case Kind.W:
                return self.weight[stage]
            case Kind.STEP:
                return self.step[stage] if self.step else 0.0
        return self.send if action.kind in SENDS else self.receive if action.kind in RECVS else 0.0

    def transit(self, link: Link) -> float:
        """Return the transit time of a message."""
        return self.latency + (self.messages.get(link, 0) / self.bandwidth if self.bandwidth else 0.0)

    def check(self, schedule: Schedule) -> None:
        """Raise UsageError unless the costs have the same number of stages as a schedule."""
        for name in ("forward", "input", "weight", "step", "activations"):
            values: Sequence[float] = getattr(self, name)
            if len(values) != schedule.stages and (values or name in ("forward", "input", "weight")):
                raise UsageError(f"costs: {name} of {len(values)} stages, but the schedule has {schedule.stages}")
