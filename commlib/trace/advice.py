"""Advice: rules that derive suggestions from the figures of a summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdviceRule:
    """Give `text` if the figure `measure` is at least `least`, and `other` at most `most`. Shares are 0 to 1."""

    measure: str
    least: float
    text: str
    other: str = ""
    most: float = 1.0


RULES = (
    AdviceRule(
        "worst_share",
        0.7,
        "rank {worst} keeps the others waiting: it causes {worst_share:.0%} of the time that ranks lose to late ranks. "
        "Check its input pipeline, its node (frequency, other processes) and its share of the work",
        "lost_share_is_small",
        0,
    ),
    AdviceRule(
        "lost_share",
        0.1,
        "ranks lose {lost_share:.0%} of their time to late ranks, and not always to the same one: "
        "give all ranks equal work in each batch (sequence lengths, shuffling), and prefetch data",
        "worst_share",
        0.7,
    ),
    AdviceRule(
        "moving_share",
        0.1,
        "threads are idle {moving_share:.0%} of the time while data moves: overlap it (DistributedOptimizer with "
        "overlap, *_async), send less (compression=\"auto\", float16), or find the slow part with commlib bench",
    ),
    AdviceRule(
        "small_share",
        0.3,
        "{small_share:.0%} of the time in which collectives move data goes to arrays of 4 KiB or less: reduce several "
        "together (larger buckets, one array), or call plan_* once for memory that is used repeatedly",
        "exposed_share_is_small",
        0,
    ),
    AdviceRule(
        "codec_share",
        0.3,
        "encoding and decoding take {codec_share:.0%} of the communication time: try a cheaper codec (float16, "
        "int8), or none on a fast network: compression=\"auto\" measures it",
    ),
    AdviceRule(
        "queue_share",
        0.2,
        "operations wait {queue_share:.0%} of their time in the queue behind others of their group: use several groups "
        "for independent operations, or launch the less urgent ones later",
        "lost_share",
        0.05,
    ),
    AdviceRule(
        "agreeing_share",
        0.3,
        "named operations wait {agreeing_share:.0%} of their time until all ranks have requested them: request them "
        "in the order in which they become ready, or use calls without names, which need no negotiation",
    ),
    AdviceRule(
        "stages_share",
        0.2,
        "pipeline stages wait {stages_share:.0%} of their time for messages: use more microbatches, another "
        "schedule (commlib show pipeline compares them), or more balanced stages (split=\"auto\")",
    ),
    AdviceRule(
        "imbalance",
        2.0,
        "the busiest expert of {busiest} gets {imbalance:.1f} times the mean: raise the auxiliary loss, set a capacity "
        "factor, or let ct.rebalance_experts move experts",
    ),
)  # fmt: skip


def advise(figures: Mapping[str, float | int | str]) -> list[str]:
    """Return the suggestions, in the order of the rules."""
    found = []
    for rule in RULES:
        value = figures.get(rule.measure, 0)
        if isinstance(value, str) or value < rule.least:
            continue
        other = figures.get(rule.other, 0) if rule.other else 0
        if not isinstance(other, str) and other <= rule.most:
            found.append(rule.text.format_map(figures))
    return found
