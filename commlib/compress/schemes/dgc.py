"""Deep Gradient Compression (Lin et al. 2018): add up sparse gradients as if they were dense, with momentum.

For each rank and parameter, with the gradient g (clipped to clip_norm / sqrt(ranks)):

    u = m u + g       momentum, before the selection ("momentum correction"); nesterov: u = m (u + g)
    v = v + u         unsent values; nesterov: v = v + u + g
    send the largest elements of v; set u = v = 0 for them ("momentum factor masking")

The sent values are added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite, sqrt
from typing import Any

from commlib.compress.codecs.sparse import TopK, check_ratio, check_values, count_sent
from commlib.compress.feedback import Residual, add_counter, counter
from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart, CodecRanks, State
from commlib.compress.schemes.all_gather import DENSE_BELOW
from commlib.compress.schemes.sparse_payload import GatheredPayload
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.errors import UsageError


@dataclass(frozen=True, slots=True)
class DGC:
    """Sparse gradients with built-in momentum. The optimizer must be plain SGD, or momentum would count twice.

    ratio: the share of a parameter's elements that is sent. warmup: the ratios of the first `warmup_steps` steps, for
    an equal number of steps each; the paper's warm-up takes 4 epochs. clip_norm: the maximum norm of a parameter's
    gradient in the sum over the ranks, applied before the reduction; parameters are clipped one by one, as in the
    authors' code. values: the dtype of sent values. Parameters with fewer than `dense_below` elements are sent in full,
    with ordinary momentum.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    warmup: tuple[float, ...] = (0.25, 0.063, 0.015, 0.004)
    warmup_steps: int = 0
    clip_norm: float | None = None
    nesterov: bool = False
    values: str = "float32"
    dense_below: int = DENSE_BELOW

    def __post_init__(self) -> None:
        for ratio in (self.ratio, *self.warmup):
            check_ratio("DGC", ratio)
        check_values("DGC", self.values)
        if not 0 <= self.momentum < 1:
            raise UsageError(f"DGC: momentum is {self.momentum}, expected at least 0 and less than 1")
        if self.warmup_steps < 0 or (self.warmup_steps and not self.warmup):
            raise UsageError(f"DGC: warmup_steps={self.warmup_steps} with warmup={self.warmup}, expected 0 or ratios")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"DGC: clip_norm is {self.clip_norm}, expected a positive number or None")

    @property
    def name(self) -> str:
        words = [f"ratio={self.ratio}"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                text = "/".join(map(str, value)) if isinstance(value, tuple) else value
                words.append(f"{field.name}={text}")
        return f"dgc:{','.join(words)}"

    @property
    def divisible(self) -> bool:
        return self.clip_norm is None  # a piece does not know the norm of the full parameter

    def ratio_at(self, step: int) -> float:
        """Return the ratio of a step, counted from 0."""
        if step >= self.warmup_steps:
            return self.ratio
        return self.warmup[step * len(self.warmup) // self.warmup_steps]

    def reducer(
        self, comm: CodecRanks, parts: Sequence[BucketPart], *, key: str = "", device: Device = HOST
    ) -> DGCReducer:
        """Return the reducer of a bucket with these parts."""
        return DGCReducer(comm, parts, self, Memory(device, comm.watch))


class DGCReducer:
    """Reduces one bucket. Keeps momentum, accumulated gradients and the step, by parameter."""

    def __init__(self, comm: CodecRanks, parts: Sequence[BucketPart], scheme: DGC, memory: Memory) -> None:
        self._scheme, self._parts, self._kernels = scheme, tuple(parts), memory.kernels
        self._sparse = [part for part in parts if part.count >= scheme.dense_below]
        self._dense = [part for part in parts if part.count < scheme.dense_below]
        self._clip = None if scheme.clip_norm is None else scheme.clip_norm / sqrt(comm.size)
        count = max((part.stop for part in parts), default=0)
        self._momentum, self._accumulated = Residual(count, memory), Residual(count, memory)
        self._step, self._open = 0, False
        densest = TopK(max(scheme.ratio, *scheme.warmup) if scheme.warmup_steps else scheme.ratio, scheme.values)
        self._payload = GatheredPayload(comm, self._dense, self._sparse, densest.payload_bytes, densest.decode, memory)

    @property
    def sent_bytes(self) -> int:
        return self._payload.sent_bytes

    def reduce(self, values: Any, flags: Any) -> bool:
        """Replace values and flags by their sums over the ranks. See `Reducer`."""
        scheme, kernels = self._scheme, self._kernels
        (u, u_after), (v, v_after) = self._momentum.stage(), self._accumulated.stage()
        ratio, momentum, nesterov = scheme.ratio_at(self._step), scheme.momentum, scheme.nesterov
        self._step, self._open = self._step + 1, True
        for part in self._dense:
            place = slice(part.start, part.stop)
            gradient = values[place]
            kernels.add_momentum(gradient, u[place], u_after[place], self._scale(gradient), momentum, nesterov)

        def encode(number: int, gradient: Any, room: Any) -> int:
            part = self._sparse[number]
            at, k = slice(part.start, part.stop), count_sent(ratio, part.count)
            state = u[at], v[at], u_after[at], v_after[at]
            return kernels.accumulate(
                gradient, *state, self._scale(gradient), momentum, nesterov, k, scheme.values, room
            )

        return self._payload.reduce(values, flags, encode)

    def commit(self) -> None:
        """Accept the last reduction."""
        self._momentum.commit()
        self._accumulated.commit()
        self._open = False

    def rollback(self) -> None:
        """Undo the last reduction."""
        self._momentum.rollback()
        self._accumulated.rollback()
        self._step -= self._open
        self._open = False

    def state(self) -> State:
        """Return {"momentum", "accumulated", "step"} of each parameter, on this rank."""
        state = self._momentum.state(self._parts, "momentum")
        for name, more in self._accumulated.state(self._parts, "accumulated").items():
            state[name] |= more
        return add_counter(self._parts, "step", self._step, state)

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Load the state by parameter names. The step is the highest of all parameters."""
        self.commit()
        self._momentum.load(self._parts, "momentum", state)
        self._accumulated.load(self._parts, "accumulated", state)
        self._step = counter(self._parts, "step", state, self._step)

    def _scale(self, gradient: Any) -> float:
        """Return the factor that clips a gradient: 1 for a gradient that is not finite."""
        if self._clip is None:
            return 1.0
        norm = sqrt(self._kernels.squares(gradient))
        return self._clip / norm if norm > self._clip and isfinite(norm) else 1.0
