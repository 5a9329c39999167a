"""Tracker: decide when to reduce each bucket, from the events of training. [pure]

    idle --begin--> backward --ready, ready, ...--> backward --end--> idle --stepped--> idle

A reducing backward launches every bucket exactly once and in index order, whatever the order in which gradients become
ready. Ranks with different autograd graphs therefore launch the same sequence. Whether a backward reduces depends only
on counts (`no_sync`, passes per step), never on this rank's graph.
"""

from __future__ import annotations

from collections.abc import Sequence


class Tracker:
    """Tracks the gradients of one training loop on one rank.

    `buckets[b]` lists the parameters (numbered from 0) of bucket b; every parameter is in exactly one bucket.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], *, passes_per_step: int = 1) -> None:
        if passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes_per_step}")
        self._active = False
        self.use(buckets)
        self.passes_per_step = passes_per_step
        self._passes = 0
        """Backward passes since the last reduction, without those under `no_sync`."""
        self._local = False
        """Some accumulated gradients were not reduced yet."""
        self._reduced = False
        """Whether there was a reduction since the last step."""
        self.accumulated: set[int] = set()
        """The parameters of passes since the last reduction."""
        self._reducing = False
        self._eager = True
        self._ready: dict[int, None] = {}  # a set that keeps its order
        self._unready: list[int] = []
        self._next = 0

    @property
    def active(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._active

    @property
    def reducing(self) -> bool:
        """Whether the backward in progress reduces gradients."""
        return self._reducing

    @property
    def must_reduce(self) -> bool:
        """Whether a step taken now would use gradients that were not reduced.

        Also True without any backward: a rank that had no loss must join the reduction of the others.
        """
        return self._local or not self._reduced

    @property
    def order(self) -> list[int]:
        """The parameters whose gradients became ready in the current or else the last backward, in order."""
        return list(self._ready)

    def use(self, buckets: Sequence[Sequence[int]]) -> None:
        """Switch to other buckets of the same parameters. Raises RuntimeError if a backward is in progress."""
        if self._active:
            raise RuntimeError("the buckets cannot change while a backward is in progress")
        self._members = tuple(tuple(bucket) for bucket in buckets)
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._members) for parameter in bucket}
        if len(self._bucket_of) != sum(len(bucket) for bucket in self._members):
            raise ValueError("a parameter may be in one bucket only")

    def begin(self, *, sync: bool = True, eager: bool = True) -> bool:
        """Start a backward; return whether it reduces.

        `sync` is False under `no_sync`. With `eager` False all launches wait for `end`. Raises RuntimeError if a
        backward is in progress.
        """
        if self._active:
            raise RuntimeError("a backward is already in progress")
        self._passes += sync
        self._start(reducing=sync and self._passes >= self.passes_per_step, eager=eager)
        return self._reducing

    def begin_step(self) -> None:
        """Start a reduction outside a backward, because a step `must_reduce`."""
        if self._active:
            raise RuntimeError("a backward is already in progress")
        self._start(reducing=True, eager=False)

    def ready(self, parameter: int) -> range:
        """Mark the gradient of `parameter` as complete; return the buckets to launch now, in order.

        Raises RuntimeError outside a backward, or if the parameter was already ready in this one.
        """
        if not self._active:
            raise RuntimeError("a gradient became ready outside a backward")
        if parameter in self._ready:
            raise RuntimeError("a gradient became ready twice in one backward")
        self._ready[parameter] = None
        if not self._reducing:
            return range(0)
        self._unready[self._bucket_of[parameter]] -= 1
        start = self._next
        if self._eager:
            while self._next < len(self._unready) and not self._unready[self._next]:
                self._next += 1
        return range(start, self._next)

    def completed(self, parameter: int) -> int | None:
        """Return the bucket of a gradient that has just become ready if it completed the bucket, else None."""
        bucket = self._bucket_of[parameter]
        return None if self._unready[bucket] else bucket

    def missing(self) -> list[int]:
        """Return the parameters whose gradients are not ready, in launch order."""
        return [parameter for bucket in self._members for parameter in bucket if parameter not in self._ready]

    def end(self) -> range:
        """End the backward; return the buckets still to launch, in order."""
        if not self._active:
            raise RuntimeError("no backward is in progress")
        remaining = range(self._next, len(self._members)) if self._reducing else range(0)
        if self._reducing:
            self._passes, self._local, self._reduced = 0, False, True
            self.accumulated.clear()
        else:
            self._local = True
            self.accumulated.update(self._ready)
        self._active = self._reducing = False
        return remaining

    def stepped(self) -> None:
        """Record that the optimizer stepped: the next step needs new gradients."""
        self._reduced = False

    def cleared(self) -> None:
        """Record that gradients were cleared: accumulated gradients are dropped, and passes count from 0.

        A backward that raised is dropped too, unless it reduces: then the other ranks wait for its end.
        """
        self._active = self._reducing
        self._passes, self._local, self._reduced = 0, False, False
        self.accumulated.clear()

    def _start(self, *, reducing: bool, eager: bool) -> None:
        self._active, self._reducing, self._eager = True, reducing, eager
        self._ready.clear()
        self._unready = [len(bucket) for bucket in self._members]
        self._next = 0
