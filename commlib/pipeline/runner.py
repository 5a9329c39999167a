"""Runner: execute one rank's actions of a schedule over stages of any framework."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.errors import UsageError
from commlib.pipeline.device_links import DeviceReceiver
from commlib.pipeline.links import Receiver
from commlib.pipeline.rank_links import RankLinks
from commlib.pipeline.schedule.ir import RECVS, SENDS, Action, Kind, Weights
from commlib.pipeline.schedule.lower import LinkDirection, LoweredSchedule, last_uses, message_releases
from commlib.pipeline.schedule.render import mark_positions
from commlib.pipeline.schedule.replay import direction_of
from commlib.pipeline.schedule.versions import versions
from commlib.pipeline.stage import Stage, StageValues, Tensors

_Key = tuple[int, int]  # stage, microbatch

_WORDS = {
    Kind.F: "forward of microbatch {0} in stage {1}",
    Kind.B: "backward of microbatch {0} in stage {1}",
    Kind.I: "gradients of the inputs of stage {1}, microbatch {0}",
    Kind.W: "gradients of the weights of stage {1}, microbatch {0}",
    Kind.SEND_F: "activations of microbatch {0} from stage {1} to stage {2}",
    Kind.RECV_F: "activations of microbatch {0} from stage {2} to stage {1}",
    Kind.SEND_B: "gradients of microbatch {0} from stage {1} to stage {2}",
    Kind.RECV_B: "gradients of microbatch {0} from stage {2} to stage {1}",
    Kind.REDUCE: "reduction of stage {1} over its replicas",
    Kind.STEP: "update of stage {1}",
}


@dataclass(slots=True)
class PendingValues:
    """What stages of this rank have not used or sent yet, and the microbatches in progress, by (stage, microbatch)."""

    values: defaultdict[_Key, dict[int, StageValues | None]] = field(default_factory=partial(defaultdict, dict))
    gradients: defaultdict[_Key, dict[int, StageValues | None]] = field(default_factory=partial(defaultdict, dict))
    unsent: dict[tuple[int, int, int, bool], StageValues | None] = field(default_factory=dict)
    """By (stage, microbatch, receiving stage, whether they are activations)."""
    unreleased: defaultdict[_Key, list[tuple[Receiver | DeviceReceiver, Any]]] = field(
        default_factory=partial(defaultdict, list)
    )
    """The messages whose memory the values use."""
    empty: set[_Key] = field(default_factory=set)
    alive: int = 0
    """The number of activations held."""


class Runner:
    """One rank's part of a schedule, for repeated runs.

    stages: this rank's, by number. name: distinguishes the channels of several pipelines of one communicator. codecs:
    by link direction; directions without one send values uncompressed. devices: the device type of each rank's stages,
    "" for host memory: if both ends of a link have the same, values go directly between the devices. The constructor is
    not collective; messages are. An exception in a stage ends the pipeline on all ranks: on this rank with a note that
    names the action, on the others as PeerError.
    """

    def __init__(
        self,
        comm: Communicator,
        lowered: LoweredSchedule,
        stages: Mapping[int, Stage],
        tensors: Tensors,
        *,
        name: str = "pipeline",
        codecs: Mapping[LinkDirection, Codec] | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        self._comm, self._lowered, self._stages = comm, lowered, stages
        schedule = lowered.schedule
        if schedule.ranks != comm.size:
            raise UsageError(f"{schedule.title}, but {comm.name} has {comm.size} ranks")
        self._program = schedule.programs[comm.rank]
        self._place = schedule.placement
        self._position = 0
        self._failure = ""
        self._links = RankLinks(comm, lowered, tensors, name, codecs or {}, devices or [""] * comm.size)
        self._links.explain_waits(self)
        self._pending = PendingValues()
        self._last = last_uses(schedule)
        self._final = _final(self._program)
        self._uses = {} if schedule.weights is Weights.FLUSH else versions(schedule)
        self._sources = {stage: lowered.sources(stage) for stage in stages}
        self._targets = {stage: lowered.targets(stage) for stage in stages}
        do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weight,
            Kind.REDUCE: self._reduce,
            Kind.STEP: self._step,
        }
        do |= dict.fromkeys(SENDS, self._send) | dict.fromkeys(RECVS, self._recv)
        back = message_releases(lowered)
        self._steps = [(do[action.kind], action, back.get(action, ())) for action in self._program]
        self.spans: list[tuple[float, float]] | None = None
        """The (begin, end) of each action of the last run (seconds, monotonic), if this is a list."""
        self.peak = 0
        """The most activations, of (stage, microbatch), held at once in the last run."""

    @property
    def last_gradients(self) -> dict[int, int]:
        """The position of the action that computes the last gradients of each stage of this rank."""
        program = enumerate(self._program)
        return {action.stage: place for place, action in program if action.kind in (Kind.B, Kind.W)}

    def run(self, empty: Collection[int] = ()) -> None:
        """Run all actions once. empty: microbatches without rows; needed on ranks of stages without sources.

        Raises the errors of the stages and of the channels: PeerError, StallError, TransportError.
        """
        if self._failure:
            raise UsageError(f"{self._lowered.schedule.title}: {self._failure}: create a new pipeline on all ranks")
        self._empty, self.peak = set(empty), 0
        for receiver in self._links.receivers.values():
            receiver.begin()
        spans, journal = self.spans, self._comm.group.progress.journal
        traced = journal.recorder is not None and journal.recorder.trace is not None
        if spans is not None:
            spans.clear()
        try:
            for position, (do, action, done) in enumerate(self._steps):
                self._position = position
                if spans is None and not traced:
                    do(action)
                else:
                    began = time.monotonic()
                    with journal.span("pipeline", str(action), **_facts(action)):
                        do(action)
                    if spans is not None:
                        spans.append((began, time.monotonic()))
                for key in done:
                    self._hand_back(key)
            for receiver in self._links.receivers.values():
                receiver.end()
            journal.step("pipeline")
        except BaseException as error:
            self._fail(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Close this rank's channels because of an error, and send it unless another rank caused it. Not collective."""
        self._failure = self._failure or f"rank {self._comm.rank} failed ({type(error).__name__})"
        self._pending = PendingValues()
        self._links.leave(error)

    def close(self) -> None:
        """Close this rank's channels. Idempotent; not collective."""
        self._links.close()
        self._failure = self._failure or "the pipeline is closed"

    @property
    def copied(self) -> int:
        """The number of messages of the last run that were copied.

        The first run copies all; later runs copy on links where a layer, hook or loss has kept received values.
        """
        return sum(receiver.copied for receiver in self._links.receivers.values())

    @property
    def position(self) -> str:
        """The current action of this rank, as text."""
        action, program = self._program[self._position], self._program
        return f"{describe(action)}; action {self._position + 1} of {len(program)} of rank {self._comm.rank}"

    @property
    def purpose(self) -> str:
        """What this rank waits for, at the end of a sentence."""
        return f" for {self.position}, {self._lowered.schedule.name}"

    def _fail(self, error: BaseException) -> None:
        """Add the position to the error, and notify the neighbours."""
        schedule = self._lowered.schedule
        self._failure = f"rank {self._comm.rank} failed at {self._program[self._position]} ({type(error).__name__})"
        drawing = mark_positions(schedule, {self._comm.rank: self._position})
        error.add_note(f"commlib: in a pipeline, {schedule.title}: at {self.position}\n{drawing}")
        self._pending = PendingValues()
        self._links.leave(error, f" at {self._program[self._position]}")

    # One method for each kind of action

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = stage, microbatch
        values = self._pending.values.pop(key, {})
        if microbatch in self._empty if not self._sources[stage] else None in values.values():
            self._pending.empty.add(key)
            results: Mapping[int, StageValues | None] = dict.fromkeys(self._targets[stage])
        else:
            if self._uses:
                self._stages[stage].use(self._uses[key][0])
            results = self._stages[stage].forward(microbatch, values)  # type: ignore[arg-type]  # none is None
            self._pending.alive += 1
            self.peak = max(self.peak, self._pending.alive)
        self._pass_on(action, self._targets[stage], results, self._pending.values)
        if self._last[key] is action:
            self._end(key)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = stage, microbatch
        gradients = self._pending.gradients.pop(key, {})
        if key in self._pending.empty:
            results: Mapping[int, StageValues | None] = dict.fromkeys(self._sources[stage])
        else:
            if self._uses:
                self._stages[stage].use(self._uses[key][0])
            if action.kind is Kind.I:
                results = self._stages[stage].backward_input(microbatch, gradients)  # type: ignore[arg-type]
            else:
                final = self._position in self._final
                results = self._stages[stage].backward(microbatch, gradients, final=final)  # type: ignore[arg-type]
        self._pass_on(action, self._sources[stage], results, self._pending.gradients)
        if self._last[key] is action:
            self._end(key)

    def _backward_weight(self, action: Action) -> None:
        key = action.stage, action.microbatch
        if key not in self._pending.empty:
            if self._uses:
                self._stages[action.stage].use(self._uses[key][0])
            self._stages[action.stage].backward_weight(action.microbatch, final=self._position in self._final)
        self._end(key)

    def _pass_on(
        self,
        action: Action,
        stages: tuple[int, ...],
        results: Mapping[int, StageValues | None],
        here: dict[_Key, dict[int, StageValues | None]],
    ) -> None:
        """Pass results to the stages on this rank that need them, and store the others until they are sent."""
        for other in stages:
            if self._place[other] == self._comm.rank:
                here[other, action.microbatch][action.stage] = results[other]
            else:
                self._pending.unsent[action.stage, action.microbatch, other, action.kind is Kind.F] = results[other]

    def _end(self, key: _Key) -> None:
        """Record that the activations of a microbatch are no longer needed."""
        if key in self._pending.empty:
            self._pending.empty.discard(key)
        else:
            self._pending.alive -= 1

    def _hand_back(self, key: _Key) -> None:
        """Release the memory of the messages for a microbatch: its stage no longer needs them."""
        for receiver, message in self._pending.unreleased.pop(key, ()):
            receiver.release(message)

    def _reduce(self, action: Action) -> None:
        self._stages[action.stage].reduce()

    def _step(self, action: Action) -> None:
        self._stages[action.stage].step()

    def _send(self, action: Action) -> None:
        key = action.stage, action.microbatch, action.peer, action.kind is Kind.SEND_F
        self._links.senders[direction_of(action)].send(self._pending.unsent.pop(key))

    def _recv(self, action: Action) -> None:
        receiver = self._links.receivers[direction_of(action)]
        values, message = receiver.recv()
        key = action.stage, action.microbatch
        self._pending.unreleased[key].append((receiver, message))
        (self._pending.values if action.kind is Kind.RECV_F else self._pending.gradients)[key][action.peer] = values


def describe(action: Action) -> str:
    """Return an action and its description."""
    return f"{action} ({_WORDS[action.kind].format(action.microbatch, action.stage, action.peer)})"


def _facts(action: Action) -> dict[str, Any]:
    """Return the facts of an action for a timeline; `peer` is a stage, -1 if it sends nothing."""
    return {"kind": str(action.kind), "stage": action.stage, "microbatch": action.microbatch, "peer": action.peer}


def _final(program: tuple[Action, ...]) -> set[int]:
    """Return the positions of the actions that compute the last gradients before a stage's REDUCE, STEP or its end."""
    last: dict[int, int] = {}
    final: set[int] = set()
    for place, action in enumerate(program):
        if action.kind in (Kind.B, Kind.W):
            last[action.stage] = place
        elif action.kind in (Kind.REDUCE, Kind.STEP) and action.stage in last:
            final.add(last.pop(action.stage))
    return final | set(last.values())
