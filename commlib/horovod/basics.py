"""Horovod's module-level functions: init, ranks and the built-in features."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import commlib
from commlib.arguments import list_of, whole_numbers
from commlib.communicator import Communicator
from commlib.errors import TransportError, UsageError
from commlib.horovod import environment
from commlib.horovod.process_sets import ProcessSet, global_process_set, registry, require_world
from commlib.launch.mpi_start import load_mpi

log = logging.getLogger("commlib")


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> Communicator:
    """Join the other processes, and return their Communicator. Collective and idempotent.

    Initialisation also reads the HOROVOD_* environment variables that commlib supports: see `environment`.

    Args:
        comm: The ranks of MPI's world that form the job (the other ranks must not call this with these ranks), or an
            mpi4py communicator.
        process_sets: Sets to register, all of them or, if one is refused, none; of communicators from a split each rank
            passes only its own. "dynamic" is accepted, because sets may always be added later. A set whose ranks an
            earlier call has registered becomes an alias of that set.

    Raises:
        UsageError: For ranks outside the world, and if two sets have the same ranks or one has all ranks; also a
            ValueError.
        MismatchError: If ranks pass different sets; commlib is initialised even then.
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
        expected = 'process_sets="dynamic", or a list of ProcessSet'
        registry().add_missing(list_of("init", expected, process_sets), "init", distinct=True)
    elif isinstance(process_sets, str) and process_sets != "dynamic":
        raise UsageError(f'init: process_sets is {process_sets!r}: expected "dynamic" or a list of ProcessSet')
    return world


def _start(comm: Any) -> Communicator:
    variables = environment.read(os.environ)
    world = commlib.init(_native(comm), defaults=variables.settings)
    try:
        environment.check_launcher(os.environ, world.size)
    except TransportError:
        commlib.shutdown()
        raise
    if variables.ignored and world.rank == 0:
        _warn_ignored(variables.ignored)
    if variables.timeline and not world.config.timeline:
        world.runtime.recording.start_timeline(variables.timeline, world.rank, mark_cycles=variables.mark_cycles)
    registry()
    return world


@cache
def _warn_ignored(names: tuple[str, ...]) -> None:
    """Warn once per process, even if commlib is initialised several times."""
    log.warning("commlib does not support these variables and ignores them: %s", ", ".join(names))


def shutdown() -> None:
    """Finish work in flight, and leave the job. `init` may be called again."""
    commlib.shutdown()


def is_initialized() -> bool:
    """Return whether commlib is running."""
    return commlib.is_initialized()


def rank() -> int:
    """Return this process's rank in the job, from 0.

    Raises:
        UsageError: Before `init`; also a ValueError.
    """
    return require_world().rank


def size() -> int:
    """Return the number of ranks."""
    return require_world().size


def local_rank() -> int:
    """Return this process's rank within its node, from 0."""
    return _node(require_world().rank).index(require_world().rank)


def local_size() -> int:
    """Return the number of ranks on this node."""
    return len(_node(require_world().rank))


def cross_rank() -> int:
    """Return the index of this node among the nodes that have this local rank."""
    return _peers().index(require_world().rank)


def cross_size() -> int:
    """Return the number of nodes that have this local rank."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    return len({len(ranks) for ranks in require_world().topology.nodes}) == 1


def _node(number: int) -> tuple[int, ...]:
    topology = require_world().topology
    return topology.nodes[topology.node(number)]


def _peers() -> list[int]:
    place = local_rank()
    return [ranks[place] for ranks in require_world().topology.nodes if len(ranks) > place]


def mpi_threads_supported() -> bool:
    """Return True: commlib requires MPI_THREAD_MULTIPLE.

    Raises:
        UsageError: Before `init`.
    """
    require_world()
    return True


def mpi_enabled() -> bool:
    """Return True: processes communicate through MPI."""
    return True


def mpi_built() -> bool:
    """Return True: processes communicate through MPI."""
    return True


def gloo_enabled() -> bool:
    """Return False: commlib does not use gloo."""
    return False


def gloo_built() -> bool:
    """Return False: commlib does not use gloo."""
    return False


def nccl_built() -> int:
    """Return 0: NCCL is not compiled in. commlib loads it at run time, through CuPy."""
    return 0


def ddl_built() -> bool:
    """Return False: commlib does not use DDL."""
    return False


def ccl_built() -> bool:
    """Return False: commlib does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Return False: CUDA is not compiled in. commlib uses GPUs at run time, through CuPy."""
    return False


def rocm_built() -> bool:
    """Return False: commlib does not use ROCm."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write a Chrome trace of all operations (chrome://tracing, Perfetto). Rank 0 writes it.

    The trace is that of `commlib.timeline`, so it includes other operations too; but this call is not collective, and
    with `{rank}` in the path, for a file of each rank, the clocks of several machines are not compared.

    Args:
        file_path: The file.
        mark_cycles: Also mark the negotiations of ranks.

    Raises:
        UsageError: If a trace is being written already.

    Examples:
        >>> ct.start_timeline("trace.json")  # doctest: +SKIP
    """
    world = require_world()
    world.runtime.recording.start_timeline(file_path, world.rank, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finish the trace that is being written, if any: of `start_timeline`, COMMLIB_TIMELINE or HOROVOD_TIMELINE."""
    require_world().runtime.recording.stop_timeline()


def _native(comm: Any) -> Any:
    """Return the mpi4py communicator for `init`, or None for all ranks."""
    if comm is None or hasattr(comm, "Get_group"):
        return comm
    ranks = _read_ranks(comm)
    if not ranks:
        return None
    everyone = load_mpi().COMM_WORLD
    if everyone.rank not in ranks or not _are_distinct(ranks, everyone.size):
        raise UsageError(
            f"init: comm is {ranks}: expected distinct ranks of MPI's world (size {everyone.size}) that include this "
            f"rank, {everyone.rank}"
        )
    return everyone.Create_group(everyone.Get_group().Incl(ranks))


def _read_ranks(comm: Any) -> list[int]:
    """Return the ranks of MPI's world in an argument `comm`. Raises UsageError unless it is a list of whole numbers."""
    expected = "a list of ranks or an mpi4py communicator"
    if isinstance(comm, str | bytes) or not isinstance(comm, Iterable):
        raise UsageError(f"init: comm is a {type(comm).__name__}: expected {expected}")
    given = list(comm)
    ranks = whole_numbers(given)
    if ranks is None:
        raise UsageError(f"init: comm is {given}: expected {expected}")
    return ranks


def _are_distinct(ranks: Sequence[int], size: int) -> bool:
    """Return whether ranks are distinct, and within a world of this size."""
    return len(set(ranks)) == len(ranks) and 0 <= min(ranks) <= max(ranks) < size


def _check_same(comm: Any, world: Any) -> None:
    """Raise UsageError unless `comm` has the ranks of the running job."""
    from mpi4py import MPI

    others = UsageError("init: commlib is already initialised with other ranks: call shutdown first")
    if hasattr(comm, "Get_group"):
        group = comm.Get_group()
    elif ranks := _read_ranks(comm):
        if not _are_distinct(ranks, MPI.COMM_WORLD.size):
            raise others
        group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    else:
        group = world.native.Get_group()
    if MPI.Group.Compare(group, world.native.Get_group()) != MPI.IDENT:
        raise others
