"""Error feedback: add a codec's loss in one step to the next step. The sum over steps loses nothing.

The residual belongs to this rank: local values minus this rank's contribution to the sum (Vogels et al. 2019, algorithm
2; Karimireddy et al. 2019). The other form, local values minus the *mean*, grows without bound if ranks differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart, State
from commlib.devices.arrays import device_of
from commlib.dtypes import Array


class Residual:
    """The losses of `count` float32 values, before and after the last reduction.

    A step that was skipped because of an overflow must not change the residual, so both versions stay on the values'
    device.
    """

    def __init__(self, count: int, memory: Memory) -> None:
        self._memory = memory
        self._arrays = memory.zeros(count), memory.zeros(count)
        self._current = 0
        self._open = False  # the last reduction may still be rolled back

    def stage(self) -> tuple[Any, Any]:
        """Return the residual to add to the values, and the array for the new loss, for one reduction."""
        before, after = self._arrays[self._current], self._arrays[1 - self._current]
        self._current = 1 - self._current
        self._open = True
        return before, after

    def commit(self) -> None:
        """Accept the last reduction."""
        self._open = False

    def rollback(self) -> None:
        """Undo the last reduction, unless it was committed."""
        if self._open:
            self._current = 1 - self._current
            self._open = False

    def state(self, parts: Sequence[BucketPart], what: str, start: int = 0) -> State:
        """Return the values that the next reduction adds, as `gather_state` does."""
        (values,) = self._memory.on_host(self._arrays[self._current])
        return gather_state(parts, what, values, start)

    def load(
        self, parts: Sequence[BucketPart], what: str, state: Mapping[str, Mapping[str, Array]], start: int = 0
    ) -> None:
        """Set the values that the next reduction adds from `state`, as `spread_state` does."""
        array = self._arrays[self._current]
        (values,) = self._memory.on_host(array)
        spread_state(parts, what, values, state, start)
        self._memory.put(array, values)
        self._memory.wait()


def gather_state(parts: Sequence[BucketPart], what: str, values: Array, start: int = 0) -> State:
    """Return the state of each part in `values`, a range of the bucket from element `start` on.

    Elements of a part outside `values` are zeros.
    """
    state: State = {}
    for part in parts:
        gathered = np.zeros(part.count, np.float32)
        first, last = max(part.start, start), min(part.stop, start + len(values))
        if first < last:
            gathered[first - part.start : last - part.start] = values[first - start : last - start]
        state[part.name] = {what: gathered.reshape(part.shape)}
    return state


def spread_state(
    parts: Sequence[BucketPart], what: str, values: Array, state: Mapping[str, Mapping[str, Array]], start: int = 0
) -> None:
    """Write the state of the parts to `values`, the inverse of `gather_state`. Parts without state do not change."""
    for part in parts:
        known = state.get(part.name, {}).get(what)
        if known is None or known.size != part.count:
            continue
        first, last = max(part.start, start), min(part.stop, start + len(values))
        if first < last:
            values[first - start : last - start] = known.reshape(-1)[first - part.start : last - part.start]


def add_counter(parts: Sequence[BucketPart], what: str, count: int, state: State) -> State:
    """Add a counter of the bucket to the state of each of its parts."""
    for part in parts:
        state.setdefault(part.name, {})[what] = np.array(count, np.int64)
    return state


def counter(parts: Sequence[BucketPart], what: str, state: Mapping[str, Mapping[str, Array]], otherwise: int) -> int:
    """Return the highest counter of the parts, the inverse of `add_counter`."""
    counts = [int(state[part.name][what]) for part in parts if what in state.get(part.name, {})]
    return max(counts, default=otherwise)


def is_finite(values: Any) -> bool:
    """Return whether no float32 is infinite or NaN. Waits for the work queued earlier on a device."""
    return bool(device_of(values).kernels.is_finite(values))
