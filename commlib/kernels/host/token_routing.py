"""Routers: compute scores, the experts of each token, and gates from logits, and the gradient of the logits.

Sums are taken in float64. A token whose logits are NaN goes to arbitrary experts, with NaN gates.
"""

from __future__ import annotations

import math
from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compilation import kernel

SOFTMAX, SIGMOID = 0, 1


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _softmax(row: Any, into: Any) -> tuple[float, float]:
    """Write the softmax of a row; return the logarithm of the sum of exponentials, and the entropy."""
    highest = row[0]
    for e in range(1, len(row)):
        highest = max(highest, row[e])
    total = of_exponents = 0.0
    for e in range(len(row)):
        exponent = np.float64(row[e]) - highest
        value = math.exp(exponent)
        into[e] = value
        total += value
        if value != 0:  # -inf contributes nothing
            of_exponents += value * exponent
    for e in range(len(row)):
        into[e] = into[e] / total
    log_total = math.log(total)
    return highest + log_total, log_total - of_exponents / total


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _limit_groups(keys: Any, groups: int, allowed: int, best: Any) -> None:
    """Lower the keys of all groups except the best ones below all other keys."""
    size = len(keys) // groups
    for group in range(groups):
        first = second = -math.inf
        for e in range(group * size, (group + 1) * size):
            if keys[e] > first:
                first, second = keys[e], first
            elif keys[e] > second:
                second = keys[e]
        best[group] = first + second if size > 1 else first
    for _ in range(groups - allowed):
        worst = -1
        for group in range(groups - 1, -1, -1):  # among equals, the last one is removed
            if not math.isnan(best[group]) and (worst < 0 or best[group] < best[worst]):
                worst = group
        if worst < 0:
            return
        best[worst] = math.nan
        for e in range(worst * size, (worst + 1) * size):
            keys[e] = -math.inf


@kernel(nogil=True)
def choose(
    logits: Any,
    clean: Any,
    noisy: bool,
    mask: Any,
    kind: int,
    bias: Any,
    groups: int,
    allowed: int,
    balanced: int,
    length: int,
    scores: Any,
    chosen: Any,
    counts: Any,
    means: Any,
    tokens: Any,
    sums: Any,
) -> None:
    """Write scores [tokens, experts] and the experts of each token [tokens, k], -1 for none.

    clean: logits without noise; noisy: logits with noise, if they differ. balanced: the first expert of a round-robin
    assignment, or -1. mask, bias: empty for none. length: of a sequence. counts, means: how often each expert was
    chosen, and the sum of its share in scores, [sequences, experts]. tokens: number in each sequence. sums: of entropy,
    and of squares of the logarithm of the sum of exponentials, [sequences, 2].
    """
    experts, k = logits.shape[1], chosen.shape[1]
    wide, keys, best = np.empty(experts), np.empty(experts), np.empty(groups)
    sums[:] = 0
    counts[:] = 0
    means[:] = 0
    tokens[:] = 0
    place = balanced
    for t in range(len(logits)):
        if len(mask) > 0 and not mask[t]:
            scores[t, :] = 0
            chosen[t, :] = -1
            continue
        sequence = t // length
        tokens[sequence] += 1
        log_sum, entropy = _softmax(clean[t], wide)
        sums[sequence, 1] += log_sum * log_sum
        if kind == SIGMOID:
            total = entropy = 0.0
            for e in range(experts):
                scores[t, e] = 1 / (1 + math.exp(-np.float64(logits[t, e])))
                total += scores[t, e]
            for e in range(experts):
                wide[e] = scores[t, e] / total if total > 0 else 1 / experts
                if wide[e] > 0:
                    entropy -= wide[e] * math.log(wide[e])
        else:
            if noisy:
                _, entropy = _softmax(logits[t], wide)
            for e in range(experts):
                scores[t, e] = wide[e]
        sums[sequence, 0] += entropy
        for e in range(experts):
            means[sequence, e] += wide[e]
            keys[e] = scores[t, e] + bias[e] if len(bias) > 0 else scores[t, e]
        if allowed < groups:
            _limit_groups(keys, groups, allowed, best)
        for j in range(k):
            expert = -1
            if balanced >= 0:
                expert = (place + j) % experts
            else:
                for e in range(experts):
                    is_new = True
                    for i in range(j):
                        is_new = is_new and chosen[t, i] != e
                    if is_new and (expert < 0 or keys[e] > keys[expert]):
                        expert = e
            chosen[t, j] = expert
            counts[sequence, expert] += 1
        place += k


