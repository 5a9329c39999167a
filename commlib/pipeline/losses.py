"""Losses: the weight of each microbatch's loss in the loss of its batch, and checks of their sum."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from commlib.errors import UsageError
from commlib.pipeline.batch import shares, shares_in_updates

Weigh = Callable[..., Any] | str | Mapping[str, Callable[..., Any] | str] | None
"""The number of terms in a microbatch's mean loss: a function, "rows", "sum", or None to detect it.

For a loss that is a dict of summands, a dict of these, by name.

A function is called with the microbatch's target, and with its inputs and sample weights if it has parameters of these
names (`inputs`, `sample_weight`), or two or three without defaults.
"""

REMEDY = (
    "pass weigh= to pipeline(): a function of a microbatch's target (and inputs) that returns the number of terms in "
    'the mean of its loss, such as lambda target: (target != -100).sum(); or weigh="sum" if it is a sum. A loss that '
    'mixes rows, such as Dice, has no such number: use microbatches=1, or weigh="rows" to train with the mean of the '
    "microbatches' losses"
)


KEPT_BYTES = 256 << 20
"""Bytes of outputs that are kept at most to check the loss of several microbatches together; two are always kept."""


class MicrobatchWeights(NamedTuple):
    """The weights of microbatches' losses. terms: the number in each mean; for sums, nonzero if there are any terms.

    A microbatch without terms has weight 0, even if its loss is 0/0.
    """

    terms: tuple[float, ...]
    is_sum: bool = False

    def in_batch(self) -> list[float]:
        """Return the weight of each loss in the loss of the batch."""
        return self._ones() if self.is_sum else shares(self.terms)

    def in_updates(self, every: int) -> list[float]:
        """Return the weight of each loss in its update. every: microbatches per update; 0: a single update."""
        return self._ones() if self.is_sum else shares_in_updates(self.terms, every)

    def _ones(self) -> list[float]:
        return [1.0 if count else 0.0 for count in self.terms]


def weights_of(terms: Sequence[float], rows: Sequence[int], *, is_sum: bool = False) -> MicrobatchWeights:
    """Return the weights of losses that are means of `terms` terms; by rows if no microbatch has any, like one process.

    In a batch without rows the first microbatch is the batch, and has the full weight.
    """
    weights = tuple(float(count) if number else 0.0 for count, number in zip(terms, rows, strict=True))
    if not any(weights):
        weights = tuple(map(float, rows)) if any(rows) else (1.0, *(0.0 for _ in rows[1:]))
    return MicrobatchWeights(weights, is_sum)


class Weigher:
    """The option `weigh=`. Raises UsageError for an invalid value."""

    def __init__(self, weigh: Weigh, *, takes_summands: bool = False) -> None:
        self.summands: dict[str, Weigher] = {}
        """The option for each summand, if the loss is a dict of them."""
        if takes_summands and isinstance(weigh, Mapping) and weigh and None not in weigh.values():
            self.summands = {name: Weigher(one) for name, one in weigh.items()}
        elif not (weigh is None or weigh in ("rows", "sum") or callable(weigh)):
            raise UsageError(f'pipeline: weigh is {weigh!r}, expected a function, "rows", "sum" or None')
        self._weigh = weigh
        self.is_set = weigh is not None
        """Whether the user gave the option."""
        self._extra: tuple[str, ...] = ()
        self._named: tuple[str, ...] = ()
        if callable(weigh):
            self._extra, self._named = _extra_arguments(weigh)
        self.wants_inputs: bool = "inputs" in (*self._extra, *self._named) or any(
            one.wants_inputs for one in self.summands.values()
        )
        """Whether it is a function that takes the microbatch's inputs."""

    @property
    def is_checked(self) -> bool:
        """Whether the weights need a check: "rows" and "sum" are trusted."""
        if self.summands:
            return any(one.is_checked for one in self.summands.values())
        return not isinstance(self._weigh, str)

    @property
    def checks_rows(self) -> bool:
        """Whether mixing rows is a fault: always, except with "rows"."""
        if self.summands:
            return any(one.checks_rows for one in self.summands.values())
        return not (isinstance(self._weigh, str) and self._weigh == "rows")

    def weights(
        self, rows: Sequence[int], targets: Sequence[Any], inputs: Sequence[Any], sample_weights: Sequence[Any] = ()
    ) -> MicrobatchWeights:
        """Return the weights of microbatches with `rows` rows each. Raises UsageError for invalid numbers of terms.

        For a dict of summands, each has its own weights, so the losses of microbatches are sums.
        """
        if not callable(self._weigh):
            return weights_of(rows, rows, is_sum=self._weigh == "sum" or bool(self.summands))
        if self.wants_inputs and not inputs:
            raise UsageError("pipeline: weigh= takes inputs, so pass x on the rank of the last stage, too")
        terms = []
        for number, count in enumerate(rows):
            values = {
                "inputs": inputs[number] if inputs else None,
                "sample_weight": sample_weights[number] if sample_weights else None,
            }
            arguments = [values[name] for name in self._extra]
            named = {name: values[name] for name in self._named}
            terms.append(float(self._weigh(targets[number], *arguments, **named)) if count else 0.0)
            if not 0 <= terms[-1] < math.inf:
                raise UsageError(
                    f"pipeline: weigh= returned {terms[-1]} for microbatch {number}, expected a number of terms"
                )
        return weights_of(terms, rows)


