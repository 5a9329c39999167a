"""Bootstrap: build the Communicator of all ranks from each rank's Transport and settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.buffers import shared_memory
from commlib.communicator import Communicator
from commlib.config.settings import Config, collect_compared, compare
from commlib.cost.chooser import Chooser, Tuning
from commlib.errors import CommlibError
from commlib.group.gathering import find_topology, gather_objects
from commlib.group.group import Group
from commlib.runtime.deferred_free import DeferredFree
from commlib.runtime.process import Runtime
from commlib.runtime.recording import Recording
from commlib.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Agreement:
    """The state that all ranks agree on. token: unique to this job and to this initialization of commlib.

    extras: each rank's extra information for the other ranks, by rank.
    """

    token: str
    chooser: Chooser
    extras: Sequence[Any] = ()


def agree(
    transport: Transport,
    settings: Config,
    bad: str = "",
    extra: Any = None,
    origins: Mapping[str, str] | None = None,
) -> Agreement:
    """Compare the settings of all ranks. Collective.

    bad: an error text if this rank's settings are bad, else "". extra: information for the other ranks, picklable.
    origins: the origins of its settings, as in `config.Settings`; None: unknown.
    Raises UsageError for bad settings and MismatchError for different ones, on all ranks.
    """
    tuning, error = b"", None
    if transport.rank == 0 and not bad:
        try:
            tuning = Tuning.load(settings).to_bytes()
        except CommlibError as caught:
            error = caught
    mine = bad, collect_compared(settings), (secrets.token_hex(4), tuning, error), extra, origins
    everyone = gather_objects(mine, transport)
    known = [answer[4] for answer in everyone]
    compare([answer[:2] for answer in everyone], () if None in known else known)
    token, tuning, error = everyone[0][2]
    if error is not None:
        raise error
    loaded = Tuning.from_bytes(tuning)
    return Agreement(token, Chooser(loaded.machine, loaded.table), [answer[3] for answer in everyone])


def join(
    transport: Transport,
    settings: Config,
    agreement: Agreement,
    recording: Recording | None = None,
    retired: DeferredFree | None = None,
) -> Communicator:
    """Return the communicator of all ranks; it takes ownership of the transport. Collective.

    retired: memory from an earlier initialization in this process that the ranks have yet to free together.
    """
    topology = find_topology(transport)
    neighbours = topology.nodes[topology.node(transport.rank)]
    if transport.rank == neighbours[0]:
        shared_memory.sweep()
    runtime = Runtime(
        settings, len(neighbours), agreement.chooser, token=agreement.token, recording=recording or Recording()
    )
    if retired is not None:
        runtime.retired.take(retired)
    runtime.retired.free(lambda notes: gather_objects(notes, transport))
    communicator = Communicator(transport, runtime, group=Group(transport, runtime, "world", topology=topology))
    communicator.group.prepare()
    return communicator
