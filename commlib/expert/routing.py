"""Routing: experts of each token from the logits of the router, and the gradient of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert import dropping
from commlib.expert.experts import Experts
from commlib.kernels.host.token_routing import SIGMOID, SOFTMAX, assign, choose, gradient

_NO_MASK, _NO_BIAS = np.zeros(0, np.bool_), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of one rank's tokens. An assignment is a token and one of its experts.

    tokens: the token of each assignment, int32 [n], by expert, then by token. gates: float32 [n]. counts: of each
    expert, int64 [experts]. starts, slots: the assignments of token t are slots[starts[t] : starts[t + 1]], int32, in
    the order of their experts. load: how often each expert was chosen, before dropping, int64 [experts]. dropped:
    number of dropped assignments. entropy: mean entropy of tokens' scores, in nats. balance, z: the losses, not
    weighted.

    balance is experts / top_k * sum over experts of f P: f is how often an expert was chosen per token, before
    dropping, and P its mean share in the scores; 1 if both are even. z is the mean over tokens of the square of the
    logarithm of the sum of exponentials. Masked tokens do not count. "sequence": each loss is the mean over sequences
    with equal weights, however many tokens are masked; a sequence without tokens has 0. "global": losses use all ranks'
    tokens; the mean over ranks is the loss of all tokens. Rows that are no sequences use "global", too.
    """

    tokens: Array
    gates: Array
    counts: Array
    starts: Array
    slots: Array
    load: Array
    dropped: int
    entropy: float
    balance: float
    z: float
    saved: _SavedValues

    def gradient(self, of_gates: Array, of_balance: float, of_z: float) -> Array:
        """Return the gradient of the logits, float32 [tokens, experts], from those of gates (float32 [n]) and losses.

        Choices, drops and counts are treated as constants.
        """
        saved = self.saved
        out = np.empty_like(saved.scores)
        experts_of = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)
        # An infinite loss gives an infinite gradient, which loss scalers look for.
        with np.errstate(over="ignore", invalid="ignore"):
            of_shares, of_weights = saved.of_shares * of_balance, of_z * saved.weights
        gradient(
            saved.clean,
            saved.scores,
            saved.mask,
            saved.kind,
            experts_of,
            self.starts,
            self.slots,
            saved.sums,
            saved.normalises,
            saved.scale,
            of_gates,
            of_shares,
            saved.length,
            of_weights,
            out,
        )
        return out


@dataclass(frozen=True, slots=True)
class _SavedValues:
    """Values saved for the gradient.

    of_shares: gradient of each share in scores, for a gradient of 1 of the balance loss, [sequences, experts]. weights:
    weight of a token of each sequence in the losses.
    """

    clean: Array
    scores: Array
    mask: Array
    kind: int
    sums: Array
    normalises: bool
    scale: float
    of_shares: Array
    length: int
    weights: Array


