"""Bootstrap: from one rank's Transport and its settings to the Communicator of all ranks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.buffers import shared_memory
from commlib.communicator import Communicator
from commlib.config.settings import Config, compare, compared
from commlib.cost.chooser import Chooser, Tuning
from commlib.errors import CommlibError
from commlib.group.gathering import find_topology, gather_objects
from commlib.group.group import Group
from commlib.runtime.process import Runtime
from commlib.runtime.recording import Recording
from commlib.runtime.retired import Retired
from commlib.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hold what all ranks have alike. token: no other job has it, nor an earlier life of this one.

    told: what each rank had to tell the others beside its settings.
    """

    token: str
    chooser: Chooser
    told: Sequence[Any] = ()


def agree(
    transport: Transport,
    settings: Config,
    bad: str = "",
    told: Any = None,
    origins: Mapping[str, str] | None = None,
) -> Agreement:
    """Compare the settings of all ranks. Collective.

    bad: what is wrong with this rank's own, or "". told: what else, picklable, the others are to know of it. origins:
    of its settings, as in `config.Settings`; None: it is not known.
    Raises UsageError for wrong settings and MismatchError for different ones, on all ranks alike.
    """
    tuning, error = b"", None
    if transport.rank == 0 and not bad:
        try:
            tuning = Tuning.load(settings).to_bytes()
        except CommlibError as caught:
            error = caught
    mine = bad, compared(settings), (secrets.token_hex(4), tuning, error), told, origins
    everyone = gather_objects(mine, transport)
    known = [found[4] for found in everyone]
    compare([found[:2] for found in everyone], () if None in known else known)
    token, tuning, error = everyone[0][2]
    if error is not None:
        raise error
    loaded = Tuning.from_bytes(tuning)
    return Agreement(token, Chooser(loaded.machine, loaded.table), [found[3] for found in everyone])


def join(
    transport: Transport,
    settings: Config,
    agreement: Agreement,
    recording: Recording | None = None,
    retired: Retired | None = None,
) -> Communicator:
    """Return the communicator of all ranks, which owns the transport from then on. Collective.

    retired: what is left to be freed of an earlier life of this process.
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
    made = Communicator(transport, runtime, group=Group(transport, runtime, "world", topology=topology))
    made.group.prepare()
    return made
