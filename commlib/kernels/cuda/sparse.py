"""Sparse payloads: the largest or random elements, and their positions. See select.cu and sparse.cu.

All selections run on the device. The caller waits for one number at the end: the length of the payload, or the fault in
it.

A NaN from arithmetic has the bits of a GPU's NaN, so a payload of a sum that is not finite may contain other NaNs than
the host's. Everything else equals the host's, bit for bit. If `read_sparse` finds a fault in a payload, it may already
have written more elements than the host: all valid ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from commlib.kernels.cuda.arguments import f32, pointer_to, u32, u64
from commlib.kernels.cuda.launcher import LaunchedKernels
from commlib.kernels.protocol import Fault, Value

# The constants of sparse.cu, select.cu, scan.cuh and digits.cuh.
_KINDS: dict[Value, int] = {"float32": 0, "float16": 1, "bfloat16": 2}
_PLAIN, _FED, _ACCUMULATED = range(3)
_TILE = 256  # elements
_PAIR, _SUPERS = 16, 128
_MOST_CHUNKS = 64 * 64  # at most _SUPERS * 64; few enough to keep all their workers resident on a large GPU
_STATE = 4 * (5 * 2048 + 3 * 2 + 4)
_FOUND = _STATE - 8  # offset of the number of chosen elements in the state
_FAULTS = 12
_ROUND = 32  # a chunk is a multiple of it, so lanes share it equally
# One in _STRIDE tiles is sampled at most, and at least _SAMPLED tiles if there are as many.
_STRIDE, _SAMPLED = 64, 64

_ARRAYS = np.dtype(
    [(name, "u8") for name in ("x", "before", "u", "after", "u_after", "count")]
    + [("scale", "f4"), ("decay", "f4"), ("nesterov", "u4"), ("kind", "u4")]
)
_LIST = np.dtype(
    [(name, "u8") for name in ("indices", "values", "number", "most", "span")] + [("kind", "u4"), ("unused", "u4")]
)
_PAYLOAD = np.dtype([("bytes", "u8"), ("length", "u8"), ("chunks", "u8"), ("kind", "u4"), ("unused", "u4")])


class SparseKernels(LaunchedKernels):
    def largest(self, x: Any, before: Any, after: Any, k: int, value: Value, payload: Any) -> int:
        if before is None:
            return self._choose(_PLAIN, _arrays(x, None, None, x, None, value), k, value, payload)
        return self._choose(_FED, _arrays(x, before, None, after, None, value), k, value, payload)

    def accumulate(
        self,
        gradient: Any,
        u: Any,
        v: Any,
        u_after: Any,
        v_after: Any,
        scale: float,
        momentum: float,
        nesterov: bool,
        k: int,
        value: Value,
        payload: Any,
    ) -> int:
        arrays = _arrays(gradient, v, u, v_after, u_after, value, scale, momentum, nesterov)
        return self._choose(_ACCUMULATED, arrays, k, value, payload)

    def random(self, x: Any, before: Any, after: Any, k: int, seed: int, scale: float, payload: Any) -> int:
        indices, values = self._scratch(4 * k).view(np.uint32), self._scratch(4 * k).view(np.float32)
        self.draw(len(x), seed, indices)
        self.take(x, before, after, indices, scale, values)
        return self._write(
            pointer_to(indices),
            pointer_to(values),
            u64(0),
            k,
            "float32",
            self._zeros(_sums(_chunks(k))),
            payload,
        )

    def read_sparse(self, payload: Any, value: Value, out: Any, add: bool) -> Fault:
        chunks = _chunks(len(payload))
        zeros = self._zeros(_sums(chunks) + _FAULTS)
        sums, faults = pointer_to(zeros), zeros[_sums(chunks) :]
        arguments = np.array((pointer_to(payload), len(payload), chunks, _KINDS[value], 0), _PAYLOAD)
        rest = pointer_to(out), u64(len(out)), u32(add)
        tiles = 0 if add else -(-len(out) // _TILE)
        self._launch("sparse.cu", "add_up_gaps", {}, max(chunks, tiles), arguments, sums, *rest)
        self._launch("sparse.cu", "read_values", {}, chunks, arguments, sums, *rest, pointer_to(faults))
        outside, too_short, other_kind = self._read(faults, np.uint32)
        # An element outside is found before the payload ends.
        return "other kind" if other_kind else "outside" if outside else "too short" if too_short else ""

    def _choose(self, source: int, arrays: Any, k: int, value: Value, payload: Any) -> int:
        """Select, and write the payload. There are sums for chunks of elements and sums for the chosen elements."""
        count = int(arrays["count"])
        words, tiles = -(-count // 32), -(-count // _TILE)
        chunks = _chunks(words)
        zeros = self._zeros(_STATE + _sums(chunks) + _sums(_chunks(k)))
        mask, indices = self._scratch(4 * words), self._scratch(4 * k)
        unfit = None if source == _PLAIN else self._scratch(4 * words)
        stride = min(max(tiles // _SAMPLED, 1), _STRIDE)
        state, sums = pointer_to(zeros), pointer_to(zeros[_STATE:])
        by_word = pointer_to(mask), u64(words)
        by_chunk = *by_word, u64(_span(words)), sums

        def launch(kernel: str, workers: int, *args: Any) -> None:
            self._launch("select.cu", kernel, {"SOURCE": source}, workers, arrays, *args)

        launch("sample", -(-tiles // stride), u64(stride), state)
        launch("total", tiles, u32(_rank(k, stride)), state, pointer_to(mask), pointer_to(unfit))
        launch("again", tiles, u32(k), state, pointer_to(mask))
        launch("narrow", tiles, u32(k), state, pointer_to(mask), pointer_to(unfit), u64(words))
        launch("refine", tiles, state, *by_word)
        launch("tally", chunks, state, *by_chunk)
        launch("choose_marked", chunks, state, *by_chunk, pointer_to(indices), pointer_to(payload))
        counter = u64(state + u64(_FOUND))
        return self._write(pointer_to(indices), u64(0), counter, k, value, zeros[_STATE + _sums(chunks) :], payload)

    def _write(
        self,
        indices: np.uint64,
        values: np.uint64,
        number: np.uint64,
        most: int,
        value: Value,
        sums: Any,
        payload: Any,
    ) -> int:
        """Write a payload, without its values if they are present already (values = 0), and return its length."""
        listed = np.array((indices, values, number, most, _span(most), _KINDS[value], 0), _LIST)
        length = self._scratch(8)
        self._launch("sparse.cu", "measure", {}, _chunks(most), listed, pointer_to(sums), pointer_to(payload))
        self._launch(
            "sparse.cu",
            "write_gaps",
            {},
            _chunks(most),
            listed,
            pointer_to(sums),
            pointer_to(payload),
            pointer_to(length),
        )
        return int(self._read(length, np.uint64)[0])

    def _zeros(self, nbytes: int) -> Any:
        memory = self._scratch(nbytes)
        self.fill(memory.view(np.uint32), 0)
        return memory


def _arrays(
    x: Any,
    before: Any,
    u: Any,
    after: Any,
    u_after: Any,
    value: Value,
    scale: float = 1,
    momentum: float = 0,
    nesterov: bool = False,
) -> Any:
    addresses = (pointer_to(array) for array in (x, before, u, after, u_after))
    with np.errstate(over="ignore"):
        return np.array((*addresses, len(x), f32(scale), f32(momentum), nesterov, _KINDS[value]), _ARRAYS)


def _rank(k: int, stride: int) -> int:
    """Return the rank of the guess in a sample. It is so low that it hardly ever excludes one of the k largest."""
    share = -(-k // stride)
    return k if stride == 1 else share + 4 * math.isqrt(share) + 8


def _span(count: int) -> int:
    """Return the number of elements, or words, in a chunk: a few rounds of a worker's lanes, more for long arrays."""
    return -(-max(count, 1) // (_MOST_CHUNKS * _ROUND)) * _ROUND


def _chunks(count: int) -> int:
    return max(1, -(-count // _span(count)))


def _sums(chunks: int) -> int:
    return _PAIR * (_SUPERS + chunks)
