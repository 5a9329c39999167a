"""The contender 'gloo': torch.distributed on tensors over the same memory, of the host or of a GPU."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from commlib.arguments import install
from commlib.bench.cases import Case
from commlib.bench.measure import Call
from commlib.bench.mpi_peer import UnsupportedPeerError
from commlib.bench.verbs import ONLY_MPI

_OPERATIONS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}


def problem() -> str | None:
    """Return the reason why this process has no gloo, or None."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        return f"--peer gloo needs PyTorch: {install('torch')} ({error})"
    return (
        None if dist.is_available() and dist.is_gloo_available() else "--peer gloo: this PyTorch was built without it"
    )


@contextmanager
def join_gloo(world: Any, *, one_node: bool) -> Iterator[None]:
    """Initialize torch.distributed with the ranks of `world`. Collective."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        if one_node:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store: Any = dist.FileStore(f"{world.bcast(folder)}/store", world.size)  # type: ignore[attr-defined]
        else:
            server, host = None, world.bcast(socket.gethostname())
            if world.rank == 0:
                server = dist.TCPStore(host, 0, world.size, True, wait_for_workers=False)  # type: ignore[attr-defined]
            port = world.bcast(server.port if server is not None else None)
            store = server or dist.TCPStore(host, port, world.size, False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        try:
            yield
            world.Barrier()  # otherwise other ranks might still need this rank's group
        finally:
            dist.destroy_process_group()  # its threads crash if the interpreter ends first
        del store
        world.Barrier()  # rank 0 removes the folder next; a store whose file is missing at its end aborts its process


def _newest(*names: str) -> Any:
    """Return the first of these functions that this torch has: newer versions warn about the older names."""
    import torch.distributed as dist

    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _tensor(case: Case, array: Any) -> Any:
    import torch

    if array is None:
        return None
    if case.memory.device != "host":
        return tensor_on_gpu(array).view(getattr(torch, case.dtype))
    if case.dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _GpuBytes:
    """GPU memory in the form that other libraries accept."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (array.nbytes,), "typestr": "|u1", "data": (array.data.ptr, False), "version": 3, "strides": None,
        }  # fmt: skip


def tensor_on_gpu(array: Any) -> Any:
    """Return a tensor of bytes over the memory of a CuPy array."""
    import torch

    return torch.as_tensor(_GpuBytes(array), device=torch.device("cuda", array.data.device_id))


def finish_on_gpu() -> None:
    """Wait for all work that PyTorch has queued."""
    import torch

    torch.cuda.synchronize()


def call(case: Case) -> Call:
    """Return a function that runs gloo's collective once. Raises NoPeer without one, or torch's error for a dtype."""
    import torch.distributed as dist

    x, out, name, root = _tensor(case, case.x), _tensor(case, case.out), case.verb.name, case.root
    if name == "barrier":
        return partial(dist.barrier)
    if name == "broadcast":
        return partial(dist.broadcast, x, root)
    if name == "all_to_all" and not case.in_place:
        return partial(dist.all_to_all_single, out, x)
    if name == "all_to_all_v":
        return partial(dist.all_to_all_single, out, x, case.takes, case.splits)
    if name == "all_gather" and not case.in_place:
        return partial(_newest("all_gather_single", "all_gather_into_tensor"), out, x)
    if name == "gather":
        return partial(dist.gather, x, None if out is None else list(out.chunk(case.size)), root)
    if name == "scatter":
        return partial(dist.scatter, out, None if x is None else list(x.chunk(case.size)), root)
    if name in ONLY_MPI:
        raise UnsupportedPeerError(f"gloo has no {name}")
    if case.verb.reduces and not (name == "reduce_scatter" and case.in_place):
        return _reduction(case, x, out)
    if name == "send_recv" and case.size > 1:
        return _ring_shift(case, x, out)
    raise UnsupportedPeerError(f"gloo has no {name} {'in place' if case.in_place else 'of one rank'}")


def _reduction(case: Case, x: Any, out: Any) -> Call:
    """Return a reduction. torch reduces in place: out of place, copy first. A mean is a sum and a division."""
    import torch
    import torch.distributed as dist

    op = getattr(dist.ReduceOp, _OPERATIONS[case.op])
    target = x if out is None else out
    if case.verb.name == "all_reduce":
        reduce = partial(dist.all_reduce, target, op)
    elif case.verb.name == "reduce":
        reduce = partial(dist.reduce, target, case.root, op)
    else:
        reduce = partial(_newest("reduce_scatter_single", "reduce_scatter_tensor"), out, x, op)
    copies = out is not None and not case.in_place and case.verb.name != "reduce_scatter"
    divided = None
    if case.op == "mean" and out is not None:
        divided = torch.view_as_real(out) if out.is_complex() else out
    rounding = None if divided is None or divided.is_floating_point() else "trunc"

    def run() -> None:
        if copies:
            out.copy_(x)
        reduce()
        if divided is not None:
            divided.div_(case.size, rounding_mode=rounding)

    return run


def _ring_shift(case: Case, x: Any, out: Any) -> Call:
    import torch.distributed as dist

    right, left = (case.rank + 1) % case.size, (case.rank - 1) % case.size

    def run() -> None:
        incoming, outgoing = dist.irecv(out, left), dist.isend(x, right)
        for request in (incoming, outgoing):
            if request is not None:
                request.wait()

    return run
