"""The contender 'nccl': NCCL through CuPy, on the current stream. Ranks share a GPU only if this NCCL supports it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from commlib.bench.cases import Case
from commlib.bench.measure import Call
from commlib.bench.mpi_peer import UnsupportedPeerError
from commlib.bench.verbs import ONLY_MPI
from commlib.devices.cuda import process
from commlib.devices.cuda.nccl import library
from commlib.errors import TransportError

_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
_OPERATIONS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN", "mean": "NCCL_AVG"}


@dataclass(slots=True)
class _Membership:
    """NCCL and this process' communicator, or the reason why there is none."""

    nccl: Any = None
    comm: Any = None
    problem: str = "join_nccl was not called"


_joined = _Membership()


@contextmanager
def join_nccl(world: Any) -> Iterator[None]:
    """Make an NCCL communicator of the ranks of `world` for `call`. Collective; failures are left to `call`."""
    problem, shares = "", os.environ.get(_SHARES)
    os.environ[_SHARES] = "1"
    try:
        _load()
        _joined.nccl = library()
    except TransportError as error:
        problem = str(error)
    problem = next(filter(None, world.allgather(problem)), "")
    if not problem:
        number = world.bcast(_joined.nccl.get_unique_id() if world.rank == 0 else None)
        try:
            _joined.comm = _joined.nccl.NcclCommunicator(world.size, number, world.rank)
        except Exception as error:  # NCCL's own
            problem = _first_line(error)
        problem = next(filter(None, world.allgather(problem)), "")
    _joined.problem = problem
    os.environ.pop(_SHARES) if shares is None else os.environ.update({_SHARES: shares})
    try:
        yield
    finally:
        if _joined.comm is not None and not problem:
            world.Barrier()  # other ranks may still need this rank's communicator
            _joined.comm.destroy()
        _joined.comm, _joined.problem = None, "join_nccl was not called"


def _load() -> None:
    """Load an NCCL library into the process if PyTorch brings one; CuPy's wheels have none."""
    with suppress(ImportError):
        import torch  # noqa: F401


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def call(case: Case) -> Call:
    """Return a function that queues NCCL's collective once. Raises UnsupportedPeerError if NCCL has no equivalent."""
    if _joined.problem:
        raise UnsupportedPeerError(_joined.problem)
    nccl, comm, name, root = _joined.nccl, _joined.comm, case.verb.name, case.root
    if name in ONLY_MPI:
        raise UnsupportedPeerError(f"NCCL has no {name}")
    stream = process.device().current().raw.ptr
    x, out = (0 if array is None else int(array.data.ptr) for array in (case.x, case.out))
    if case.verb.reduces:
        kind, op = _named(nccl, f"NCCL_{case.dtype.upper()}", case), _named(nccl, _OPERATIONS[case.op], case)
        if name == "all_reduce":
            return lambda: comm.allReduce(x, out, case.count, kind, op, stream)
        if name == "reduce":
            return lambda: comm.reduce(x, out or x, case.count, kind, op, root, stream)
        return lambda: comm.reduceScatter(x, out, case.count, kind, op, stream)
    if name == "all_gather":
        return lambda: comm.allGather(x, out, case.x.nbytes, nccl.NCCL_UINT8, stream)
    if name == "broadcast":
        return lambda: comm.broadcast(x, x, case.x.nbytes, nccl.NCCL_UINT8, root, stream)
    if name == "barrier" or case.in_place:
        raise UnsupportedPeerError(f"NCCL has no {name}{' in place' * case.in_place}")
    sends, receives = _messages(case, x, out)

    def exchange() -> None:
        nccl.groupStart()
        for peer, address, nbytes in sends:
            comm.send(address, nbytes, nccl.NCCL_UINT8, peer, stream)
        for peer, address, nbytes in receives:
            comm.recv(address, nbytes, nccl.NCCL_UINT8, peer, stream)
        nccl.groupEnd()

    return exchange


def _named(nccl: Any, name: str, case: Case) -> int:
    """Return a constant of NCCL's. Raises UnsupportedPeerError if it has none of this name."""
    value = getattr(nccl, name, None)
    if value is None:
        raise UnsupportedPeerError(f"NCCL has no {case.op} of {case.dtype}")
    return int(value)


Messages = list[tuple[int, int, int]]
"""The peer, address and bytes of each message."""


def _messages(case: Case, x: int, out: int) -> tuple[Messages, Messages]:
    """Return the messages that a rank sends and receives in a verb that only moves data."""
    ranks, item = range(case.size), case.x.dtype.itemsize if case.x is not None else case.out.dtype.itemsize
    name, is_root = case.verb.name, case.rank == case.root
    if name == "send_recv":
        nbytes = case.x.nbytes
        return [((case.rank + 1) % case.size, x, nbytes)], [((case.rank - 1) % case.size, out, nbytes)]
    if name == "gather":
        part = case.x.nbytes
        return [(case.root, x, part)], _parts(out, [part] * case.size, ranks) if is_root else []
    if name == "scatter":
        part = case.out.nbytes
        return _parts(x, [part] * case.size, ranks) if is_root else [], [(case.root, out, part)]
    sends, receives = ([count * item for count in counts] for counts in (case.splits, case.takes))
    return _parts(x, sends, ranks), _parts(out, receives, ranks)


def _parts(address: int, sizes: Sequence[int], peers: Sequence[int]) -> Messages:
    """Return consecutive parts of a memory, one for each peer."""
    starts = [0, *itertools.accumulate(sizes[:-1])]
    return [(peer, address + start, nbytes) for peer, start, nbytes in zip(peers, starts, sizes, strict=True)]