def route(
    experts: Experts,
    logits: Array,
    *,
    training: bool,
    seed: int = 0,
    bias: Array | None = None,
    mask: Array | None = None,
    sequence: int = 0,
    comm: Communicator | None = None,
) -> Routing:
    """Return the routing of tokens, from their logits, float32 [tokens, experts].

    seed: determines all random choices, together with the rank. bias: added to scores for choosing, float32 [experts].
    mask: False for tokens without experts, bool [tokens]. sequence: number of consecutive tokens of each sequence; 0:
    rows are no sequences, and losses of sequences use all ranks' tokens instead. comm: the ranks whose tokens share the
    capacity of experts, if it is over all ranks, and count in the global loss. Collective if options require it. Raises
    UsageError for other shapes.
    """
    tokens = len(logits)
    if logits.ndim != 2 or logits.shape[1] != experts.count:
        raise UsageError(f"route: logits of shape {list(logits.shape)}, expected [tokens, {experts.count}]")
    if logits.dtype != np.float32 or (mask is not None and (mask.shape != (tokens,) or mask.dtype != np.bool_)):
        got = "" if mask is None else f" and a mask {mask.dtype}{list(mask.shape)}"
        raise UsageError(f"route: logits of {logits.dtype}{got}, expected float32, and for a mask bool[{tokens}]")
    length = max(sequence or tokens, 1)
    if tokens % length:
        raise UsageError(f"route: {tokens} tokens cannot be split into sequences of {length}")
    comm = None if comm is None or comm.size == 1 else comm
    rank = 0 if comm is None else comm.rank
    clean = logits
    if training and experts.noise:
        noise = dropping.generator(seed, rank, "noise").standard_normal(logits.shape, np.float32)
        logits = logits + np.float32(experts.noise) * noise
    given = _NO_MASK if mask is None else mask
    sequences = max(tokens // length, 1)
    k = experts.top_k
    scores, chosen = np.empty(logits.shape, np.float32), np.empty((tokens, k), np.int32)
    chosen_in, shares = np.empty((sequences, experts.count), np.int64), np.empty((sequences, experts.count))
    lengths, sums_of = np.empty(sequences, np.int64), np.empty((sequences, 2))
    choose(
        logits,
        clean,
        clean is not logits,
        given,
        SIGMOID if experts.scores == "sigmoid" else SOFTMAX,
        _NO_BIAS if bias is None else bias,
        experts.groups,
        experts.max_groups or experts.groups,
        rank * tokens * k % experts.count if experts.force_balanced else -1,  # as if one rank had all tokens
        length,
        scores,
        chosen,
        chosen_in,
        shares,
        lengths,
        sums_of,
    )
    if experts.choice == "expert":
        chosen = dropping.choose_by_experts(experts, scores, given, training, comm)
        chosen_in = _count_choices(chosen, length, sequences, experts.count)
    elif training and experts.second == "random":
        dropping.drop_second(scores, chosen, dropping.generator(seed, rank, "second"))
        chosen_in = _count_choices(chosen, length, sequences, experts.count)
    load = chosen_in.sum(0)
    dropped = 0
    if experts.choice == "token" and (experts.capacity_factor or experts.eval_capacity_factor):
        dropped = dropping.drop(experts, scores, chosen, load, int(lengths.sum()), training, seed, comm)
    number = int(load.sum()) - dropped
    block = np.empty(2 * number + tokens + 1, np.int32)
    assigned, starts, slots = block[:number], block[number : number + tokens + 1], block[number + tokens + 1 :]
    gates, counts, sums = np.empty(number, np.float32), np.empty(experts.count, np.int64), np.empty(tokens)
    assign(scores, chosen, experts.normalises, experts.scale, assigned, gates, counts, starts, slots, sums)
    balance, of_shares, weights = _balance(
        experts, chosen_in, shares, lengths, bool(sequence), comm if training else None
    )
    entropy, z = float(sums_of[:, 0].sum()) / max(int(lengths.sum()), 1), float(weights @ sums_of[:, 1])
    saved = _SavedValues(
        clean,
        scores,
        given,
        SIGMOID if experts.scores == "sigmoid" else SOFTMAX,
        sums,
        experts.normalises,
        experts.scale,
        of_shares,
        length,
        weights,
    )
    return Routing(assigned, gates, counts, starts, slots, load, dropped, entropy, balance, z, saved)


def update_bias(experts: Experts, bias: Array, load: Array) -> Array:
    """Return the bias after a step with this load: experts below the mean get more, the others less."""
    result: Array = (bias + experts.bias_rate * np.sign(load.mean() - load)).astype(np.float32)
    return result


def _balance(
    experts: Experts, chosen: Array, shares: Array, lengths: Array, are_sequences: bool, comm: Communicator | None
) -> tuple[float, Array, Array]:
    """Return the loss, the gradient of each token's share, and the weight of a token in losses, by sequence.

    chosen: counts of choices, [sequences, experts]. shares: sums over tokens, [sequences, experts]. lengths: in tokens.
    """
    over = experts.balance
    if over in ("sequence", "none"):
        over = "sequence" if are_sequences else "global"
    if over == "sequence":
        each = np.maximum(lengths, 1)[:, None]
        weights = 1 / (each[:, 0] * len(lengths))
        often = chosen / each
    else:
        counts, tokens, ranks = chosen.sum(0), int(lengths.sum()), 1
        if over == "global" and comm is not None and experts.has_losses:
            totals: Any = comm.all_reduce(np.array([*counts, tokens], np.int64))
            counts, tokens, ranks = totals[:-1], int(totals[-1]), comm.size
        weights = np.full(len(lengths), ranks / max(tokens, 1))
        often = counts / max(tokens, 1)
    if experts.balance == "none":
        return 0.0, np.zeros(shares.shape), weights
    of_shares = experts.count / experts.top_k * often * weights[:, None]
    return float((of_shares * shares).sum()), np.ascontiguousarray(of_shares, np.float64), weights


def _count_choices(chosen: Array, length: int, sequences: int, experts: int) -> Array:
    counts = np.zeros((sequences, experts), np.int64)
    rows, columns = np.nonzero(chosen >= 0)
    np.add.at(counts, (rows // length, chosen[rows, columns]), 1)
    return counts
