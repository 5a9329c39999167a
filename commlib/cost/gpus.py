"""GPUs: predict collectives between the GPUs of a node from vendor figures; nothing here is measured."""

from __future__ import annotations

from dataclasses import dataclass

from commlib.cost.model import check


@dataclass(frozen=True, slots=True)
class Gpu:
    """The parameters of a GPU and of its links.

    memory: bytes per second that it reads and writes, in total. link: bytes per second to or from the others, each way.
    launch: seconds until a kernel runs. stream_barrier: seconds to synchronize the streams of several ranks.
    """

    memory: float
    link: float
    launch: float = 4e-6
    stream_barrier: float = 6e-6


H100 = Gpu(memory=3.0e12, link=450e9)
"""An H100 with NVLink. memory: the bandwidth of a copy; link: the vendor's figure; the others are guesses."""


def all_reduce_seconds(nbytes: float, ranks: int, gpu: Gpu, *, one_gpu: bool, symmetric: bool = True) -> float:
    """Return the seconds of `node.device_collective.all_reduce` on `nbytes` for each rank.

    one_gpu: all ranks share it, so one memory reads and writes the arrays of all `ranks`. Otherwise each GPU reads its
    share of the others' arrays over its link while it writes shares of its results. Arrays in ordinary memory are
    copied to slots and back (symmetric=False).
    """
    check("an all-reduce between GPUs", ranks=ranks)
    if ranks == 1:
        return gpu.launch
    in_all = 2 * ranks * nbytes
    if one_gpu:
        data = in_all / gpu.memory
    else:
        data = max((ranks - 1) / ranks * nbytes / gpu.link, in_all / ranks / gpu.memory)
    seconds = 2 * gpu.stream_barrier + gpu.launch + data
    if not symmetric:
        seconds += 2 * gpu.launch + 4 * nbytes * (ranks if one_gpu else 1) / gpu.memory
    return seconds
