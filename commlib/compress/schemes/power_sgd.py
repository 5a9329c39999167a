"""PowerSGD: reduce matrices as products of thin factors, by one step of power iteration in every reduction.

    M = gradient + residual               rows x cols, on every rank
    P = M Q          all-reduced          Q: cols x rank, from the last step
    P = orthonormal basis of P
    Q = M^T P        all-reduced
    result = P Q^T,  residual = M - P Q_own^T

All steps are linear in M, so plain all-reduces add up the factors: two per bucket, for any number of matrices.
Source: Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from commlib.compress.feedback import is_finite
from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart, CodecRanks, State
from commlib.compress.schemes.low_rank import LowRankMatrix
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.observe.journal import journal_of


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Sends each matrix as two factors with `rank` columns, and all other parameters uncompressed in the same message.

    A parameter with two dimensions or more is a matrix of shape[0] rows. It is compressed if that makes it more than
    `min_compression_rate` times smaller. `warm_start` begins with the factor of the last step, which lets the power
    iteration converge over the steps; otherwise it begins with a random one. The first `start` reductions are exact. A
    factor's column is dropped if less than `epsilon` of it is independent of the others. `seed` must be the same on all
    ranks. Raises UsageError for invalid values.
    """

    rank: int = 4
    warm_start: bool = True
    min_compression_rate: float = 2.0
    start: int = 0
    feedback: bool = True
    epsilon: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"PowerSGD: rank must be at least 1, got {self.rank}")
        if not self.min_compression_rate > 0:
            raise UsageError(f"PowerSGD: min_compression_rate must be positive, got {self.min_compression_rate}")
        if self.start < 0:
            raise UsageError(f"PowerSGD: start must not be negative, got {self.start}")
        if not 0 <= self.epsilon < 1:
            raise UsageError(f"PowerSGD: epsilon must be at least 0 and less than 1, got {self.epsilon}")

    @property
    def name(self) -> str:
        options = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        settings = [f"{name}={value}" for name, value, default in options if name == "rank" or value != default]
        return "powersgd:" + ",".join(settings)

    @property
    def divisible(self) -> bool:
        return False

    def rank_of(self, shape: Sequence[int]) -> int:
        """Return the number of columns of a parameter's factors; 0 if it is not compressed."""
        if len(shape) < 2 or 0 in shape:
            return 0
        rows, cols = shape[0], int(np.prod(shape[1:]))
        rank = min(self.rank, rows, cols)
        return rank if (rows + cols) * rank * self.min_compression_rate < rows * cols else 0

    def reducer(
        self, comm: CodecRanks, parts: Sequence[BucketPart], *, key: str = "", device: Device = HOST
    ) -> PowerReducer:
        """Return the reducer of a bucket with these parts."""
        return PowerReducer(self, comm, parts, key, Memory(device, comm.watch))


