"""Mixture: one layer's experts on one rank, without a framework: where tokens go, and what is told of that."""

from __future__ import annotations

import numpy as np

from commlib.compress.registry import codec_of
from commlib.dtypes import Array
from commlib.expert.experts import Experts
from commlib.expert.placement import Placement
from commlib.expert.ranks import ExpertRanks
from commlib.expert.routing import Routing, route
from commlib.expert.ways import exchange_over


class Mixture:
    """The experts of a layer over the ranks of their axis. Collective to make.

    name: the layer's, for errors.
    """

    def __init__(self, name: str, experts: Experts, ranks: ExpertRanks) -> None:
        self.name, self.experts, self.ranks = name, experts, ranks
        self.placement = Placement.even(experts.count, ranks.axis.size)
        codec = None if experts.codec is None else codec_of(experts.codec)
        self.exchange = exchange_over(ranks.axis, self.placement, codec)
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
    ) -> Routing:
        """Return where the tokens of this rank go: see `commlib.expert.routing.route`. Collective where options say so."""
        found = route(
            self.experts,
            logits,
            training=training,
            seed=seed,
            bias=bias,
            mask=mask,
            sequence=sequence,
            comm=self.ranks.axis.comm,
            data=self.ranks.data,
        )
        if training:
            self.load += found.load
        return found

    def take_load(self) -> Array:
        """Return how often experts were chosen in training since the last time, by tokens of all ranks. Collective."""
        load: Array = self.ranks.data.all_reduce(self.load)
        self.load[:] = 0
        return load
