"""Advice: rules that derive suggestions from the figures of a summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_OF_A_STEP = 0.02
"""Smaller shares of a step get no advice: following it would gain nothing that a measurement shows."""

Figures = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class AdviceRule:
    """Give `text` if the figure `measure` is at least `least`, and `other` at most `most`. Shares are 0 to 1.

    about: its subject, in one or two words. gain: the figure with the subject's share of a step, at least
    LEAST_OF_A_STEP.
    """

    about: str
    measure: str
    least: float
    gain: str
    text: str
    other: str = ""
    most: float = 1.0


RULES = (
    AdviceRule(
        "late ranks",
        "worst_share",
        0.7,
        "lost_share",
        "rank {worst} keeps the others waiting: it causes {worst_share:.0%} of the time that ranks lose to late ranks. "
        "Check its input pipeline, its node (frequency, other processes) and its share of the work",
    ),
    AdviceRule(
        "late ranks",
        "lost_share",
        0.1,
        "lost_share",
        "ranks lose {lost_share:.0%} of their time to late ranks, and not always to the same one: "
        "give all ranks equal work in each batch (sequence lengths, shuffling), and prefetch data",
        "worst_share",
        0.7,
    ),
    AdviceRule(
        "data that moves",
        "moving_share",
        0.1,
        "moving_share",
        "threads are idle {moving_share:.0%} of the time while data moves: overlap it (DistributedOptimizer with "
        "overlap, *_async), send less (compression=\"auto\", float16), or find the slow part with commlib bench",
    ),
    AdviceRule(
        "small arrays",
        "small_share",
        0.3,
        "small_of_step",
        "{small_share:.0%} of the time in which collectives move data goes to arrays of 4 KiB or less: reduce several "
        "together (larger buckets, one array), or call plan_* once for memory that is used repeatedly",
    ),
    AdviceRule(
        "encoding",
        "codec_share",
        0.3,
        "codec_of_step",
        "encoding and decoding take {codec_share:.0%} of the communication time: try a cheaper codec (float16, "
        "int8), or none on a fast network: compression=\"auto\" measures it",
    ),
    AdviceRule(
        "queues",
        "queue_share",
        0.2,
        "queue_of_step",
        "operations wait {queue_share:.0%} of their time in the queue behind others of their group: use several groups "
        "for independent operations, or launch the less urgent ones later",
        "lost_share",
        0.05,
    ),
    AdviceRule(
        "negotiation",
        "agreeing_share",
        0.3,
        "agreeing_of_step",
        "named operations wait {agreeing_share:.0%} of their time until all ranks have requested them: request them "
        "in the order in which they become ready, or use calls without names, which need no negotiation",
    ),
    AdviceRule(
        "pipeline stages",
        "stages_share",
        0.2,
        "stages_share",
        "pipeline stages wait {stages_share:.0%} of their time for messages: use more microbatches, another "
        "schedule (commlib show pipeline compares them), or more balanced stages (split=\"auto\")",
    ),
    AdviceRule(
        "experts",
        "imbalance",
        2.0,
        "exposed_share",  # ranks wait for the rank of the busiest expert
        "the busiest expert of {busiest} gets {imbalance:.1f} times the mean: raise the auxiliary loss, set a capacity "
        "factor, or let ct.rebalance_experts move experts",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Advice:
    """texts: the suggestions, the largest share of a step first.

    small: subjects below LEAST_OF_A_STEP, with their shares.
    """

    texts: list[str]
    small: list[str]


def advise(figures: Figures) -> Advice:
    """Return the suggestions of all rules that apply."""
    lines: list[tuple[float, str]] = []
    small: dict[str, float] = {}
    for rule in RULES:
        if _number(figures, rule.measure) < rule.least or (rule.other and _number(figures, rule.other) > rule.most):
            continue
        share = _number(figures, rule.gain)
        if share < LEAST_OF_A_STEP:
            small.setdefault(rule.about, share)
        else:
            lines.append((share, f"{rule.text.format_map(figures)} ({share:.0%} of a step)"))
    lines.sort(key=lambda pair: -pair[0])
    return Advice([text for _, text in lines], [f"{about} ({share:.1%})" for about, share in small.items()])


def _number(figures: Figures, name: str) -> float:
    value = figures.get(name, 0)
    return 0.0 if isinstance(value, str) else value