class PowerReducer:
    """Reduces one bucket by low-rank factors.

    A matrix that is not finite on some rank, or whose products overflow, becomes NaN on all ranks. Then the residuals
    and factors of the entire bucket do not change.
    """

    def __init__(
        self, scheme: PowerSGD, comm: CodecRanks, parts: Sequence[BucketPart], key: str, memory: Memory
    ) -> None:
        self._scheme, self._comm, self._memory = scheme, comm, memory
        self._count = max((part.stop for part in parts), default=0)
        self._matrices: list[LowRankMatrix] = []
        self._journal = journal_of(comm)
        self._others: list[BucketPart] = []
        residual = left = right = 0
        for part in parts:
            rank = scheme.rank_of(part.shape)
            if rank == 0:
                self._others.append(part)
                continue
            rows, cols = part.shape[0], part.count // part.shape[0]
            matrix = LowRankMatrix(
                part,
                rank,
                residual=slice(residual, residual + part.count),
                left=slice(left, left + rank * rows),
                right=slice(right, right + rank * cols),
                epsilon=scheme.epsilon,
                seed=(scheme.seed % 2**64, zlib.crc32(key.encode()), zlib.crc32(part.name.encode())),
            )
            self._matrices.append(matrix)
            residual, left, right = matrix.residual.stop, matrix.left.stop, matrix.right.stop
        self._left_count = left
        self._message = memory.empty(0)  # allocated when the number of flags is known
        # Two versions of the state: before the last reduction, and after it if it counts.
        count = residual if scheme.feedback else 0
        self._residuals = memory.zeros(count), memory.zeros(count)
        self._factors = memory.zeros(right), memory.zeros(right)
        self._own = memory.empty(right)
        self._current = 0
        self._steps = 0
        self._open = False  # the last reduction may still be rolled back
        self._reduced = 0  # bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent in the last reduction: 2(P-1)/P of the all-reduced bytes."""
        return 2 * (self._comm.size - 1) * self._reduced // self._comm.size

    def reduce(self, values: Any, flags: Any) -> bool:
        """Replace values and flags by their sums over the ranks. See `Reducer`."""
        self.commit()
        self._reduced = 0
        if self._steps < self._scheme.start:
            self._all_reduce(values)
            self._all_reduce(flags)
            finite = is_finite(values[: self._count])
        else:
            finite = self._compress(values, flags)
        self._open = finite
        return finite

    def commit(self) -> None:
        """Accept the last reduction."""
        if self._open:
            self._steps += 1
            if self._steps > self._scheme.start:
                self._current = 1 - self._current
            self._open = False

    def rollback(self) -> None:
        """Undo the last reduction."""
        self._open = False

    def state(self) -> State:
        """Return {"residual": the loss, "q": the last factor (rank x cols), "step": accepted reductions}."""
        steps = self._steps + self._open
        current = 1 - self._current if self._open and steps > self._scheme.start else self._current
        state: State = {}
        residuals, factors = self._memory.on_host(self._residuals[current], self._factors[current])
        for matrix in self._matrices:
            arrays: dict[str, Array] = {"step": np.array(steps, np.int64)}
            if self._scheme.feedback:
                arrays["residual"] = residuals[matrix.residual].reshape(matrix.part.shape).copy()
            if self._scheme.warm_start:
                arrays["q"] = factors[matrix.right].reshape(matrix.rank, matrix.cols).copy()
            state[matrix.part.name] = arrays
        return state

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Load the state by parameter names. Factors and steps must be the same on all ranks."""
        self.commit()
        there = self._residuals[self._current], self._factors[self._current]
        residuals, factors = self._memory.on_host(*there)
        for matrix in self._matrices:
            known = state.get(matrix.part.name, {})
            self._steps = int(known.get("step", self._steps))
            for what, array, place in (
                ("residual", residuals, matrix.residual),
                ("q", factors, matrix.right),
            ):
                saved = known.get(what)
                if saved is not None and len(array) and saved.size == place.stop - place.start:
                    array[place] = saved.reshape(-1)
        for array, values in zip(there, (residuals, factors), strict=True):
            self._memory.put(array, values)
        self._memory.wait()

    def _compress(self, values: Any, flags: Any) -> bool:
        memory = self._memory
        before, after = self._residuals[self._current], self._residuals[1 - self._current]
        factors, own = self._factors[1 - self._current], self._own
        with self._journal.span("codec", "encode", bytes=values.nbytes):
            if self._scheme.warm_start:
                factors[:] = self._factors[self._current]
            else:
                memory.kernels.fill(factors, 0)
            message = self._buffer(len(flags))
            for matrix in self._matrices:
                matrix.begin(memory, factors[matrix.right], self._steps)
                matrix.project(memory.kernels, values, before, factors[matrix.right], message[matrix.left])
            at = self._left_count
            for part in self._others:
                message[at : at + part.count] = values[part.start : part.stop]
                at += part.count
            message[at:] = flags
        self._all_reduce(message)
        with self._journal.span("codec", "project back", bytes=values.nbytes):
            flags[:] = message[at:]
            at = self._left_count
            for part in self._others:
                values[part.start : part.stop] = message[at : at + part.count]
                at += part.count
            finite = is_finite(message)
            kernels = memory.kernels
            sound = [
                matrix.project_back(kernels, values, message[matrix.left], own[matrix.right])
                for matrix in self._matrices
            ]
            factors[:] = own
        self._all_reduce(factors)
        with self._journal.span("codec", "decode", bytes=values.nbytes):
            for matrix, is_sound in zip(self._matrices, sound, strict=True):
                left, right = message[matrix.left], factors[matrix.right]
                if not is_sound:
                    matrix.spoil(kernels, values)
                elif not matrix.expand(kernels, values, after, left, right, own[matrix.right]):
                    finite = False
            memory.wait()
        return finite

    def _buffer(self, flags: int) -> Any:
        count = self._left_count + sum(part.count for part in self._others) + flags
        if len(self._message) != count:
            self._message = self._memory.empty(count)
        return self._message

    def _all_reduce(self, array: Any) -> None:
        if array.size:
            self._comm.all_reduce(array, out=array)
            self._reduced += array.nbytes
