"""Measure how fast codecs encode and decode, on one thread.

    python benchmarks/codecs.py [int8 "topk:ratio=0.001" ...] [--count 1048576] [--repeat 20] [--out FILE.json]

Speeds are GB/s of float32: 4 bytes per element of the array, without other reads and writes. The time is the best of
many runs on the same arrays of normally distributed values; arrays that fit in the caches stay cached. Columns:

    encode      from the array to the payload
    feedback    the same with a residual: two arrays are read, and a third one is written
    decode      from the payload to an array
    add         the same, added to the array
    bytes       payload bytes per element; float32 has 4
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from commlib.bench import record
from commlib.compress.codec import Codec
from commlib.compress.registry import CODECS, codec_of

COLUMNS = ("encode", "feedback", "decode", "add", "bytes")
VARIANTS = ("int8:rounding=stochastic", "int4:rounding=stochastic")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", default=[*CODECS, *VARIANTS], help="names, with options after a colon")
    parser.add_argument("--count", type=int, default=1 << 20, help="elements of the array")
    parser.add_argument("--repeat", type=int, default=20, help="runs; the best one counts")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def best(run: Callable[[], object], repeat: int) -> float:
    """Return the seconds of the fastest of `repeat` runs, after one run that compiles."""
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(codec: Codec, count: int, repeat: int) -> tuple[list[float], float]:
    """Return (GB/s of encode, with feedback, decode, add; payload bytes per element)."""
    x = np.random.default_rng(1).standard_normal(count, np.float32)
    payload = np.zeros(codec.payload_bytes(count), np.uint8)
    before, after, out = (np.zeros_like(x) for _ in range(3))
    used = codec.encode(x, payload)
    runs: list[Callable[[], object]] = [
        lambda: codec.encode(x, payload),
        lambda: codec.encode(x, payload, residual=(before, after)),
        lambda: codec.decode(payload, out),
        lambda: codec.decode(payload, out, add=True),
    ]
    return [x.nbytes / best(run, repeat) / 1e9 for run in runs], used / count


def main() -> None:
    arguments = parse()
    print(f"{'codec':<28}" + "".join(f"{column:>10}" for column in COLUMNS))
    figures = {}
    for name in arguments.codecs:
        speeds, size = measure(codec_of(name), arguments.count, arguments.repeat)
        figures[name] = dict(zip(COLUMNS, [*speeds, size], strict=True))
        print(f"{name:<28}" + "".join(f"{speed:>10.1f}" for speed in speeds) + f"{size:>10.3f}", flush=True)
    if arguments.out:
        from mpi4py import MPI

        record.write(arguments.out, "codecs", record.gather_program_facts(MPI.COMM_WORLD), arguments, figures=figures)


if __name__ == "__main__":
    main()
