"""Tasks of the GPU benchmark: bytes moved, inputs and expected results of each verb.

The numbers are those of `commlib.bench.numbers`: integers that combine exactly in every dtype, so an element is either
right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.gpu_contenders import VerbTask
from benchmarks.gpu_machine import Call, Machine
from commlib.bench import numbers
from commlib.bench.verbs import VERBS
from commlib.dtypes import NUMPY, Array

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_v")

Blocks = list[tuple[int, Array]]
"""Lengths, and the period of the numbers in each."""


@dataclass(frozen=True, slots=True)
class VerbJob:
    """One verb at one size: `nbytes` is the full buffer, as in nccl-tests. counts: of all-to-alls."""

    verb: str
    dtype: str
    ranks: int
    nbytes: int
    count: int
    counts: Sequence[Sequence[int]]

    @classmethod
    def of(cls, verb: str, dtype: str, nbytes: int, ranks: int) -> VerbJob:
        """Return the job with the largest buffer of at most `nbytes`.

        In all_to_all_v rank r sends 1 + (r + t) % P shares to rank t: uneven, with equal totals.
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
        """The number of elements that a rank sends, and that it receives."""
        part = self.count // self.ranks
        return {"all_gather": (part, self.count), "reduce_scatter": (self.count, part)}.get(
            self.verb, (self.count, self.count)
        )

    def task(self, machine: Machine, x: Any, out: Any) -> VerbTask:
        """Return the verb on the beginnings of two memories; all_reduce is in place."""
        given, got = self.lengths
        first = machine.view(x, given, self.dtype)
        return VerbTask(
            self.verb, self.dtype, first,
            first if self.verb == "all_reduce" else machine.view(out, got, self.dtype), self.counts,
        )  # fmt: skip

    def moved(self) -> int:
        """Return the least number of bytes that all ranks together read and write: see `commlib.bench.verbs`."""
        verb = VERBS[self.verb.removesuffix("_v")]
        read, written, _ = verb.bound(self.nbytes, self.ranks, in_place=self.verb == "all_reduce")
        return self.ranks * (read + written)

    def factor(self) -> Fraction:
        """Return busbw / algbw."""
        return VERBS[self.verb.removesuffix("_v")].factor(self.ranks)

    def given(self, rank: int) -> Array:
        """Return a rank's input."""
        dtype, ranks, part = self.dtype, self.ranks, self.count // self.ranks
        if self.verb == "all_reduce":
            return _written([(self.count, numbers.reduction_input(dtype, "sum", rank, ranks))])
        if self.verb == "reduce_scatter":
            return _written(
                [(part, numbers.reduction_input(dtype, "sum", rank, ranks, block)) for block in range(ranks)]
            )
        if self.verb == "all_gather":
            return _written([(part, numbers.exchange_input(dtype, rank, 0))])
        return _written([(self.counts[rank][to], numbers.exchange_input(dtype, rank, to)) for to in range(ranks)])

    def wanted(self, rank: int) -> Array:
        """Return a rank's expected result."""
        dtype, ranks, part = self.dtype, self.ranks, self.count // self.ranks
        if self.verb == "all_reduce":
            return _written([(self.count, numbers.reduction_result(dtype, "sum", ranks))])
        if self.verb == "reduce_scatter":
            return _written([(part, numbers.reduction_result(dtype, "sum", ranks, rank))])
        if self.verb == "all_gather":
            return _written([(part, numbers.exchange_input(dtype, source, 0)) for source in range(ranks)])
        return _written(
            [(self.counts[source][rank], numbers.exchange_input(dtype, source, rank)) for source in range(ranks)]
        )


def _written(blocks: Blocks) -> Array:
    """Return arrays in which numbers repeat with their period, one after another."""
    whole = np.empty(sum(length for length, _ in blocks), blocks[0][1].dtype)
    start = 0
    for length, period in blocks:
        block = whole[start : start + length]
        done = min(length, len(period))
        block[:done] = period[:done]
        while done < length:  # a multiple of the period, so the next part starts a new period
            more = min(done, length - done)
            block[done : done + more] = block[:more]
            done += more
        start += length
    return whole


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one rank: input and expected result of a job, to count wrong elements after a contender's call."""

    given: Array
    wanted: Any

    @classmethod
    def of(cls, job: VerbJob, rank: int) -> Check:
        return cls(job.given(rank), _bits(job.wanted(rank)))

    def wrong(self, machine: Machine, world: Any, task: VerbTask, call: Call, finish: Call) -> int:
        """Return the number of wrong elements in the results of one call, over all ranks. Collective."""
        machine.put(task.out, ~self.wanted)
        machine.put(task.x, self.given)
        world.Barrier()  # peers that still fill their arrays must not overwrite data written by a contender
        call()
        finish()
        found = _bits(machine.fetch(task.out))
        return int(world.allreduce(int(np.count_nonzero(found != self.wanted))))


def _bits(array: Array) -> Any:
    return array.view(f"u{array.itemsize}")
