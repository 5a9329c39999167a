"""Reference of routing, written from the papers in plain loops: slow, and independent of `commlib.expert.routing`.

Switch (2101.03961): top-1, capacity, the load-balancing loss. GShard (2006.16668): second choices after all first ones,
gates of what a token still has add up to 1. ST-MoE (2202.08906): the z-loss. DeepSeek-V3 (2412.19437): a bias for
choosing alone, limited groups, sigmoid scores, the loss of a sequence. Expert choice (2202.09368).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commlib.expert import Experts

Chosen = dict[tuple[int, int], int]
"""(token, expert): which choice of the token it was, from 0."""


@dataclass
class Selection:
    """Choices, which do not change with small changes of logits. chosen: before dropping. kept: after it."""

    chosen: Chosen = field(default_factory=dict)
    kept: set[tuple[int, int]] = field(default_factory=set)


def scores_of(experts: Experts, logits: Any) -> Any:
    logits = np.asarray(logits, np.float64)
    if experts.scores == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(1, keepdims=True)) if logits.size else logits
    return powers / powers.sum(1, keepdims=True)


def select(experts: Experts, logits: Any, mask: Any = None, bias: Any = None, training: bool = True) -> Selection:
    """Choose and drop, for the tokens of all ranks or of one rank."""
    scores = scores_of(experts, logits).astype(np.float32).astype(np.float64)  # equal where they are in float32
    there = [token for token in range(len(scores)) if mask is None or mask[token]]
    selection = Selection()
    if experts.choice == "expert":
        capacity = experts.capacity(len(there), training=training)
        for expert in range(experts.count):
            for token in sorted(there, key=lambda token: (-scores[token, expert], token))[:capacity]:
                selection.chosen[token, expert] = 0
        selection.kept = set(selection.chosen)
        return selection
    size = experts.count // experts.groups
    for place, token in enumerate(there):
        keys = [scores[token, e] + (0.0 if bias is None else float(bias[e])) for e in range(experts.count)]
        groups = [sorted(keys[g * size : (g + 1) * size], reverse=True) for g in range(experts.groups)]
        best = sorted(range(experts.groups), key=lambda g: (-sum(groups[g][:2]), g))
        allowed = {e for g in best[: experts.max_groups or experts.groups] for e in range(g * size, (g + 1) * size)}
        order = sorted(allowed, key=lambda e: (-keys[e], e))[: experts.top_k]
        if experts.force_balanced:
            order = [(place * experts.top_k + choice) % experts.count for choice in range(experts.top_k)]
        for choice, expert in enumerate(order):
            selection.chosen[token, expert] = choice
    capacity = experts.capacity(len(there), training=training)
    for expert in range(experts.count):
        mine = [(token, choice) for (token, one), choice in selection.chosen.items() if one == expert]
        if experts.drop == "position":
            mine.sort(key=lambda pair: (pair[1], pair[0]))
        else:
            mine.sort(key=lambda pair: (-scores[pair[0], expert], pair[0]))
        selection.kept |= {(token, expert) for token, _ in mine[:capacity]}
    return selection


def gates_of(experts: Experts, logits: Any, kept: set[tuple[int, int]]) -> dict[tuple[int, int], float]:
    scores = scores_of(experts, logits)
    gates = {}
    for token, expert in kept:
        whole = sum(scores[token, other] for one, other in kept if one == token) if experts.normalises else 1.0
        gates[token, expert] = experts.scale * scores[token, expert] / whole
    return gates


def balance_of(experts: Experts, logits: Any, chosen: Chosen, mask: Any, sequence: int) -> float:
    """The loss of all tokens: the mean over sequences, or over all tokens together."""
    scores = scores_of(experts, logits)
    shares = scores / scores.sum(1, keepdims=True) if scores.size else scores
    losses = []
    for tokens in _sequences(experts, scores, mask, sequence):
        loss = 0.0
        for expert in range(experts.count if tokens else 0):
            f = sum((token, expert) in chosen for token in tokens) / len(tokens) / experts.top_k
            loss += experts.count * f * float(np.mean([shares[token, expert] for token in tokens]))
        losses.append(loss)
    return float(np.mean(losses)) if losses else 0.0


def z_of(experts: Experts, logits: Any, mask: Any, sequence: int) -> float:
    rows = np.asarray(logits, np.float64)
    logs = [max(row) + math.log(sum(math.exp(one - max(row)) for one in row)) for row in rows]
    means = [np.mean([logs[token] ** 2 for token in tokens]) if tokens else 0.0
             for tokens in _sequences(experts, rows, mask, sequence)]  # fmt: skip
    return float(np.mean(means)) if means else 0.0


def _sequences(experts: Experts, rows: Any, mask: Any, sequence: int) -> list[list[int]]:
    """The tokens of each sequence that are not masked: a sequence counts, even if all of it is."""
    by_sequence = experts.balance in ("sequence", "none") and sequence
    length = sequence if by_sequence else max(len(rows), 1)
    starts = range(0, len(rows), length)
    return [[t for t in range(start, start + length) if mask is None or mask[t]] for start in starts]


def entropy_of(experts: Experts, logits: Any, mask: Any) -> float:
    scores = scores_of(experts, logits)
    rows = [row / row.sum() for token, row in enumerate(scores) if mask is None or mask[token]]
    return float(np.mean([-sum(p * math.log(p) for p in row if p > 0) for row in rows])) if rows else 0.0
