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
from commlib.pipeline.device_ways import DeviceReceiver, DeviceSender
from commlib.pipeline.message import HEAD
from commlib.pipeline.schedule.ir import RECVS, SENDS, Action, Kind, Weights
from commlib.pipeline.schedule.lower import Lowered, Way, handed_back, released_by
from commlib.pipeline.schedule.render import pointed
from commlib.pipeline.schedule.replay import way_of
from commlib.pipeline.schedule.versions import versions
from commlib.pipeline.stage import Stage, Tensors, Values
from commlib.pipeline.ways import Receiver, Sender

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
"""How a reason to leave begins, and what stands before another rank's."""


class Runner:
    """One rank's part of a schedule, run again and again.

    stages: this rank's, by number. name: tells the channels of several pipelines of one communicator apart. codecs: how
    values travel on a way that is named there, else as they are. devices: the kind that each rank's stages are on, ""
    for the host: where it is the same at both ends of a way, values go from device to device. Making it is not
    collective; the other ranks are met when messages are. An exception in a stage ends the pipeline on all ranks: here
    with a note that says at which action, there as PeerError.
    """

    def __init__(
        self,
        comm: Communicator,
        lowered: Lowered,
        stages: Mapping[int, Stage],
        tensors: Tensors,
        *,
        name: str = "pipeline",
        codecs: Mapping[Way, Codec] | None = None,
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
        self._senders: dict[Way, Sender | DeviceSender] = {}
        self._receivers: dict[Way, Receiver | DeviceReceiver] = {}
        self._channels: list[Any] = []
        self._open(tensors, name, codecs or {}, devices or [""] * comm.size)
        self._last = released_by(schedule)
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
        back = handed_back(lowered)
        self._steps = [(do[action.kind], action, back.get(action, ())) for action in self._program]
        self.spans: list[tuple[float, float]] | None = None
        """When each action of the last run began and ended (seconds, monotonic), if this is a list."""
        self.peak = 0
        """The most activations, of (stage, microbatch), that were held at once in the last run."""
        self._clear()

    def _open(self, tensors: Tensors, name: str, codecs: Mapping[Way, Codec], devices: Sequence[str]) -> None:
        """Open the channels of this rank: one for each link and direction that has another rank at its end."""
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
                channel = there = self._comm.channel(peer, edge, HEAD, "uint8", depth, device=tensors.device)
                if rank == sender:
                    self._senders[way] = DeviceSender(there, tensors, codec)
                else:
                    self._receivers[way] = DeviceReceiver(there, tensors, codec)
            else:
                channel = here = self._comm.channel(peer, edge, HEAD, "uint8", depth)
                if rank == sender:
                    self._senders[way] = Sender(here, tensors, codec)
                else:
                    self._receivers[way] = Receiver(here, tensors, codec)
            channel.purpose = purpose
            self._channels.append(channel)

    @property
    def last_gradients(self) -> dict[int, int]:
        """The place of the action that makes the last gradients of each stage of this rank."""
        program = enumerate(self._program)
        return {action.stage: place for place, action in program if action.kind in (Kind.B, Kind.W)}

    def run(self, empty: Collection[int] = ()) -> None:
        """Run all actions once. empty: microbatches that have no rows, known where stages without sources are.

        Raises what a stage raises, and what channels do: PeerError, StallError, TransportError.
        """
        if self._failure:
            raise UsageError(f"{self._lowered.schedule.title}: {self._failure}: make another pipeline, on all ranks")
        self._nothing, self.peak = set(empty), 0
        for receiver in self._receivers.values():
            receiver.begin()
        spans, journal = self.spans, self._comm.group.journal
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
        """Close this rank's channels because of an error, of which they tell unless it was told. Not collective."""
        self._failure = self._failure or f"rank {self._comm.rank} failed ({type(error).__name__})"
        self._clear()
        for channel in self._channels:
            channel.close(_why_left(error))

    def close(self) -> None:
        """Close this rank's channels. Idempotent; not collective."""
        for channel in self._channels:
            channel.close()
        self._failure = self._failure or "it is closed"

    @property
    def copied(self) -> int:
        """How many messages of the last run were copied, for somebody kept some of them: in the first run all are."""
        return sum(receiver.copied for receiver in self._receivers.values())

    @property
    def position(self) -> str:
        """Say at which action this rank is."""
        action, program = self._program[self._position], self._program
        return f"{describe(action)}; action {self._position + 1} of {len(program)} of rank {self._comm.rank}"

    def _purpose(self) -> str:
        return f" for {self.position}, {self._lowered.schedule.name}"

    def _fail(self, error: BaseException) -> None:
        """Say where it was, and let the neighbours know."""
        schedule = self._lowered.schedule
        self._failure = f"rank {self._comm.rank} failed at {self._program[self._position]} ({type(error).__name__})"
        drawn = pointed(schedule, {self._comm.rank: self._position})
        error.add_note(f"commlib: in a pipeline, {schedule.title}: at {self.position}\n{drawn}")
        self._clear()
        for channel in self._channels:
            channel.close(_why_left(error, f" at {self._program[self._position]}"))

    def _clear(self) -> None:
        self._given: defaultdict[_Key, dict[int, Values | None]] = defaultdict(dict)
        self._gradients: defaultdict[_Key, dict[int, Values | None]] = defaultdict(dict)
        self._leaving: dict[tuple[int, int, int, bool], Values | None] = {}
        self._held: defaultdict[_Key, list[tuple[Receiver | DeviceReceiver, Any]]] = defaultdict(list)
        self._empty: set[_Key] = set()
        self._alive = 0

    # What each kind of action does

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = stage, microbatch
        given = self._given.pop(key, {})
        if microbatch in self._nothing if not self._sources[stage] else None in given.values():
            self._empty.add(key)
            results: Mapping[int, Values | None] = dict.fromkeys(self._targets[stage])
        else:
            if self._uses:
                self._stages[stage].use(self._uses[key][0])
            results = self._stages[stage].forward(microbatch, given)  # type: ignore[arg-type]  # none is None
            self._alive += 1
            self.peak = max(self.peak, self._alive)
        self._pass_on(action, self._targets[stage], results, self._given)
        if self._last[key] is action:
            self._end(key)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = stage, microbatch
        gradients = self._gradients.pop(key, {})
        if key in self._empty:
            results: Mapping[int, Values | None] = dict.fromkeys(self._sources[stage])
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
        results: Mapping[int, Values | None],
        here: dict[_Key, dict[int, Values | None]],
    ) -> None:
        """Give results to the stages that need them on this rank, and keep the others until they are sent."""
        for other in stages:
            if self._place[other] == self._comm.rank:
                here[other, action.microbatch][action.stage] = results[other]
            else:
                self._leaving[action.stage, action.microbatch, other, action.kind is Kind.F] = results[other]

    def _end(self, key: _Key) -> None:
        """Note that the activations of a microbatch are needed no more."""
        if key in self._empty:
            self._empty.discard(key)
        else:
            self._alive -= 1

    def _hand_back(self, key: _Key) -> None:
        """Hand back the memory of what came for a microbatch: its stage is done with it."""
        for receiver, message in self._held.pop(key, ()):
            receiver.release(message)

    def _send(self, action: Action) -> None:
        key = action.stage, action.microbatch, action.peer, action.kind is Kind.SEND_F
        self._senders[way_of(action)].send(self._leaving.pop(key))

    def _recv(self, action: Action) -> None:
        receiver = self._receivers[way_of(action)]
        values, message = receiver.recv()
        key = action.stage, action.microbatch
        self._held[key].append((receiver, message))
        (self._given if action.kind is Kind.RECV_F else self._gradients)[key][action.peer] = values


