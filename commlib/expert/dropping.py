"""Capacity: choose the tokens that an expert keeps by position, score or chance, or let experts choose tokens."""

from __future__ import annotations

import hashlib

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.expert.experts import Experts
from commlib.kernels.host.token_routing import drop_late


def generator(seed: int, rank: int, purpose: str) -> np.random.Generator:
    """Return the random generator for one purpose on one rank."""
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4])
    return np.random.Generator(np.random.SFC64([seed & (1 << 63) - 1, rank, word]))


def drop_second(scores: Array, chosen: Array, draw: np.random.Generator) -> None:
    """Drop the second expert of tokens, except with probability 2 * second score / (first + second score)."""
    rows = np.flatnonzero(chosen[:, 1] >= 0)
    first, second = (scores[rows, chosen[rows, place]].astype(np.float64) for place in (0, 1))
    drawn = draw.random(len(chosen))[rows]
    chosen[rows[drawn >= 2 * second / (first + second)], 1] = -1


def drop(
    experts: Experts,
    scores: Array,
    chosen: Array,
    load: Array,
    tokens: int,
    training: bool,
    seed: int,
    comm: Communicator | None,
) -> int:
    """Drop assignments to full experts; return the number dropped. tokens: the number of tokens that are not masked.

    comm: the ranks whose tokens share the capacity, if it is computed over all ranks.
    """
    together = comm if experts.capacity_over == "all" else None
    k = experts.top_k
    if experts.drop == "position":
        before = np.zeros((k, experts.count), np.int64)
        mine = np.stack([np.bincount(column[column >= 0], minlength=experts.count) for column in chosen.T])
        if together is None:
            before[1:] = np.cumsum(mine, 0)[:-1]
        else:
            gathered = together.all_gather(np.array([*mine.reshape(-1), tokens], np.int64)).reshape(together.size, -1)
            tokens = int(gathered[:, -1].sum())
            every = gathered[:, :-1].reshape(together.size, k, experts.count)
            before[1:] = np.cumsum(every.sum(0), 0)[:-1]
            before += every[: together.rank].sum(0)
        capacity = experts.capacity(tokens, training=training)
        return 0 if capacity is None else int(drop_late(chosen, capacity, before))
    rows, columns = np.nonzero(chosen >= 0)
    wanted = chosen[rows, columns]
    if experts.drop == "probability":
        priority = scores[rows, wanted].astype(np.float64)
    else:
        offset = 0
        if together is not None:
            gathered = together.all_gather(np.array([len(chosen), seed], np.int64)).reshape(-1, 2)
            offset, seed = int(gathered[: together.rank, 0].sum()), int(gathered[0, 1])
        priority = _by_chance(seed, (offset + rows) * k + columns)
    if together is None:
        capacity = experts.capacity(tokens, training=training)
        mask = _highest(wanted, priority, capacity)
    else:
        everyone = together.all_gather_object((tokens, wanted, priority))
        capacity = experts.capacity(sum(one[0] for one in everyone), training=training)
        experts_of, priorities = (np.concatenate([one[at] for one in everyone]) for at in (1, 2))
        every = _highest(experts_of, priorities, capacity)
        start = sum(len(one[1]) for one in everyone[: together.rank])
        mask = every[start : start + len(wanted)]
    chosen[rows[~mask], columns[~mask]] = -1
    return int((~mask).sum())


def choose_by_experts(experts: Experts, scores: Array, mask: Array, training: bool, comm: Communicator | None) -> Array:
    """Return the experts that chose each token, [tokens, experts]; -1 for the others."""
    together = comm if experts.capacity_over == "all" else None
    there = mask if len(mask) else np.ones(len(scores), np.bool_)
    own = scores[there]
    every, start = own, 0
    if together is not None:
        gathered = together.all_gather_v(np.ascontiguousarray(own))
        counts = together.all_gather(np.array([len(own)], np.int64))
        every, start = gathered, int(counts[: together.rank].sum())
    capacity = experts.capacity(len(every), training=training)
    assert capacity is not None
    selected = np.zeros((len(every), experts.count), np.bool_)
    for expert in range(experts.count):  # of equal scores, the first ones
        selected[np.argsort(-every[:, expert], kind="stable")[:capacity], expert] = True
    chosen = np.full((len(scores), experts.count), -1, np.int32)
    chosen[there] = np.where(selected[start : start + len(own)], np.arange(experts.count, dtype=np.int32), -1)
    return chosen


def _highest(wanted: Array, priority: Array, capacity: int | None) -> Array:
    """Return which assignments are within the capacity of their expert, by priority; of equal ones, the first."""
    if capacity is None:
        return np.ones(len(wanted), np.bool_)
    order = np.lexsort((np.arange(len(wanted)), -priority, wanted))
    place = np.arange(len(wanted)) - np.searchsorted(wanted[order], wanted[order])
    mask: Array = np.empty(len(wanted), np.bool_)
    mask[order] = place < capacity
    return mask


def _by_chance(seed: int, numbers: Array) -> Array:
    """Return a pseudo-random value for each number, which depends only on the number and the seed (splitmix64)."""
    with np.errstate(over="ignore"):
        state = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Array = (state >> np.uint64(11)).astype(np.float64)
    return result
