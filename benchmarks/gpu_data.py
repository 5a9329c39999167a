"""Tasks of the benchmark of GPUs: what each verb moves, what ranks give, and what they must get.

The numbers are those of `commlib.bench.numbers`: whole ones that combine exactly in every dtype, so that an element is
right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.gpu_contenders import Task
from benchmarks.gpu_machine import Call, Machine
from commlib.bench import numbers
from commlib.bench.verbs import VERBS
from commlib.dtypes import NUMPY, Array

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_v")

Blocks = list[tuple[int, Array]]
"""Lengths, and the period of the numbers in each."""


@dataclass(frozen=True, slots=True)
class Job:
    """One verb at one size: `nbytes` is the whole buffer, as nccl-tests counts it. counts: of exchanges."""

    verb: str
    dtype: str
    ranks: int
    nbytes: int
    count: int
    counts: Sequence[Sequence[int]]

    @classmethod
    def of(cls, verb: str, dtype: str, nbytes: int, ranks: int) -> Job:
        """Return the job whose buffer comes nearest to `nbytes` from below.

        In all_to_all_v rank r gives 1 + (r + t) % P shares to rank t: uneven, and the same for all in total.
        """
        item = NUMPY[dtype].itemsize
        shares = ranks * (ranks + 1) // 2 if verb == "all_to_all_v" else ranks
        unit = max(1, nbytes // item // shares)
        weights = [
            [1 + (rank + to) % ranks if verb == "all_to_all_v" else 1 for to in range(ranks)] for rank in range(ranks)
        ]
        counts = [[unit * weight for weight in row] for row in weights]
        return cls(verb, dtype, ranks, unit * shares * item, unit * shares, counts)

    @property
    def lengths(self) -> tuple[int, int]:
        """How many elements a rank gives and gets."""
        part = self.count // self.ranks
        return {"all_gather": (part, self.count), "reduce_scatter": (self.count, part)}.get(
            self.verb, (self.count, self.count)
        )

    def task(self, machine: Machine, x: Any, out: Any) -> Task:
        """Return the verb on the beginnings of two memories; all_reduce is in place."""
        given, got = self.lengths
        first = machine.view(x, given, self.dtype)
        return Task(
            self.verb, self.dtype, first,
            first if self.verb == "all_reduce" else machine.view(out, got, self.dtype), self.counts,
        )  # fmt: skip

    def moved(self) -> int:
        """Return how many bytes all ranks together must read and write at least: see `commlib.bench.verbs`."""
        verb = VERBS[self.verb.removesuffix("_v")]
        read, written, _ = verb.bound(self.nbytes, self.ranks, in_place=self.verb == "all_reduce")
        return self.ranks * (read + written)

    def factor(self) -> Fraction:
        """Return busbw / algbw."""
        return VERBS[self.verb.removesuffix("_v")].factor(self.ranks)

    def given(self, rank: int) -> Array:
        """Return what a rank gives."""
        dtype, ranks, part = self.dtype, self.ranks, self.count // self.ranks
        if self.verb == "all_reduce":
            return _written([(self.count, numbers.given(dtype, "sum", rank, ranks))])
        if self.verb == "reduce_scatter":
            return _written([(part, numbers.given(dtype, "sum", rank, ranks, block)) for block in range(ranks)])
        if self.verb == "all_gather":
            return _written([(part, numbers.moved(dtype, rank, 0))])
        return _written([(self.counts[rank][to], numbers.moved(dtype, rank, to)) for to in range(ranks)])

    def wanted(self, rank: int) -> Array:
        """Return what a rank must get."""
        dtype, ranks, part = self.dtype, self.ranks, self.count // self.ranks
        if self.verb == "all_reduce":
            return _written([(self.count, numbers.combined(dtype, "sum", ranks))])
        if self.verb == "reduce_scatter":
            return _written([(part, numbers.combined(dtype, "sum", ranks, rank))])
        if self.verb == "all_gather":
            return _written([(part, numbers.moved(dtype, source, 0)) for source in range(ranks)])
        return _written([(self.counts[source][rank], numbers.moved(dtype, source, rank)) for source in range(ranks)])


def _written(blocks: Blocks) -> Array:
    """Return arrays in which numbers repeat with their period, one after another."""
    whole = np.empty(sum(length for length, _ in blocks), blocks[0][1].dtype)
    start = 0
    for length, period in blocks:
        block = whole[start : start + length]
        done = min(length, len(period))
        block[:done] = period[:done]
        while done < length:  # a multiple of the period, so what follows begins it anew
            more = min(done, length - done)
            block[done : done + more] = block[:more]
            done += more
        start += length
    return whole


@dataclass(frozen=True, slots=True)
class Check:
    """What one rank gives and must get in a job, to see after a call of each contender how much is wrong."""

    given: Array
    wanted: Any

    @classmethod
    def of(cls, job: Job, rank: int) -> Check:
        return cls(job.given(rank), _bits(job.wanted(rank)))

    def wrong(self, machine: Machine, world: Any, task: Task, call: Call, finish: Call) -> int:
        """Return how many elements of the result of one call are wrong, over all ranks. Collective."""
        machine.put(task.out, ~self.wanted)
        machine.put(task.x, self.given)
        world.Barrier()  # whoever writes to its peers must not be overwritten by what they still fill in
        call()
        finish()
        found = _bits(machine.fetch(task.out))
        return int(world.allreduce(int(np.count_nonzero(found != self.wanted))))


def _bits(array: Array) -> Any:
    return array.view(f"u{array.itemsize}")
