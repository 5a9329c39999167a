"""Flow: tokens in several parts, so that one travels while experts compute another one.

All exchanges of a layer are started in one order, the same on all ranks, and run behind one another: on the thread of
their group, and those of a device's rows on a stream of their own.

    dispatch 0, dispatch 1, (experts compute part 0) combine 0, dispatch 2, (part 1) combine 1, ...
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.errors import CommlibError, PeerError
from commlib.expert.beside import Started
from commlib.expert.mixture import Mixture
from commlib.expert.passage import Assigned, Passage
from commlib.expert.ways import beside_on
from commlib.runtime.work import Work
from commlib.schedule.layout import even


class Part(NamedTuple):
    """Some tokens of a rank, first to last, as a routing of their own. places: of its assignments in the whole's."""

    first: int
    last: int
    places: Array
    tokens: Array
    counts: Array
    starts: Array
    slots: Array


def parts_of(assigned: Assigned, parts: int) -> list[Part]:
    """Cut a routing into parts with as many tokens each, or one more."""
    tokens, starts, counts = assigned.tokens, assigned.starts, assigned.counts
    layout = even(len(starts) - 1, parts)
    experts_of = np.repeat(np.arange(len(counts)), counts)
    found = []
    for part in range(parts):
        first, last = layout.slice_of(part)
        places = np.flatnonzero((tokens >= first) & (tokens < last))
        number = np.zeros(len(tokens), np.int32)
        number[places] = np.arange(len(places), dtype=np.int32)
        found.append(
            Part(
                first,
                last,
                places,
                (tokens[places] - first).astype(np.int32),
                np.bincount(experts_of[places], minlength=len(counts)).astype(np.int64),
                (starts[first : last + 1] - starts[first]).astype(np.int32),
                number[assigned.slots[starts[first] : starts[last]]],
            )
        )
    return found


class Flow:
    """The exchanges of one call of a layer, by the numbers of its parts. x: [tokens, width]; gates: of all assignments.

    Each is started, and waited for where its result is needed: on a device by the stream that is current then. Rows are
    the host's or a device's, as `x` is, gates and numbers as `commlib.expert.exchange.Exchange` has them.
    """

    def __init__(self, mixture: Mixture, parts: list[Part], x: Any, gates: Array) -> None:
        self.parts, self._mixture = parts, mixture
        self._x, self._gates = x, gates
        self._beside = beside_on(mixture.ranks.axis, x.device) if type(x) is DeviceArray else None
        self._works: dict[tuple[str, int], Work | Started] = {}
        self._passages: dict[int, Passage] = {}  # as long as exchanges may be under way that read them

    def dispatch(self, part: int) -> None:
        """Start to send a part."""
        own = self.parts[part]
        x, gates = self._x[own.first : own.last], self._gates[own.places]
        exchange, name = self._mixture.exchange, self._mixture.name
        self._start("dispatch", part, lambda: exchange.dispatch(name, own, x, gates), x)

    def dispatched(self, part: int) -> tuple[Any, Any, list[int]]:
        """Return the rows that came, their gates, and how many each expert has."""
        passage, rows, gates, counts = self._wait("dispatch", part)
        self._passages[part] = passage
        return rows, gates, counts.tolist()

    def combine(self, part: int, rows: Any, gates: Any) -> None:
        """Start to send back what experts made of a part."""
        passage, exchange, name = self._passages[part], self._mixture.exchange, self._mixture.name
        self._start("combine", part, lambda: exchange.combine(name, passage, rows, gates), rows, gates)

    def combined(self, part: int) -> Any:
        """Return what came back."""
        return self._wait("combine", part)

    def combine_back(self, part: int, gradient: Any) -> None:
        """Start to send the gradient of what came back."""
        passage, exchange, name = self._passages[part], self._mixture.exchange, self._mixture.name
        self._start("combine, backward", part, lambda: exchange.combine_back(name, passage, gradient), gradient)

    def combined_back(self, part: int) -> Any:
        """Return the gradients that came."""
        return self._wait("combine, backward", part)

    def dispatch_back(self, part: int, rows: Any, gates: Any) -> None:
        """Start to send back the gradients of rows and gates."""
        passage, exchange, name = self._passages[part], self._mixture.exchange, self._mixture.name
        self._start("dispatch, backward", part, lambda: exchange.dispatch_back(name, passage, rows, gates), rows, gates)

    def dispatched_back(self, part: int) -> tuple[Any, Any]:
        """Return the gradients of the part's tokens and gates."""
        return self._wait("dispatch, backward", part)  # type: ignore[no-any-return]

    def _start(self, what: str, part: int, run: Callable[[], Any], *given: Any) -> None:
        if self._beside is not None:
            self._works[what, part] = self._beside.start(run, *given)
            return
        comm = self._mixture.ranks.axis.comm
        self._works[what, part] = comm.plan_program(f"{self._mixture.name}: {what}, part {part}", run).start()

    def _wait(self, what: str, part: int) -> Any:
        try:
            return self._works.pop((what, part)).wait()
        except PeerError:  # and so have those behind it failed
            self.drop()
            raise

    def drop(self) -> None:
        """Wait for what has been started, on a communicator that is given up: nobody else will."""
        for work in self._works.values():
            with suppress(CommlibError):
                work.wait()
        self._works.clear()
