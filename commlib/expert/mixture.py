"""Mixture: the experts of one layer on one rank, independent of the framework: routing, dispatch and statistics."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from commlib.comparison.gradient_comparison import print_of, tolerance_of
from commlib.compress.registry import codec_of
from commlib.dtypes import Array
from commlib.errors import MismatchError, ShutdownError, UsageError, line
from commlib.expert.dispatchers import dispatcher_over, leave
from commlib.expert.expert_ranks import ExpertRanks
from commlib.expert.experts import Experts
from commlib.expert.placement import ExpertPlacement
from commlib.expert.planner import imbalance, plan
from commlib.expert.routing import Routing, route, update_bias
from commlib.expert.shared_gradients import MIXTURES, is_even
from commlib.expert.stats import ExpertStats, RoutingCounter, gather_stats
from commlib.sharding.axis import ParallelAxis


class Mixture:
    """The experts of a layer over the ranks of their axis. Collective to make.

    name: the layer's name, for errors.
    """

    def __init__(self, name: str, experts: Experts, ranks: ExpertRanks) -> None:
        self.name, self.experts, self.ranks = name, experts, ranks
        self.placement = ExpertPlacement.even(experts.count, ranks.axis.size)
        self._codec = None if experts.codec is None else codec_of(experts.codec)
        self.exchange = dispatcher_over(ranks.axis, self.placement, self._codec)
        self.has_moved = False
        """Whether experts have moved between ranks since this mixture was made."""
        self.counted = RoutingCounter(experts.count)
        self._journal = ranks.axis.comm.group.progress.journal
        self._is_compared = False
        self.was_even = True
        """Whether the last call sent all tokens to all experts, with equal gates."""
        self._join()
        self.load = np.zeros(experts.count, np.int64)
        """How often tokens of this rank chose each expert in training, since the last `take_load`."""

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
        """Return the routing of this rank's tokens: see `commlib.expert.routing.route`. Collective if options say so.

        again: recomputation for a backward, which statistics do not count.
        """
        self.renew_dispatcher()
        if not self._is_compared:
            self._is_compared = True
            check_same_tokens(self.name, self.ranks.tensor, logits)
        routing = route(
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
            return routing
        self.was_even = is_even(routing)
        if training:
            self.load += routing.load
        self.counted.add(routing, len(logits) if mask is None else int(mask.sum()))
        recorder = self._journal.recorder
        if recorder is not None:
            recorder.count(f"load of {self.name}", self._journal.name, routing.load.tolist())
        return routing

    def _join(self) -> None:
        self.ranks.axis.comm.cached.setdefault(MIXTURES, weakref.WeakSet()).add(self)

    def renew_dispatcher(self) -> None:
        """Make a new dispatcher if a rank has left the old one (see `reporting_errors`). Collective over all ranks."""
        if self.exchange.has_left_rank:
            self.exchange = dispatcher_over(self.ranks.axis, self.placement, self._codec)

    def rebalanced(self, bias: Array) -> Array:
        """Return the new bias for choosing experts, after a step. Collective over all ranks that train together."""
        return update_bias(self.experts, bias, self.take_load())

    def __deepcopy__(self, memo: Any) -> Mixture:
        """Return the mixture of a copied layer: it shares the dispatcher, and starts new statistics."""
        clone = copy.copy(self)
        clone.counted, clone.load = RoutingCounter(self.experts.count), np.zeros_like(self.load)
        clone._join()
        return clone

    def stats(self) -> ExpertStats:
        """Return the statistics of experts since the last call, over the tokens of all ranks. Collective."""
        (result,) = gather_stats([self.counted], self.ranks.data)
        return result

    def better_placement(self, least: float) -> tuple[ExpertPlacement, float, float]:
        """Return a better placement of experts, and the imbalance of ranks now and with it.

        The plan follows the load since the last call of `stats` or this, over the tokens of all ranks; collective.
        Returns the current placement unless the plan reduces the load of the busiest rank by a factor of at least
        `least`.
        """
        load = [max(share, 0.0) for share in self.stats().load]
        better = plan(load, self.placement)
        before, after = imbalance(load, self.placement), imbalance(load, better)
        return (better if before >= least * after else self.placement), before, after

    def place(self, placement: ExpertPlacement) -> None:
        """Send tokens by another placement from now on, after experts have moved. Collective."""
        self.placement, self.has_moved = placement, True
        self.exchange = dispatcher_over(self.ranks.axis, placement, self._codec)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Compute experts within: errors raised inside are reported to the waiting ranks, which raise them too.

        All ranks can continue with the next call.
        """
        try:
            yield
        except BaseException as error:
            self.leave(f"raised {line(error)}")
            raise

    def leave(self, why: str) -> None:
        """Make all ranks that wait for this rank's experts raise PeerError. Not collective; see `renew_dispatcher`.

        With chunks, ranks wait on the communicator of the expert axis, which this call fails.
        """
        comm = self.ranks.axis.comm
        text = f"{self.name}: experts of rank {comm.rank} of {comm.name} {why}"
        leave(self.ranks.axis, text)
        if self.experts.chunks > 1 and comm.size > 1:
            comm.group.fail(ShutdownError(text))

    def follow(self, original: Mixture) -> None:
        """Take over the placement and dispatcher of the original layer of a copy, after experts of both have moved."""
        self.placement, self.exchange, self.has_moved = original.placement, original.exchange, True

    def name_among(self, names: Collection[str]) -> str:
        """Return the layer's name, or a name derived from it that is not in `names`."""
        return self.name if self.name not in names else f"{self.name} ({len(names)})"

    def take_load(self) -> Array:
        """Return how often tokens of all ranks chose each expert in training since the last call. Collective."""
        load: Array = self.ranks.data.all_reduce(self.load)
        self.load[:] = 0
        return load


