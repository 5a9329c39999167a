"""Preparation: join the ranks for the peers, and choose the memory of the arrays."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from commlib.bench import gloo_peer, nccl_peer
from commlib.bench.memory import HOST, BenchMemory
from commlib.bench.options import BenchOptionsError
from commlib.errors import UsageError


def choose_memory(stack: ExitStack, device: str, comm: Any) -> BenchMemory:
    """Return the memory of a kind; on a GPU, work goes to a stream of its own until `stack` is closed. Collective.

    Raises BenchOptionsError on all ranks if a rank has no such device; the text names it.
    """
    if device == "host":
        return HOST
    from commlib.bench.gpu_memory import GpuMemory

    try:
        memory = GpuMemory(comm)
    except UsageError as error:
        raise BenchOptionsError(
            f"--device {device}: {error}; start ranks only on nodes with a GPU, which they may share, or leave out "
            "--device to measure arrays in host memory"
        ) from None
    stack.enter_context(memory.gpu.using(memory.gpu.stream()))
    return memory


def join_peers(stack: ExitStack, peers: Collection[str], comm: Any, world: Any) -> None:
    """Join the ranks of `world` for the peers, until `stack` is closed. Collective."""
    if "gloo" in peers:
        stack.enter_context(gloo_peer.join_gloo(world, one_node=comm.one_node))
    if "nccl" in peers:
        stack.enter_context(nccl_peer.join_nccl(world))
