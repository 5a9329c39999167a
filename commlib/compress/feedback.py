"""Error feedback: what a codec lost of one step is added to the next, so that in the sum over steps nothing is lost.

The residual is this rank's own: local values minus what this rank contributed to the sum (Vogels et al. 2019, algorithm
2; Karimireddy et al. 2019). The other form, local values minus the *mean*, grows without bound where ranks differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from commlib.compress.scheme import Part, State
from commlib.dtypes import Array


class Residual:
    """What was lost of `count` float32 values: once as it was before the last reduction, once as it is since.

    A step that was skipped, because of an overflow, must leave no trace; so both are kept.
    """

    def __init__(self, count: int) -> None:
        self._arrays = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self._current = 0
        self._open = False  # the last reduction may still be discarded

    def begin(self) -> tuple[Array, Array]:
        """Return (what to add to the values, where to put what is lost of the sum) for one reduction."""
        before, after = self._arrays[self._current], self._arrays[1 - self._current]
        self._current = 1 - self._current
        self._open = True
        return before, after

    def keep(self) -> None:
        """Let the last reduction count."""
        self._open = False

    def discard(self) -> None:
        """Let the last reduction count as not done, unless it was kept."""
        if self._open:
            self._current = 1 - self._current
            self._open = False

    @property
    def values(self) -> Array:
        """What the next reduction adds."""
        return self._arrays[self._current]


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


def is_finite(values: Array) -> bool:
    """Return whether no value is infinite or NaN; one pass over the memory, without a temporary array."""
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum(dtype=np.float32)):
            return True
    return bool(np.isfinite(values).all())  # a sum of finite values may overflow
