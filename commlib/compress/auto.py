"""Choose the codec of compression="auto": measure the link and the codecs, and compress only if it pays.

A reduction of n float32 between H hosts takes about

    none      latency + pace * 2(H-1)/H * 4n
    a codec   latency + pace * 2(H-1)/H * payload(n) + n * (encode + decode of an element)

Pace (seconds per byte that a rank sends) and latency come from float32 all-reduces between the hosts. They are timed
when training begins, on the device of the gradients. The slowest rank counts, so all ranks choose the same codec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from commlib.compress.codec import Codec
from commlib.compress.codecs.cast import Cast
from commlib.compress.codecs.quantise import Blocks
from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart, CodecRanks, Scheme, SchemeReducer
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.errors import UsageError

_SMALL, _LARGE, _SAMPLE, SAMPLE_ON_DEVICE = 1 << 10, 1 << 18, 1 << 16, 1 << 22
"""Element counts: of the small and the large timed reduction, and of the array for timing a codec on the host and on a
device, where a kernel launch takes longer."""

AUTO_OF = "auto of "

_GAIN = 0.9
"""A codec must take less than this share of the uncompressed time: it loses precision, and estimates are rough."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The choice among no compression, bfloat16 and int8, in this order of preference. All lose little."""

    codecs: tuple[Codec, ...] = (Cast("bfloat16"), Blocks(8))

    @property
    def name(self) -> str:
        return AUTO_OF + ", ".join(codec.name for codec in self.codecs)

    @property
    def divisible(self) -> bool:
        return True

    def reducer(
        self, comm: CodecRanks, parts: Sequence[BucketPart], *, key: str = "", device: Device = HOST
    ) -> SchemeReducer:
        """Raise UsageError: the choice depends on measurements, which `decide` makes first."""
        raise UsageError("compression 'auto' must be decided before buckets are made: see `GradientCompression`")


def decide(auto: Auto, count: int, hosts: int, measured: Sequence[float]) -> tuple[Scheme | None, str]:
    """Return the scheme for buckets of `count` float32 elements, or None, and the reason.

    measured: latency (s) and pace (s per byte sent) of the link, then for each codec the seconds to encode and to
    decode one element, all from the slowest rank.
    """
    latency, pace, *costs = measured
    share = 2 * (hosts - 1) / hosts
    plain = latency + 4 * count * share * pace
    best, best_seconds, texts = None, plain * _GAIN, [f"none {plain * 1e3:.2f} ms"]
    for codec, encode, decode in zip(auto.codecs, costs[::2], costs[1::2], strict=True):
        travels = codec.payload_bytes(count) * share * pace
        # All elements are encoded once, and a host's share twice; all are decoded once on arrival and once after the
        # sum.
        works = count * ((1 + 1 / hosts) * encode + 2 * decode)
        seconds = latency + travels + works
        texts.append(f"{codec.name} {seconds * 1e3:.2f} ms")
        if seconds < best_seconds:
            best, best_seconds = codec, seconds
    why = (
        f"{'none' if best is None else best.name}: between {hosts} hosts a rank sends {1e-6 / pace:.1f} MB/s; "
        f"predicted times for {count} float32: {', '.join(texts)}"
    )
    return None if best is None else AllToAll(best), why


def measure_link(comm: CodecRanks, memory: Memory) -> tuple[float, float]:
    """Return seconds of latency and seconds per byte sent of float32 all-reduces over `comm`. Collective."""
    x = memory.zeros(_LARGE)
    small = _median(lambda: comm.all_reduce(x[:_SMALL], out=x[:_SMALL]), memory)
    large = _median(lambda: comm.all_reduce(x, out=x), memory)
    share = 2 * (comm.size - 1) / comm.size
    pace = max(large - small, 1e-9) / (4 * (_LARGE - _SMALL) * share)
    return max(0.0, small - 4 * _SMALL * share * pace), pace


def measure_cost(codec: Codec, memory: Memory) -> tuple[float, float]:
    """Return seconds to encode and to decode one element on this rank."""
    count = _SAMPLE if memory.device is HOST else SAMPLE_ON_DEVICE
    x = memory.here(np.random.default_rng(0).standard_normal(count, np.float32))
    payload = memory.zeros(codec.payload_bytes(count), np.uint8)
    out = memory.zeros(count)
    residual = (memory.zeros(count), memory.zeros(count)) if codec.feedback else None
    encode = _median(lambda: codec.encode(x, payload, residual=residual), memory)
    return encode / count, _median(lambda: codec.decode(payload, out, add=True), memory) / count


def _median(call: Callable[[], object], memory: Memory, times: int = 5) -> float:
    call()  # compiles, connects and allocates
    memory.wait()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        memory.wait()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[times // 2]
