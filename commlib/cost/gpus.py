"""The cost of collectives between a node's GPUs, from what its maker says of one: nothing of it is measured here."""

from __future__ import annotations

from dataclasses import dataclass

from commlib.cost.model import check


@dataclass(frozen=True, slots=True)
class Gpu:
    """Describe a GPU, and how several reach each other.

    memory: bytes a second that it reads and writes, in all. link: bytes a second to or from the others, each way.
    launch: seconds until a kernel runs. meeting: seconds until streams of several ranks have met.
    """

    memory: float
    link: float
    launch: float = 4e-6
    meeting: float = 6e-6


H100 = Gpu(memory=3.0e12, link=450e9)
"""An H100 with NVLink: what a copy moves; the link is the maker's figure; launch and meeting are guesses."""


def all_reduce_seconds(nbytes: float, ranks: int, gpu: Gpu, *, one_gpu: bool, symmetric: bool = True) -> float:
    """Return the seconds of `node.device_collective.all_reduce` on so many bytes for each rank.

    one_gpu: all ranks share it; then every byte is read and written by the same memory, which `ranks` arrays are read
    from and written to. Else each GPU reads its share of the others' arrays over its link while it writes shares of its
    results. Ordinary arrays are copied to slots and back.
    """
    check("an all-reduce between GPUs", ranks=ranks)
    if ranks == 1:
        return gpu.launch
    in_all = 2 * ranks * nbytes
    if one_gpu:
        data = in_all / gpu.memory
    else:
        data = max((ranks - 1) / ranks * nbytes / gpu.link, in_all / ranks / gpu.memory)
    seconds = 2 * gpu.meeting + gpu.launch + data
    if not symmetric:
        seconds += 2 * gpu.launch + 4 * nbytes * (ranks if one_gpu else 1) / gpu.memory
    return seconds