def stats_of(mixtures: Iterable[Mixture]) -> dict[str, ExpertStats]:
    """Return the statistics of layers since the last call, by name. Collective, one message for all layers."""
    layers = list(mixtures)
    data = {id(one.ranks.data): one.ranks.data for one in layers}
    result: dict[str, ExpertStats] = {}
    for key, comm in data.items():
        own = [one for one in layers if id(one.ranks.data) == key]
        for one, stats in zip(own, gather_stats([each.counted for each in own], comm), strict=True):
            result[one.name_among(result)] = stats
    return result


def check_has_mixtures(
    verb: str, model: object, kind: type, mixtures: Collection[object], *, whole: bool = True
) -> None:
    """Raise UsageError unless a call of `verb` has a model with mixtures of experts.

    kind: the class of models. whole: whether it is the whole model; a stage of a pipeline may have no mixtures.
    """
    if not isinstance(model, kind):
        raise UsageError(f"{verb}: model must be a {kind.__module__.split('.')[0]} {kind.__name__}, got {model!r:.80}")
    if whole and not mixtures:
        raise UsageError(f"{verb}: {type(model).__name__} has no mixture of experts: add MoE layers, or use expertize")


def check_same_tokens(name: str, tensor: ParallelAxis | None, logits: Array) -> None:
    """Raise MismatchError on all tensor-parallel ranks unless a layer has the same tokens on all of them. Collective.

    A layer's first call compares them, because these ranks shard each expert.

    name: of the layer. logits: the router's output for this rank's tokens.
    """
    if tensor is None or tensor.size == 1:
        return
    comm, number = tensor.comm, len(logits)
    gathered = comm.all_gather(np.array([[number, print_of(logits), float(np.abs(logits).sum())]], np.float64))
    counts, prints, sizes = gathered.T
    if not np.isfinite(gathered).all():
        return
    counts_differ = bool((counts != counts[0]).any())
    if not counts_differ and np.abs(prints - prints[0]).max() <= tolerance_of("float32") * max(sizes.max(), 1e-30):
        return
    here = f"{[int(one) for one in counts]} tokens" if counts_differ else "different tokens"
    raise MismatchError(
        f"{name} on rank {comm.rank} of {comm.name}: ranks along tp have {here}, but need the same tokens, because "
        "they shard each expert. Remove sequence= and Sequence, which split the tokens among ranks, from the plan "
        "of a model with experts; otherwise give these ranks the same batches and one seed"
    )
