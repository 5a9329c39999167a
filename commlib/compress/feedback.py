"""Error feedback: add what a codec lost in one step to the next. In the sum over steps nothing is lost.

The residual is this rank's own: local values minus what this rank contributed to the sum (Vogels et al. 2019, algorithm
2; Karimireddy et al. 2019). The other form, local values minus the *mean*, grows without bound where ranks differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from commlib.compress.memory import Memory
from commlib.compress.scheme import Part, State
from commlib.devices.arrays import device_of
from commlib.dtypes import Array


class Residual:
    """Remember the losses of `count` float32 values: as they were before the last reduction, and as they are since.

    A step that was skipped, because of an overflow, must leave no trace; so both are kept, where the values are.
    """

    def __init__(self, count: int, memory: Memory) -> None:
        self._memory = memory
        self._arrays = memory.zeros(count), memory.zeros(count)
        self._current = 0
        self._open = False  # the last reduction may still be rolled back

    def stage(self) -> tuple[Any, Any]:
        """Return (what to add to the values, where to put what is lost of the sum) for one reduction."""
        before, after = self._arrays[self._current], self._arrays[1 - self._current]
        self._current = 1 - self._current
        self._open = True
        return before, after

    def commit(self) -> None:
        """Let the last reduction count."""
        self._open = False

    def rollback(self) -> None:
        """Let the last reduction count as not done, unless it was committed."""
        if self._open:
            self._current = 1 - self._current
            self._open = False

    def state(self, parts: Sequence[Part], what: str, start: int = 0) -> State:
        """Return what the next reduction adds, as `gather_state` does."""
        (values,) = self._memory.on_host(self._arrays[self._current])
        return gather_state(parts, what, values, start)

    def load(self, parts: Sequence[Part], what: str, state: Mapping[str, Mapping[str, Array]], start: int = 0) -> None:
        """Let the next reduction add what `state` says, as `spread_state` does."""
        array = self._arrays[self._current]
        (values,) = self._memory.on_host(array)
        spread_state(parts, what, values, state, start)
        self._memory.put(array, values)
        self._memory.wait()


def gather_state(parts: Sequence[Part], what: str, values: Array, start: int = 0) -> State:
    """Return the state of each part in `values`, which begin at element `start` of the bucket and may cover a piece.

    Where they do not cover a part it has zeros.
    """
    state: State = {}
    for part in parts:
        found = np.zeros(part.count, np.float32)
        first, last = max(part.start, start), min(part.stop, start + len(values))
        if first < last:
            found[first - part.start : last - part.start] = values[first - start : last - start]
        state[part.name] = {what: found.reshape(part.shape)}
    return state


def spread_state(
    parts: Sequence[Part], what: str, values: Array, state: Mapping[str, Mapping[str, Array]], start: int = 0
) -> None:
    """Write what `state` says of the parts to `values`; undoes `gather_state`. Other parts stay what they are."""
    for part in parts:
        known = state.get(part.name, {}).get(what)
        if known is None or known.size != part.count:
            continue
        first, last = max(part.start, start), min(part.stop, start + len(values))
        if first < last:
            values[first - start : last - start] = known.reshape(-1)[first - part.start : last - part.start]


def add_counter(parts: Sequence[Part], what: str, count: int, state: State) -> State:
    """Add a number that is the bucket's to what is known of each of its parts."""
    for part in parts:
        state.setdefault(part.name, {})[what] = np.array(count, np.int64)
    return state


def counter(parts: Sequence[Part], what: str, state: Mapping[str, Mapping[str, Array]], otherwise: int) -> int:
    """Return the number of the part that is furthest; undoes `add_counter`."""
    found = [int(state[part.name][what]) for part in parts if what in state.get(part.name, {})]
    return max(found, default=otherwise)


def is_finite(values: Any) -> bool:
    """Return whether no float32 is infinite or NaN; waits for what was queued before on a device."""
    return bool(device_of(values).kernels.is_finite(values))
