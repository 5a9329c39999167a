"""Chunked dispatch: send tokens in several chunks, each while experts compute another one.

All exchanges of a layer start in one order, the same on all ranks, and run one after another: host rows on the thread
of their group, device rows on a side stream.

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
from commlib.expert.dispatch_plan import Assignments, DispatchPlan
from commlib.expert.dispatchers import side_stream_on
from commlib.expert.mixture import Mixture
from commlib.expert.side_stream import SideWork
from commlib.runtime.work import Work
from commlib.schedule.layout import even


class TokenChunk(NamedTuple):
    """Tokens first to last of a rank, routed separately. places: positions of its assignments in the full routing."""

    first: int
    last: int
    places: Array
    tokens: Array
    counts: Array
    starts: Array
    slots: Array


def split_tokens(assigned: Assignments, parts: int) -> list[TokenChunk]:
    """Split a routing into parts with the same number of tokens each, or one more."""
    tokens, starts, counts = assigned.tokens, assigned.starts, assigned.counts
    layout = even(len(starts) - 1, parts)
    experts_of = np.repeat(np.arange(len(counts)), counts)
    chunks = []
    for part in range(parts):
        first, last = layout.slice_of(part)
        places = np.flatnonzero((tokens >= first) & (tokens < last))
        number = np.zeros(len(tokens), np.int32)
        number[places] = np.arange(len(places), dtype=np.int32)
        chunks.append(
            TokenChunk(
                first,
                last,
                places,
                (tokens[places] - first).astype(np.int32),
                np.bincount(experts_of[places], minlength=len(counts)).astype(np.int64),
                (starts[first : last + 1] - starts[first]).astype(np.int32),
                number[assigned.slots[starts[first] : starts[last]]],
            )
        )
    return chunks


class ChunkedDispatch:
    """The exchanges of one call of a layer, by part number. x: [tokens, width]; gates: of all assignments.

    Each exchange is started, and waited for where its result is needed: on a device, the current stream waits. Rows are
    host or device rows like `x`, gates and numbers as in `commlib.expert.dispatcher.Dispatcher`.
    """

    def __init__(self, mixture: Mixture, parts: list[TokenChunk], x: Any, gates: Array) -> None:
        self.parts, self._mixture = parts, mixture
        self._x, self._gates = x, gates
        self._side_stream = side_stream_on(mixture.ranks.axis, x.device) if type(x) is DeviceArray else None
        self._works: dict[tuple[str, int], Work | SideWork] = {}
        self._plans: dict[int, DispatchPlan] = {}  # kept while running exchanges may read them

    def dispatch(self, part: int) -> None:
        """Start to send a part."""
        own = self.parts[part]
        x, gates = self._x[own.first : own.last], self._gates[own.places]
        exchange, name = self._mixture.exchange, self._mixture.name
        self._start("dispatch", part, lambda: exchange.dispatch(name, own, x, gates), x)

    def dispatched(self, part: int) -> tuple[Any, Any, list[int]]:
        """Return the received rows, their gates, and the number of rows of each expert."""
        plan, rows, gates, counts = self._wait("dispatch", part)
        self._plans[part] = plan
        return rows, gates, counts.tolist()

    def combine(self, part: int, rows: Any, gates: Any) -> None:
        """Start to send the experts' rows of a part back."""
        plan, exchange, name = self._plans[part], self._mixture.exchange, self._mixture.name
        self._start("combine", part, lambda: exchange.combine(name, plan, rows, gates), rows, gates)

    def combined(self, part: int) -> Any:
        """Return the combined tokens of a part."""
        return self._wait("combine", part)

    def combine_back(self, part: int, gradient: Any) -> None:
        """Start to send the gradient of the combined tokens."""
        plan, exchange, name = self._plans[part], self._mixture.exchange, self._mixture.name
        self._start("combine, backward", part, lambda: exchange.combine_back(name, plan, gradient), gradient)

    def wait_combine_back(self, part: int) -> Any:
        """Return the received gradients."""
        return self._wait("combine, backward", part)

    def dispatch_back(self, part: int, rows: Any, gates: Any) -> None:
        """Start to send back the gradients of rows and gates."""
        plan, exchange, name = self._plans[part], self._mixture.exchange, self._mixture.name
        self._start("dispatch, backward", part, lambda: exchange.dispatch_back(name, plan, rows, gates), rows, gates)

    def wait_dispatch_back(self, part: int) -> tuple[Any, Any]:
        """Return the gradients of the part's tokens and gates."""
        return self._wait("dispatch, backward", part)  # type: ignore[no-any-return]

    def _start(self, what: str, part: int, run: Callable[[], Any], *given: Any) -> None:
        if self._side_stream is not None:
            self._works[what, part] = self._side_stream.start(run, *given)
            return
        comm = self._mixture.ranks.axis.comm
        self._works[what, part] = comm.plan_program(f"{self._mixture.name}: {what}, part {part}", run).start()

    def _wait(self, what: str, part: int) -> Any:
        try:
            return self._works.pop((what, part)).wait()
        except PeerError:  # the exchanges started after it have failed too
            self.drop()
            raise

    def drop(self) -> None:
        """Wait for all started exchanges of a failed communicator: no other code waits for them."""
        for work in self._works.values():
            with suppress(CommlibError):
                work.wait()
        self._works.clear()
