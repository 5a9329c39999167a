"""Deep Gradient Compression (Lin et al. 2018): sparse sums that behave like dense ones with momentum.

On each rank and for each parameter, with its gradient g (clipped to clip_norm / sqrt(ranks)):

    u = m u + g       momentum, before anything is chosen ("momentum correction"); nesterov: u = m (u + g)
    v = v + u         what has not been sent yet; nesterov: v = v + u + g
    send the largest elements of v; where they are sent, u = v = 0 ("momentum factor masking")

What is sent is added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite, sqrt

import numpy as np

from commlib.buffers.views import address_of
from commlib.compress.feedback import Residual, add_counter, counter, gather_state, spread_state
from commlib.compress.gather import DENSE_BELOW
from commlib.compress.messages import Messages
from commlib.compress.scheme import Lane, Part, State
from commlib.compress.sparse import TopK, check_ratio, check_values, sent
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host.norm import sum_of_squares
from commlib.kernels.host.sparsify import encode_accumulated
from commlib.kernels.host.table import VALUES


@dataclass(frozen=True, slots=True)
class DGC:
    """Sparse gradients with momentum of their own. The optimizer must be plain SGD: momentum would count twice.

    ratio: of a parameter's elements that are sent. warmup: the ratios of the first `warmup_steps` steps, equally many
    for each; the paper's take 4 epochs. clip_norm: to what norm a parameter's gradient, as the reduction gets it, is
    clipped in the sum over the ranks; parameters are clipped one by one, as in the authors' code. values: the dtype in
    which values travel. Parameters with fewer than `dense_below` elements travel whole, with ordinary momentum.
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
        return self.clip_norm is None  # a piece does not know the norm of the whole

    def ratio_at(self, step: int) -> float:
        """Return the ratio of a step, counted from 0."""
        if step >= self.warmup_steps:
            return self.ratio
        return self.warmup[step * len(self.warmup) // self.warmup_steps]

    def reducer(self, lane: Lane, parts: Sequence[Part], *, key: str = "") -> DGCReducer:
        """Return the reducer of a bucket with these parts."""
        return DGCReducer(lane, parts, self)


class DGCReducer:
    """Reduces one bucket. Momentum and what has accumulated are remembered by parameter, and so is the step."""

    def __init__(self, lane: Lane, parts: Sequence[Part], scheme: DGC) -> None:
        self._scheme, self._parts = scheme, tuple(parts)
        self._sparse = [part for part in parts if part.count >= scheme.dense_below]
        self._dense = [part for part in parts if part.count < scheme.dense_below]
        self._clip = None if scheme.clip_norm is None else scheme.clip_norm / sqrt(lane.size)
        count = max((part.stop for part in parts), default=0)
        self._momentum, self._accumulated = Residual(count), Residual(count)
        self._step, self._open = 0, False
        densest = TopK(max(scheme.ratio, *scheme.warmup) if scheme.warmup_steps else scheme.ratio, scheme.values)
        self._messages = Messages(lane, self._dense, self._sparse, densest.payload_bytes, densest.decode)

    @property
    def sent_bytes(self) -> int:
        return self._messages.sent_bytes

    def reduce(self, values: Array, flags: Array) -> bool:
        """Replace values and flags by their sums over the lane. See `Reducer`."""
        scheme = self._scheme
        (u, u_after), (v, v_after) = self._momentum.begin(), self._accumulated.begin()
        ratio = scheme.ratio_at(self._step)
        self._step, self._open = self._step + 1, True
        for part in self._dense:
            place = slice(part.start, part.stop)
            self._add_momentum(values[place], u[place], u_after[place])

        def encode(number: int, gradient: Array, room: Array) -> int:
            part = self._sparse[number]
            state = (address_of(array) + 4 * part.start for array in (u, v, u_after, v_after))
            how = self._scale(gradient), scheme.momentum, scheme.nesterov
            k, kind, to = sent(ratio, part.count), VALUES[scheme.values], address_of(room)
            return int(encode_accumulated(address_of(gradient), *state, part.count, *how, k, kind, to))

        return self._messages.reduce(values, flags, encode)

    def keep(self) -> None:
        """Let the last reduction count."""
        self._momentum.keep()
        self._accumulated.keep()
        self._open = False

    def discard(self) -> None:
        """Let the last reduction count as not done."""
        self._momentum.discard()
        self._accumulated.discard()
        self._step -= self._open
        self._open = False

    def state(self) -> State:
        """Return {"momentum", "accumulated", "step"} of each parameter, on this rank."""
        state = gather_state(self._parts, "momentum", self._momentum.values)
        for name, more in gather_state(self._parts, "accumulated", self._accumulated.values).items():
            state[name] |= more
        return add_counter(self._parts, "step", self._step, state)

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Take over what is known by parameter names; the step is that of the one that is furthest."""
        self.keep()
        spread_state(self._parts, "momentum", self._momentum.values, state)
        spread_state(self._parts, "accumulated", self._accumulated.values, state)
        self._step = counter(self._parts, "step", state, self._step)

    def _scale(self, gradient: Array) -> float:
        """Return what to multiply a gradient by so that it is clipped. One that is not finite stays what it is."""
        if self._clip is None:
            return 1.0
        norm = sqrt(sum_of_squares(gradient))
        return self._clip / norm if norm > self._clip and isfinite(norm) else 1.0

    def _add_momentum(self, gradient: Array, u: Array, u_after: Array) -> None:
        """Replace the gradient of a small parameter by its sum with the momentum."""
        momentum = np.float32(self._scheme.momentum)
        with np.errstate(all="ignore"):
            scaled = gradient * np.float32(self._scale(gradient))
            new = momentum * (u + scaled) if self._scheme.nesterov else momentum * u + scaled
            gradient[:] = new + scaled if self._scheme.nesterov else new
        u_after[:] = np.where(np.isfinite(new), new, u)
