"""init, ranks and what is built in: Horovod's module-level functions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import commlib
from commlib.errors import TransportError, UsageError
from commlib.horovod import environment
from commlib.horovod.process_sets import ProcessSet, global_process_set, registry, running
from commlib.launch.mpi_start import load_mpi

log = logging.getLogger("commlib")


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> Any:
    """Join the other processes, and return their Communicator. Collective and idempotent.

    comm: ranks of MPI's world that join each other (the others must not call this with these ranks), or an mpi4py
    communicator. process_sets: those to register, all or, if one is refused, none; of communicators that a split made
    each rank gives its own. "dynamic" is accepted, because they may always be added later. Sets whose ranks are
    registered already, by an earlier call, stand for those. Raises UsageError (a ValueError) for ranks that there are
    not and where two sets have the same ranks or one has all, MismatchError where ranks give different sets; commlib is
    then initialised nevertheless. Of the HOROVOD_* environment variables those are taken
    that have a meaning here, when commlib is initialised: see `environment`.
    """
    if commlib.is_initialized():
        world = commlib.init()
        if comm is not None:
            _check_same(comm, world)
        registry()
    else:
        world = _start(comm)
    if hasattr(comm, "Get_group"):
        global_process_set.mpi_comm = comm
    if process_sets is not None and not isinstance(process_sets, str):
        registry().add_missing(list(process_sets), "init", distinct=True)
    elif isinstance(process_sets, str) and process_sets != "dynamic":
        raise UsageError(f'init: process_sets is {process_sets!r}: expected "dynamic" or a list of ProcessSet')
    return world


def _start(comm: Any) -> Any:
    said = environment.read(os.environ)
    world = commlib.init(_native(comm), defaults=said.settings)
    try:
        environment.check_launcher(os.environ, world.size)
    except TransportError:
        commlib.shutdown()
        raise
    if said.ignored and world.rank == 0:
        _say_ignored(said.ignored)
    if said.timeline and not world.config.timeline:
        commlib.start_timeline(said.timeline, mark_cycles=said.mark_cycles)
    registry()
    return world


@cache
def _say_ignored(names: tuple[str, ...]) -> None:
    """Warn once, however often commlib is initialised."""
    log.warning("these variables mean nothing to commlib, and are ignored: %s", ", ".join(names))


def shutdown() -> None:
    """Finish what is in flight, and leave the other processes. `init` may be called again."""
    commlib.shutdown()


def is_initialized() -> bool:
    """Return whether commlib is running."""
    return commlib.is_initialized()


def rank() -> int:
    """Return this process's number among all, from 0. Raises UsageError (a ValueError) before `init`."""
    return running().rank


def size() -> int:
    """Return the number of ranks."""
    return running().size


def local_rank() -> int:
    """Return this process's number among those of its node, from 0."""
    return _node(running().rank).index(running().rank)


def local_size() -> int:
    """Return the number of ranks on this node."""
    return len(_node(running().rank))


def cross_rank() -> int:
    """Return the number of this node among those that have a rank of this local rank."""
    return _peers().index(running().rank)


def cross_size() -> int:
    """Return the number of nodes that have a rank of this local rank."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Return whether all nodes have as many ranks."""
    return len({len(ranks) for ranks in running().topology.nodes}) == 1


def _node(number: int) -> tuple[int, ...]:
    topology = running().topology
    return topology.nodes[topology.node(number)]


def _peers() -> list[int]:
    place = local_rank()
    return [ranks[place] for ranks in running().topology.nodes if len(ranks) > place]


def mpi_threads_supported() -> bool:
    """Return True: commlib starts on no other MPI. Raises UsageError before `init`."""
    running()
    return True


def mpi_enabled() -> bool:
    """Return True: MPI is the way between processes."""
    return True


def mpi_built() -> bool:
    """Return True: MPI is the way between processes."""
    return True


def gloo_enabled() -> bool:
    """Return False: there is no gloo."""
    return False


def gloo_built() -> bool:
    """Return False: there is no gloo."""
    return False


def nccl_built() -> int:
    """Return 0: there is no NCCL yet."""
    return 0


def ddl_built() -> bool:
    """Return False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """Return False: tensors on a GPU are staged through the host."""
    return False


def rocm_built() -> bool:
    """Return False: there is no ROCm."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what operations do, from now on, to a Chrome trace (chrome://tracing, Perfetto). Rank 0 writes.

    It is that of `commlib.start_timeline`, so other operations are in it too. mark_cycles: also say when ranks
    negotiate. Raises UsageError if one is being written.
    """
    running()
    commlib.start_timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finish the trace that `start_timeline` began."""
    running()
    commlib.stop_timeline()


def _native(comm: Any) -> Any:
    """Return the mpi4py communicator that `init` is to use, or None for all."""
    if comm is None or hasattr(comm, "Get_group"):
        return comm
    if not isinstance(comm, Sequence) or isinstance(comm, str):
        raise UsageError(f"init: comm is a {type(comm).__name__}: expected a list of ranks or an mpi4py communicator")
    if not comm:
        return None
    MPI = load_mpi()
    ranks = [int(number) for number in comm]
    everyone = MPI.COMM_WORLD
    if everyone.rank not in ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < everyone.size:
        raise UsageError(
            f"init: comm is {ranks}: expected different ranks of the {everyone.size} of MPI's world, among them this "
            f"one, {everyone.rank}"
        )
    return everyone.Create_group(everyone.Get_group().Incl(ranks))


def _check_same(comm: Any, world: Any) -> None:
    """Raise UsageError unless `comm` means the ranks that are there already."""
    from mpi4py import MPI

    if hasattr(comm, "Get_group"):
        group = comm.Get_group()
    else:
        group = MPI.COMM_WORLD.Get_group().Incl([int(number) for number in comm]) if comm else world.native.Get_group()
    if MPI.Group.Compare(group, world.native.Get_group()) != MPI.IDENT:
        raise UsageError("init: commlib is initialised already, with other ranks: call shutdown first")
