"""Batch losses: keep the losses of a batch's microbatches, and their weights in the loss of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commlib.errors import UsageError
from commlib.pipeline.losses import MicrobatchWeights, weights_of
from commlib_torch.pipelines._loss_calls import Count


@dataclass(slots=True)
class Losses:
    """The losses of a batch's microbatches, on the rank of the last stage.

    rows: of each microbatch. weights: their weights in the batch; unknown until the first loss, unless the user gives
    them.
    """

    rows: Sequence[int]
    targets: Sequence[Any]
    every: int
    weights: MicrobatchWeights | None = None
    values: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    calls: dict[int, list[Count | None]] = field(default_factory=dict)
    """The terms of torch's losses that were called, if their weights are uncertain."""
    in_model: dict[int, list[Count | None]] = field(default_factory=dict)
    """The same for losses called by the last stage."""
    sums: list[Tensor] = field(default_factory=list)
    """Calls of torch's losses with reduction="sum" in the first microbatch of the last stage."""
    summands: dict[str, MicrobatchWeights] = field(default_factory=dict)
    """The weights of each summand, for a loss that is a dict of summands."""
    of_summands: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Their values by microbatch."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """The outputs of the first microbatches, if they are compared."""
    looks: bool = False
    is_single: bool = field(init=False)
    """Whether at most one microbatch has rows: its loss is the batch's."""

    _shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_single = sum(map(bool, self.rows)) < 2

    @property
    def shares(self) -> list[float]:
        """The weight of each loss in its update, once there is a loss."""
        if not self._shares and self.weights is not None:
            self._shares = self.weights.in_updates(self.every)
        return self._shares

    def mean(self, values: Mapping[int, Any]) -> Any:
        """Return the mean of values of microbatches, weighted like their losses; 0 for no values."""
        return self._weighted(values, self.weights)

    def mean_metric(self, values: Mapping[int, Any]) -> Any:
        """Return the mean of a metric, weighted like the losses; if losses have summands, by rows."""
        return self._weighted(values, weights_of(self.rows, self.rows) if self.summands else self.weights)

    def _weighted(self, values: Mapping[int, Any], weights: MicrobatchWeights | None) -> Any:
        counts = weights.in_batch() if weights is not None else []
        return sum(value * counts[number] for number, value in sorted(values.items()) if counts[number])

    def add_summands(self, microbatch: int, loss: Any) -> Tensor:
        """Note a microbatch's summands; return their weighted sum."""
        if not isinstance(loss, Mapping) or set(loss) != set(self.summands):
            kind = f"a dict of {', '.join(map(str, loss))}" if isinstance(loss, Mapping) else type(loss).__name__
            expected = f"a dict of {', '.join(self.summands)}" if self.summands else "nothing of summands"
            raise UsageError(
                f"pipeline: the loss is {kind}, but weigh= says {expected}: pass a dict of their terms, such as "
                'weigh={"words": lambda target: (target != -100).sum(), "penalty": "rows"}'
            )
        parts: list[Tensor] = []
        for name, value in loss.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise UsageError(f"pipeline: summand {name} of the loss is not a tensor with one element")
            self.of_summands.setdefault(name, {})[microbatch] = value.detach()
            if share := self.summands[name].in_updates(self.every)[microbatch]:  # otherwise it may be 0/0
                parts.append(value.reshape(()) * share)
        return torch.stack(parts).sum() if parts else torch.zeros(())

    def total_of_summands(self, microbatch: int) -> Tensor:
        """Return the contribution of a microbatch's summands to the loss of the batch."""
        shares = {name: weights.in_batch()[microbatch] for name, weights in self.summands.items()}
        parts = [values[microbatch].reshape(()) * shares[n] for n, values in self.of_summands.items() if shares[n]]
        return torch.stack(parts).sum() if parts else torch.zeros(())
