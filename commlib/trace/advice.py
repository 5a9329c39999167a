"""Advice: what to try, by rules over the figures of a summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Say `text` where the figure `measure` is at least `least`, and `other` at most `most`. Shares are 0 to 1."""

    measure: str
    least: float
    text: str
    other: str = ""
    most: float = 1.0


RULES = (
    Rule(
        "worst_share",
        0.7,
        "rank {worst} keeps the others waiting: of the time that ranks lose for each other {worst_share:.0%} is lost "
        "for it. Look at its input pipeline, its node (frequency, other processes) and its share of the work",
        "lost_share_is_small",
        0,
    ),
    Rule(
        "lost_share",
        0.1,
        "ranks lose {lost_share:.0%} of their time waiting for one that comes later, and not always for the same: "
        "give all the same work, batch by batch (lengths of sequences, shuffling), and let data be loaded ahead",
        "worst_share",
        0.7,
    ),
    Rule(
        "moving_share",
        0.1,
        "programs stand still {moving_share:.0%} of the time while data moves: overlap it (DistributedOptimizer with "
        "overlap, *_async), send less (compression=\"auto\", float16), or find what is slow by commlib bench",
    ),
    Rule(
        "small_share",
        0.3,
        "{small_share:.0%} of the time in which collectives move data goes to arrays of 4 KiB or less: reduce several "
        "together (larger buckets, one array), or call plan_* once for the same memory again and again",
        "exposed_share_is_small",
        0,
    ),
    Rule(
        "codec_share",
        0.3,
        "encoding and decoding take {codec_share:.0%} of the time of communication: try a cheaper codec (float16, "
        "int8), or none within a fast network: compression=\"auto\" measures it",
    ),
    Rule(
        "queue_share",
        0.2,
        "operations wait {queue_share:.0%} of their time in the queue behind others of their group: use several groups "
        "for what is independent, or launch later what is needed later",
        "lost_share",
        0.05,
    ),
    Rule(
        "agreeing_share",
        0.3,
        "named operations spend {agreeing_share:.0%} of their time until all ranks have asked for them: ask for them "
        "in the order in which they become ready, or use calls without names, which need no agreement",
    ),
    Rule(
        "stages_share",
        0.2,
        "stages of the pipeline wait {stages_share:.0%} of their time for messages: take more microbatches, another "
        "schedule (commlib show pipeline compares them), or stages of more equal cost (split=\"auto\")",
    ),
    Rule(
        "imbalance",
        2.0,
        "the busiest expert of {busiest} gets {imbalance:.1f} times the mean: raise the auxiliary loss, set a capacity "
        "factor, or let ct.rebalance_experts move experts",
    ),
)  # fmt: skip


def advise(figures: Mapping[str, float | int | str]) -> list[str]:
    """Return what to try, the first rule first."""
    found = []
    for rule in RULES:
        value = figures.get(rule.measure, 0)
        if isinstance(value, str) or value < rule.least:
            continue
        other = figures.get(rule.other, 0) if rule.other else 0
        if not isinstance(other, str) and other <= rule.most:
            found.append(rule.text.format_map(figures))
    return found