@kernel(nogil=True)
def drop_late(chosen: Any, capacity: int, before: Any) -> int:
    """Drop assignments beyond the capacity of experts: first choices have priority. Return the number of dropped ones.

    before: number of assignments before those of this rank, [choices, experts].
    """
    tokens, k = chosen.shape
    counts = np.zeros(before.shape[1], np.int64)
    dropped = 0
    for j in range(k):
        counts[:] = 0
        for t in range(tokens):
            expert = chosen[t, j]
            if expert >= 0:
                if before[j, expert] + counts[expert] >= capacity:
                    chosen[t, j] = -1
                    dropped += 1
                counts[expert] += 1
    return dropped


@kernel(nogil=True)
def assign(
    scores: Any,
    chosen: Any,
    normalises: bool,
    scale: float,
    tokens: Any,
    gates: Any,
    counts: Any,
    starts: Any,
    slots: Any,
    sums: Any,
) -> int:
    """Write the assignments, by expert and then by token, and those of each token; return their number.

    sums: for each token, the sum of its scores of its experts.
    """
    experts, k = scores.shape[1], chosen.shape[1]
    counts[:] = 0
    for t in range(len(chosen)):
        for j in range(k):
            if chosen[t, j] >= 0:
                counts[chosen[t, j]] += 1
    ends = np.empty(experts, np.int64)
    at = 0
    for e in range(experts):
        ends[e] = at
        at += counts[e]
    own = np.empty(k, np.int64)
    starts[0] = 0
    for t in range(len(chosen)):
        number = 0
        total = 0.0
        for j in range(k):
            expert = chosen[t, j]
            if expert < 0:
                continue
            total += scores[t, expert]
            i = number
            while i > 0 and own[i - 1] > expert:
                own[i] = own[i - 1]
                i -= 1
            own[i] = expert
            number += 1
        sums[t] = total
        for i in range(number):
            expert = own[i]
            slot = ends[expert]
            ends[expert] += 1
            tokens[slot] = t
            over = total if normalises else 1.0
            gates[slot] = scale * scores[t, expert] / over if over != 0 else 0.0  # 0 if all scores underflowed
            slots[starts[t] + i] = slot
        starts[t + 1] = starts[t] + number
    return at


@kernel(nogil=True)
def gradient(
    clean: Any,
    scores: Any,
    mask: Any,
    kind: int,
    experts_of: Any,
    starts: Any,
    slots: Any,
    sums: Any,
    normalises: bool,
    scale: float,
    of_gates: Any,
    of_shares: Any,
    length: int,
    of_log_sums: Any,
    out: Any,
) -> None:
    """Write the gradient of the logits.

    experts_of: the expert of each assignment. of_shares: the gradient of each expert's share in the scores of a token,
    [sequences, experts]. of_log_sums: the gradient of a token's squared logarithm of the sum of exponentials,
    [sequences].
    """
    experts = scores.shape[1]
    of_scores, shares, wide = np.empty(experts), np.empty(experts), np.empty(experts)
    for t in range(len(scores)):
        if len(mask) > 0 and not mask[t]:
            out[t, :] = 0
            continue
        of_scores[:] = 0
        first, last = starts[t], starts[t + 1]
        inner = 0.0
        if normalises:
            for i in range(first, last):
                slot = slots[i]
                inner += np.float64(of_gates[slot]) * scores[t, experts_of[slot]]
            inner = inner / sums[t] if sums[t] != 0 else 0.0
        for i in range(first, last):
            slot = slots[i]
            over = sums[t] if normalises else 1.0
            of_scores[experts_of[slot]] += scale * (of_gates[slot] - inner) / over if over != 0 else 0.0
        sequence = t // length
        if kind == SIGMOID:
            total = inner = 0.0
            for e in range(experts):
                total += scores[t, e]
            for e in range(experts):
                shares[e] = scores[t, e] / total if total > 0 else 0.0
                inner += shares[e] * of_shares[sequence, e]
            for e in range(experts):
                score = np.float64(scores[t, e])
                value = of_scores[e] + ((of_shares[sequence, e] - inner) / total if total > 0 else 0.0)
                out[t, e] = value * score * (1 - score)
        else:
            inner = 0.0
            for e in range(experts):
                of_scores[e] += of_shares[sequence, e]
                inner += of_scores[e] * scores[t, e]
            for e in range(experts):
                out[t, e] = scores[t, e] * (of_scores[e] - inner)
        if of_log_sums[sequence] != 0:
            log_sum, _ = _softmax(clean[t], wide)
            for e in range(experts):
                out[t, e] += of_log_sums[sequence] * 2 * log_sum * wide[e]