def _extra_arguments(weigh: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments that a function takes in addition to the target: positional ones, and keywords."""
    try:
        parameters = inspect.signature(weigh).parameters.values()
    except (TypeError, ValueError):  # implemented in C
        return (), ()
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and (parameter.default is parameter.empty or parameter.name in ("inputs", "sample_weight"))
    ][1:]
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name in ("inputs", "sample_weight")]
    names = [one.name for one in positional if one.name in ("inputs", "sample_weight")]
    if names:
        return (), (*names, *named)
    return ("inputs", "sample_weight")[: len(positional)], tuple(named)


class CheckSchedule:
    """Selects the batches of a kind to check: the first two, the tenth, the hundredth and so on."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}
        self.has_ended = False
        """Whether no more batches are checked."""

    def end(self) -> None:
        """Check no more batches."""
        self.has_ended = True

    def is_due(self, kind: Hashable) -> bool:
        """Count a batch of a kind, and return whether to check it."""
        if self.has_ended:
            return False
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        return number == 2 or str(number).strip("0") == "1"


class Details(NamedTuple):
    """The results of a batch, on every rank.

    losses: of each microbatch; NaN for one without rows. metrics: returned by the loss function in addition to the
    loss, with the same weights. outputs: of the complete batch, if requested, on the rank of the last stage.
    """

    loss: Any
    losses: list[float]
    metrics: Mapping[str, Any]
    outputs: Any = None


def is_close(one: float, other: float, size: float, epsilon: float) -> bool:
    """Return whether two numbers are equal except for rounding. size: of the summands; epsilon: of the dtype."""
    return math.isfinite(one) and abs(one - other) <= max(size, abs(one), abs(other)) * epsilon**0.7


def is_repeatable(loss: float, again: float, epsilon: float) -> bool:
    """Return whether a loss has the same value when it is computed again: it is not random. epsilon: of the dtype."""
    return not math.isfinite(loss) or is_close(again, loss, abs(loss), epsilon)


def fault_in_sum(whole: float, losses: Sequence[float], weights: MicrobatchWeights, epsilon: float, *, by: str) -> str:
    """Return the fault if the losses of microbatches do not sum to the loss of all of them together; "" if they do.

    weights: of these microbatches only. by: how they were weighted, for the message. A `whole` that is not finite
    passes.
    """
    parts = [loss * share for loss, share in zip(losses, weights.in_batch(), strict=True) if share]
    if not math.isfinite(whole) or is_close(sum(parts), whole, sum(map(abs, parts)), epsilon):
        return ""
    hint = ': it is their sum, so pass weigh="sum" to pipeline()'
    if not is_close(sum(losses), whole, sum(map(abs, losses)), epsilon):
        hint = f", so it is not a mean over these: {REMEDY}"
    return (
        f"pipeline: the loss of {len(losses)} microbatches together is {whole:.6g}, but their separate losses sum to "
        f"{sum(parts):.6g}, weighted by {by}{hint}"
    )


def fault_in_terms(terms: Sequence[float], weights: MicrobatchWeights, *, by: str) -> str:
    """Return the fault if the losses of microbatches are means of other numbers of terms than assumed; else ""."""
    if weights.is_sum or not sum(terms):
        return ""
    if all(abs(a - b) <= 1e-6 for a, b in zip(shares(terms), weights.in_batch(), strict=True)):
        return ""
    got = ", ".join(f"{count:g}" for count in terms)
    return f"pipeline: the losses of microbatches are means of {got} terms, but were weighted by {by}: {REMEDY}"
