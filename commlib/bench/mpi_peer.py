"""MPI's contenders: its own collectives through mpi4py, on the same arrays; blocking, persistent, or in pieces.

MPI has no mean: the result is divided afterwards, within the timed call. MPI has no arithmetic, or only a slow one, for
float16 and bfloat16: a user-defined operation in numpy computes it. A GPU's arrays need a CUDA-aware library, and the
call first waits for queued work, because MPI has no streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from commlib.bench.cases import Case
from commlib.bench.measure import Call
from commlib.dtypes import NUMPY
from commlib.transport import cuda_aware

PIECE_BYTES = 1 << 20
_HALVES = ("float16", "bfloat16")
_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
_OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
_METHODS = {
    "all_reduce": "Allreduce",
    "reduce": "Reduce",
    "broadcast": "Bcast",
    "gather": "Gather",
    "scatter": "Scatter",
    "all_gather": "Allgather",
    "all_gather_v": "Allgatherv",
    "reduce_scatter": "Reduce_scatter",
    "reduce_scatter_v": "Reduce_scatter",
    "all_to_all": "Alltoall",
    "all_to_all_v": "Alltoallv",
    "scan": "Scan",
    "exscan": "Exscan",
    "send_recv": "Sendrecv",
    "barrier": "Barrier",
}
_LOGICAL = {"sum": MPI.LOR, "max": MPI.LOR, "min": MPI.LAND, "prod": MPI.LAND}


class UnsupportedPeerError(Exception):
    """A peer has no such collective; the text gives the reason."""


@lru_cache  # mpi4py has room for 16 user-defined operations
def _user_operation(dtype: str, op: str) -> MPI.Op:
    ufunc, kind = _UFUNCS[op], NUMPY[dtype]

    def combine(given: Any, result: Any, _: Any) -> None:
        target = np.frombuffer(result, kind)
        ufunc(np.frombuffer(given, kind), target, out=target)

    return MPI.Op.Create(combine, commute=True)


def _operation(case: Case) -> MPI.Op:
    if case.dtype in _HALVES:
        return _user_operation(case.dtype, "sum" if case.op == "mean" else case.op)
    return (_LOGICAL if case.dtype == "bool" else _OPERATIONS)[case.op]


def _view(case: Case, array: Any) -> Any:
    """Return the array as a dtype that MPI supports, or a GPU's memory with its MPI type."""
    if array is not None and case.memory.device != "host":
        memory: Any = MPI.memory.fromaddress(array.data.ptr, array.nbytes)
        return [memory, MPI.UINT16_T if case.dtype in _HALVES else _type_of(case.dtype)]
    return array.view(np.uint16) if array is not None and case.dtype in _HALVES else array


def _type_of(dtype: str) -> MPI.Datatype:
    return MPI.Datatype.fromcode(NUMPY[dtype].char)


def is_cuda_aware() -> bool:
    """Return whether the MPI library of this process reports that it accepts GPU memory."""
    return bool(cuda_aware.query_loaded(MPI).is_supported)


def call(world: Any, case: Case) -> Call:
    """Return a function that runs MPI's collective once. Raises UnsupportedPeerError if MPI has no equivalent."""
    if case.memory.device == "host":
        return _call(world, case)
    if not is_cuda_aware():
        raise UnsupportedPeerError("this MPI is not CUDA-aware")
    if case.verb.reduces and (case.dtype in _HALVES or case.op == "mean"):
        raise UnsupportedPeerError(f"MPI has no {case.op} of {case.dtype} on a GPU")
    run, finish = _call(world, case), case.memory.finish

    def finish_and_run() -> None:
        finish()
        run()

    return finish_and_run


def _and_divide(run: Call, case: Case) -> Call:
    """Return `run`, followed by the division of its sum for a mean."""
    if case.op != "mean" or case.out is None:
        return run
    out = case.out.view(case.out.real.dtype)  # complex: both parts, because numpy would multiply by a reciprocal
    divide = np.floor_divide if out.dtype.kind in "iu" else np.true_divide
    size = out.dtype.type(case.size)

    def run_and_divide() -> None:
        run()
        divide(out, size, out)

    return run_and_divide


def _call(world: Any, case: Case) -> Call:
    return _and_divide(partial(getattr(world, _METHODS[case.verb.name]), *_arguments(case)), case)


def _arguments(case: Case) -> tuple[Any, ...]:
    """Return the arguments of the verb's method."""
    x, out, name, root = _view(case, case.x), _view(case, case.out), case.verb.name, case.root
    source = MPI.IN_PLACE if case.in_place and not (name == "reduce" and case.rank != root) else x
    if name == "barrier":
        return ()
    if name == "broadcast":
        return x, root
    if name == "reduce":
        return source, out, _operation(case), root
    if name in ("reduce_scatter", "reduce_scatter_v"):
        if case.in_place:
            raise UnsupportedPeerError("in place, MPI puts the part of each rank at the front of its buffer")
        return x, out, case.parts, _operation(case)
    if case.verb.reduces:
        return source, out, _operation(case)
    if name == "all_gather_v":
        return x, _in_counts(out, case.parts)
    if name == "all_to_all_v":
        return _in_counts(x, case.splits), _in_counts(out, case.takes)
    if name == "send_recv":
        return x, (case.rank + 1) % case.size, 0, out, (case.rank - 1) % case.size
    return (x, out, root) if case.verb.rooted else (source, out)


def _in_counts(array: Any, counts: Sequence[int]) -> list[Any]:
    """Return an array, or memory with its MPI type, as a buffer of one block for each rank."""
    memory, *of_type = array if isinstance(array, list) else [array]
    return [memory, (counts, None), *of_type]


class PersistentCollective:
    """A collective of MPI that was prepared once. A call starts it and waits."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __call__(self) -> None:
        self._request.Start()
        self._request.Wait()

    def __del__(self) -> None:
        if not MPI.Is_finalized():
            self._request.Free()


def persistent(world: Any, case: Case) -> Call:
    """Return a function that runs MPI's persistent collective once. Collective."""
    if not case.verb.has_plan:
        raise UnsupportedPeerError(f"MPI has no persistent {case.verb.name}")
    prepare = getattr(world, f"{_METHODS[case.verb.name]}_init")
    return _and_divide(PersistentCollective(prepare(*_arguments(case))), case)


def block(world: Any, case: Case) -> Call:
    """Return a function that runs MPI_Reduce_scatter_block, which takes no counts."""
    x, out, _, op = _arguments(case)
    return _and_divide(partial(world.Reduce_scatter_block, x, out, op), case)


def persistent_block(world: Any, case: Case) -> Call:
    """Return a function that runs the persistent MPI_Reduce_scatter_block. Collective."""
    x, out, _, op = _arguments(case)
    return _and_divide(PersistentCollective(world.Reduce_scatter_block_init(x, out, op)), case)


def pieces(world: Any, case: Case) -> Call:
    """Return a function that runs MPI_Allreduce on 1 MiB at a time, which is faster on large arrays."""
    if case.nbytes <= PIECE_BYTES:
        raise UnsupportedPeerError("up to 1 MiB there is one piece: the same as mpi")
    x, out, op = _view(case, case.x), _view(case, case.out), _operation(case)
    assert x is not None and out is not None
    step = PIECE_BYTES // out.itemsize
    slices = [slice(start, start + step) for start in range(0, len(out), step)]
    parts = [(MPI.IN_PLACE if case.in_place else x[piece], out[piece]) for piece in slices]

    def run() -> None:
        for source, target in parts:
            world.Allreduce(source, target, op)

    return _and_divide(run, case)
