"""Mixture: one layer's experts on one rank, without a framework: where tokens go, and what is told of that."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from commlib.compress.registry import codec_of
from commlib.dtypes import Array
from commlib.errors import ShutdownError, line
from commlib.expert.experts import Experts
from commlib.expert.placement import Placement
from commlib.expert.planner import imbalance, plan
from commlib.expert.ranks import ExpertRanks
from commlib.expert.routing import Routing, route, updated_bias
from commlib.expert.same_tokens import check_same_tokens
from commlib.expert.shared_gradients import MIXTURES, is_even
from commlib.expert.stats import Counted, Stats, gathered
from commlib.expert.ways import exchange_over, leave


class Mixture:
    """The experts of a layer over the ranks of their axis. Collective to make.

    name: the layer's, for errors.
    """

    def __init__(self, name: str, experts: Experts, ranks: ExpertRanks) -> None:
        self.name, self.experts, self.ranks = name, experts, ranks
        self.placement = Placement.even(experts.count, ranks.axis.size)
        self._codec = None if experts.codec is None else codec_of(experts.codec)
        self.exchange = exchange_over(ranks.axis, self.placement, self._codec)
        self.has_moved = False
        """Whether experts have changed places since this was made."""
        self.counted = Counted(experts.count)
        self._journal = ranks.axis.comm.group.journal
        self._is_compared = False
        self.was_even = True
        """Whether the last call sent all tokens to all experts, by one gate."""
        self._join()
        self.load = np.zeros(experts.count, np.int64)
        """How often each expert was chosen by tokens of this rank in training, since the last `take_load`."""

    def route(
        self,
        logits: Array,
        *,
        training: bool,
        seed: int = 0,
        bias: Array | None = None,
        mask: Array | None = None,
        sequence: int = 0,
        again: bool = False,
    ) -> Routing:
        """Return where the tokens of this rank go: see `commlib.expert.routing.route`. Collective if options say so.

        again: this was computed before, and is again for a backward that needs it: it does not count.
        """
        self.rejoin()
        if not self._is_compared:
            self._is_compared = True
            check_same_tokens(self.name, self.ranks.tensor, logits)
        found = route(
            self.experts,
            logits,
            training=training,
            seed=seed,
            bias=bias,
            mask=mask,
            sequence=sequence,
            comm=self.ranks.data,
        )
        if again:
            return found
        self.was_even = is_even(found)
        if training:
            self.load += found.load
        self.counted.add(found, len(logits) if mask is None else int(mask.sum()))
        recorder = self._journal.recorder
        if recorder is not None:
            recorder.count(f"load of {self.name}", self._journal.name, found.load.tolist())
        return found

    def _join(self) -> None:
        self.ranks.axis.comm.kept.setdefault(MIXTURES, weakref.WeakSet()).add(self)

    def rejoin(self) -> None:
        """Make the ways between ranks anew if one has left them, as `telling` lets it. Collective then, on all."""
        if self.exchange.is_left:
            self.exchange = exchange_over(self.ranks.axis, self.placement, self._codec)

    def rebalanced(self, bias: Array) -> Array:
        """Return what is added to scores for choosing, after a step. Collective over all that train together."""
        return updated_bias(self.experts, bias, self.take_load())

    def __deepcopy__(self, memo: Any) -> Mixture:
        """Return that of a copied layer: it shares the ways between ranks, and counts anew."""
        found = copy.copy(self)
        found.counted, found.load = Counted(self.experts.count), np.zeros_like(self.load)
        found._join()
        return found

    def stats(self) -> Stats:
        """Return how experts were used since the last time, by tokens of all ranks. Collective."""
        (found,) = gathered([self.counted], self.ranks.data)
        return found

    def better_placement(self, least: float) -> tuple[Placement, float, float]:
        """Return where experts had better be, and the imbalance of ranks now and then.

        By how often they were chosen since `stats` or this was last called, by tokens of all ranks; collective. It is
        where they are unless the busiest rank gets `least` times less.
        """
        load = [max(share, 0.0) for share in self.stats().load]
        found = plan(load, self.placement)
        before, after = imbalance(load, self.placement), imbalance(load, found)
        return (found if before >= least * after else self.placement), before, after

    def place(self, placement: Placement) -> None:
        """Send tokens by another placement from now on: experts have moved. Collective."""
        self.placement, self.has_moved = placement, True
        self.exchange = exchange_over(self.ranks.axis, placement, self._codec)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Compute experts within: what comes out of it is told to the ranks that wait for these, and they raise it.

        All go on with the next call.
        """
        try:
            yield
        except BaseException as error:
            self.leave(f"raised {line(error)}")
            raise

    def leave(self, why: str) -> None:
        """Let all ranks that wait for the experts of this one raise PeerError. Not collective; see `rejoin`.

        With chunks they wait on the communicator of the experts' ranks, which is given up.
        """
        comm = self.ranks.axis.comm
        text = f"{self.name}: experts of rank {comm.rank} of {comm.name} {why}"
        leave(self.ranks.axis, text)
        if self.experts.chunks > 1 and comm.size > 1:
            comm.group.fail(ShutdownError(text))

    def follow(self, original: Mixture) -> None:
        """Send tokens as that of a layer does of which this one's is a copy: experts of both have moved."""
        self.placement, self.exchange, self.has_moved = original.placement, original.exchange, True

    def name_among(self, names: Collection[str]) -> str:
        """Return the layer's name, or one made of it that is not among others."""
        return self.name if self.name not in names else f"{self.name} ({len(names)})"

    def take_load(self) -> Array:
        """Return how often experts were chosen in training since the last time, by tokens of all ranks. Collective."""
        load: Array = self.ranks.data.all_reduce(self.load)
        self.load[:] = 0
        return load


def stats_of(mixtures: Iterable[Mixture]) -> dict[str, Stats]:
    """Return how the experts of layers were used since the last time, by name. Collective, one message for all."""
    found = list(mixtures)
    data = {id(one.ranks.data): one.ranks.data for one in found}
    told: dict[str, Stats] = {}
    for key, comm in data.items():
        own = [one for one in found if id(one.ranks.data) == key]
        for one, stats in zip(own, gathered([each.counted for each in own], comm), strict=True):
            told[one.name_among(told)] = stats
    return told
