"""Runner: execute one rank's actions of a schedule over stages of any framework."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.errors import PeerError, UsageError, line
from commlib.p2p.channels.channel import Channel
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.pipeline.device_links import DeviceReceiver, DeviceSender
from commlib.pipeline.links import Receiver, Sender
from commlib.pipeline.message import HEAD
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

_LEFT, _IN_VAIN = "has left the pipeline: it", " in vain, because "
"""The start of the reason why a rank leaves, and the text before the reason of another rank."""


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
        self._senders: dict[LinkDirection, Sender | DeviceSender] = {}
        self._receivers: dict[LinkDirection, Receiver | DeviceReceiver] = {}
        self._channels: list[Any] = []
        self._open(tensors, name, codecs or {}, devices or [""] * comm.size)
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
            Kind.REDUCE: lambda action: self._stages[action.stage].reduce(),
            Kind.STEP: lambda action: self._stages[action.stage].step(),
        }
        do |= dict.fromkeys(SENDS, self._send) | dict.fromkeys(RECVS, self._recv)
        back = message_releases(lowered)
        self._steps = [(do[action.kind], action, back.get(action, ())) for action in self._program]
        self.spans: list[tuple[float, float]] | None = None
        """The (begin, end) of each action of the last run (seconds, monotonic), if this is a list."""
        self.peak = 0
        """The most activations, of (stage, microbatch), held at once in the last run."""
        self._clear()

    def _open(self, tensors: Tensors, name: str, codecs: Mapping[LinkDirection, Codec], devices: Sequence[str]) -> None:
        """Open the channels of this rank: one for each link and direction whose other end is on another rank."""
        rank, me = self._comm.rank, weakref.ref(self)

        def purpose() -> str:
            runner = me()
            return "" if runner is None else runner._purpose()

        for way, depth in self._lowered.depths.items():
            link, kind = way
            ends = self._place[link.source], self._place[link.target]
            sender, receiver = ends if kind is Kind.F else ends[::-1]
            if rank not in ends:
                continue
            peer = receiver if rank == sender else sender
            edge, codec = f"{name} {link} {kind}", codecs.get(way)
            channel: Channel | DeviceChannel
            if devices[rank] and devices[rank] == devices[peer]:
                channel = device_channel = self._comm.channel(peer, edge, HEAD, "uint8", depth, device=tensors.device)
                if rank == sender:
                    self._senders[way] = DeviceSender(device_channel, tensors, codec)
                else:
                    self._receivers[way] = DeviceReceiver(device_channel, tensors, codec)
            else:
                channel = host_channel = self._comm.channel(peer, edge, HEAD, "uint8", depth)
                if rank == sender:
                    self._senders[way] = Sender(host_channel, tensors, codec)
                else:
                    self._receivers[way] = Receiver(host_channel, tensors, codec)
            channel.purpose = purpose
            self._channels.append(channel)

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
        self._nothing, self.peak = set(empty), 0
        for receiver in self._receivers.values():
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
            for receiver in self._receivers.values():
                receiver.end()
            journal.step("pipeline")
        except BaseException as error:
            self._fail(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Close this rank's channels because of an error, and send it unless another rank caused it. Not collective."""
        self._failure = self._failure or f"rank {self._comm.rank} failed ({type(error).__name__})"
        self._clear()
        for channel in self._channels:
            channel.close(_leave_reason(error))

    def close(self) -> None:
        """Close this rank's channels. Idempotent; not collective."""
        for channel in self._channels:
            channel.close()
        self._failure = self._failure or "the pipeline is closed"

    @property
    def copied(self) -> int:
        """The number of messages of the last run that were copied.

        The first run copies all; later runs copy on links where a layer, hook or loss has kept received values.
        """
        return sum(receiver.copied for receiver in self._receivers.values())

    @property
    def position(self) -> str:
        """The current action of this rank, as text."""
        action, program = self._program[self._position], self._program
        return f"{describe(action)}; action {self._position + 1} of {len(program)} of rank {self._comm.rank}"

    def _purpose(self) -> str:
        return f" for {self.position}, {self._lowered.schedule.name}"

    def _fail(self, error: BaseException) -> None:
        """Add the position to the error, and notify the neighbours."""
        schedule = self._lowered.schedule
        self._failure = f"rank {self._comm.rank} failed at {self._program[self._position]} ({type(error).__name__})"
        drawing = mark_positions(schedule, {self._comm.rank: self._position})
        error.add_note(f"commlib: in a pipeline, {schedule.title}: at {self.position}\n{drawing}")
        self._clear()
        for channel in self._channels:
            channel.close(_leave_reason(error, f" at {self._program[self._position]}"))

    def _clear(self) -> None:
        self._inputs: defaultdict[_Key, dict[int, StageValues | None]] = defaultdict(dict)
        self._gradients: defaultdict[_Key, dict[int, StageValues | None]] = defaultdict(dict)
        self._leaving: dict[tuple[int, int, int, bool], StageValues | None] = {}
        self._unreleased: defaultdict[_Key, list[tuple[Receiver | DeviceReceiver, Any]]] = defaultdict(list)
        self._empty: set[_Key] = set()
        self._alive = 0

    # One method for each kind of action

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = stage, microbatch
        values = self._inputs.pop(key, {})
        if microbatch in self._nothing if not self._sources[stage] else None in values.values():
            self._empty.add(key)
            results: Mapping[int, StageValues | None] = dict.fromkeys(self._targets[stage])
        else:
            if self._uses:
                self._stages[stage].use(self._uses[key][0])
            results = self._stages[stage].forward(microbatch, values)  # type: ignore[arg-type]  # none is None
            self._alive += 1
            self.peak = max(self.peak, self._alive)
        self._pass_on(action, self._targets[stage], results, self._inputs)
        if self._last[key] is action:
            self._end(key)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = stage, microbatch
        gradients = self._gradients.pop(key, {})
        if key in self._empty:
            results: Mapping[int, StageValues | None] = dict.fromkeys(self._sources[stage])
        else:
            if self._uses:
                self._stages[stage].use(self._uses[key][0])
            if action.kind is Kind.I:
                results = self._stages[stage].backward_input(microbatch, gradients)  # type: ignore[arg-type]
            else:
                final = self._position in self._final
                results = self._stages[stage].backward(microbatch, gradients, final=final)  # type: ignore[arg-type]
        self._pass_on(action, self._sources[stage], results, self._gradients)
        if self._last[key] is action:
            self._end(key)

    def _backward_weight(self, action: Action) -> None:
        key = action.stage, action.microbatch
        if key not in self._empty:
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
                self._leaving[action.stage, action.microbatch, other, action.kind is Kind.F] = results[other]

    def _end(self, key: _Key) -> None:
        """Record that the activations of a microbatch are no longer needed."""
        if key in self._empty:
            self._empty.discard(key)
        else:
            self._alive -= 1

    def _hand_back(self, key: _Key) -> None:
        """Release the memory of the messages for a microbatch: its stage no longer needs them."""
        for receiver, message in self._unreleased.pop(key, ()):
            receiver.release(message)

    def _send(self, action: Action) -> None:
        key = action.stage, action.microbatch, action.peer, action.kind is Kind.SEND_F
        self._senders[direction_of(action)].send(self._leaving.pop(key))

    def _recv(self, action: Action) -> None:
        receiver = self._receivers[direction_of(action)]
        values, message = receiver.recv()
        key = action.stage, action.microbatch
        self._unreleased[key].append((receiver, message))
        (self._inputs if action.kind is Kind.RECV_F else self._gradients)[key][action.peer] = values


def describe(action: Action) -> str:
    """Return an action and its description."""
    return f"{action} ({_WORDS[action.kind].format(action.microbatch, action.stage, action.peer)})"


def _facts(action: Action) -> dict[str, Any]:
    """Return the facts of an action for a timeline; `peer` is a stage, -1 if it sends nothing."""
    return {"kind": str(action.kind), "stage": action.stage, "microbatch": action.microbatch, "peer": action.peer}


def _leave_reason(error: BaseException, place: str = "") -> str:
    """Return the reason why a rank leaves: the error, or for a rank that waited in vain the first rank's reason."""
    for peer, why in error.missing.items() if isinstance(error, PeerError) else ():
        if why.startswith(_LEFT):
            first = why.partition(_IN_VAIN)[2] or f"rank {peer} {why}"
            return f"{_LEFT} waited{place}{_IN_VAIN}{first}"
    return f"{_LEFT} failed{place} ({line(error)})"


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