def describe(action: Action) -> str:
    """Return an action and what it does, in words."""
    return f"{action} ({_WORDS[action.kind].format(action.microbatch, action.stage, action.peer)})"


def _facts(action: Action) -> dict[str, Any]:
    """Return what a timeline says of an action; `peer` is a stage, -1 where it sends nothing."""
    return {"kind": str(action.kind), "stage": action.stage, "microbatch": action.microbatch, "peer": action.peer}


def _why_left(error: BaseException, place: str = "") -> str:
    """Return why a rank leaves; if another one left it waiting, why the first one did, however far away that is."""
    for peer, why in error.missing.items() if isinstance(error, PeerError) else ():
        if why.startswith(_LEFT):
            first = why.partition(_IN_VAIN)[2] or f"rank {peer} {why}"
            return f"{_LEFT} waited{place}{_IN_VAIN}{first}"
    return f"{_LEFT} failed{place} ({line(error)})"


def _final(program: tuple[Action, ...]) -> set[int]:
    """Return the places of the actions that make the last gradients before a stage's REDUCE, STEP or its end."""
    last: dict[int, int] = {}
    final: set[int] = set()
    for place, action in enumerate(program):
        if action.kind in (Kind.B, Kind.W):
            last[action.stage] = place
        elif action.kind in (Kind.REDUCE, Kind.STEP) and action.stage in last:
            final.add(last.pop(action.stage))
    return final | set(last.values())
