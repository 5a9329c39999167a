"""GradientReducer: reduce the gradients of one set of parameters while backward runs. Every adapter drives it.

    begin | ready(3), ready(2) -> launch bucket 0, ready(1), ... | end: launch the rest, wait for all

Each gradient has a slot in a symmetric bucket (`GradientBuckets`). The adapter reports when a gradient is ready and
copies it to its slot (`Values`). A bucket whose gradients are all ready is launched, and reduced in place while
backward continues; how it is reduced is a `BucketReduction`. After `end`, gradients are final: clipping, loss scaling
or logging need no call into commlib. Gradients that do not fit into buckets travel by other paths
(`UnbucketedGradients`). This module does not depend on a framework.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from commlib.comparison.parameter_check import check_agreement
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.bucket_reduction import BucketReduction
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.compressed_reduction import CompressionWarmup
from commlib.data_parallel.gradient_buckets import GradientBuckets
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer_ranks import BucketCompression, ReducerRanks
from commlib.data_parallel.report import Statistics, StepClock, StepReport
from commlib.data_parallel.resume_point import ResumePoint
from commlib.data_parallel.sharded_reduction import ShardedReduction
from commlib.data_parallel.shards import Shards
from commlib.data_parallel.tracker import Tracker
from commlib.data_parallel.values import Values
from commlib.dtypes import Array
from commlib.errors import CommlibError, UsageError

_REDUCERS: weakref.WeakSet[GradientReducer] = weakref.WeakSet()

_REMEDY = "a weight that is frozen on one rank must be frozen on all ranks when the optimizer is made"


class GradientReducer:
    """Reduces `gradients`, given in module order, over `ranks` in every backward. Construction is collective.

    `values` accesses the framework's gradients. `groups` lists the numbers of gradients that share a bucket, `sparse`
    those known to be sparse, `order` all numbers in the order in which gradients become ready, if known. `threads` is
    the number of training threads of this rank. `what` names the gradients in errors, `wrapper` the user's object.
    `counted`: names may be numbered from different starts on the ranks. Raises MismatchError on every rank if ranks
    hold different gradients, UsageError for invalid bucket caps.
    """

    def __init__(
        self,
        ranks: ReducerRanks,
        gradients: Sequence[Gradient],
        values: Values,
        options: Options,
        *,
        groups: Sequence[Sequence[int]] = (),
        sparse: Sequence[int] = (),
        order: Sequence[int] | None = None,
        threads: int = 1,
        what: str = "data-parallel parameters",
        wrapper: str = "",
        counted: bool = False,
    ) -> None:
        self.ranks, self.options = ranks, options.for_ranks_of(ranks)
        options, self.gradients, self._values = self.options, tuple(gradients), values
        self.groups = tuple(tuple(group) for group in groups)
        settings = [wrapper, *options.lines(), f"groups={self.groups}"]
        named = [f"{one}, sparse" if index in sparse else str(one) for index, one in enumerate(gradients)]
        exact, counts = ([], named) if counted else (named, [])
        check_agreement(ranks, what, [*settings, *exact], counted=counts, remedy=_REMEDY)
        overlap = ranks.overlap_pays(threads) if options.overlap is None else options.overlap
        self.compression = _make_compression(ranks, options, gradients)
        """The compression of gradients: its choice, the reason for it, and its memory."""
        self._tracker = Tracker((), passes_per_step=options.passes_per_step)
        reduction = _choose_reduction(ranks, options, gradients, self.compression)
        self._buckets = GradientBuckets(
            ranks, options, gradients, values, self._tracker, reduction,
            groups=groups, sparse=sparse, order=order, overlap=overlap,
        )  # fmt: skip
        self._has_turn, self._sync = False, True
        self._clock = StepClock()
        self.report: StepReport | None = None
        """Costs of the last step; None before the first step."""
        _REDUCERS.add(self)

    @property
    def statistics(self) -> Statistics:
        """Totals of the reductions so far, and their cost to the training thread."""
        return self._buckets.engine.statistics

    @statistics.setter
    def statistics(self, shared: Statistics) -> None:
        self._buckets.engine.statistics = shared

    @property
    def compression_choice(self) -> str:
        """The compression of gradients, and the reason for its choice."""
        wire = self.options.wire_dtype("float32")
        return self.compression.why if wire == "float32" else f"{wire} on the wire: as requested"

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in launch order. Parameter numbers from `len(gradients)` on are flags."""
        return self._buckets.engine.buckets

    @property
    def engine(self) -> BucketReducer:
        """The BucketReducer in use; replaced when the buckets change."""
        return self._buckets.engine

    @property
    def shards(self) -> Shards:
        """This rank's parts of the buckets. Raises UsageError if gradients are not sharded."""
        return self._buckets.reduction.shards

    @property
    def sparse(self) -> frozenset[int]:
        """The gradients that all ranks know to be sparse, and that travel as rows."""
        return self._buckets.unbucketed.sparse

    @property
    def order_is_settled(self) -> bool:
        """Whether the order of gradients is final, so it no longer changes the buckets."""
        return self._buckets.order.is_settled

    @property
    def active(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._tracker.active

    @property
    def syncs(self) -> bool:
        """Whether the next backward reduces: False within `no_sync`."""
        return self._sync

    @property
    def accumulated(self) -> Collection[int]:
        """Gradients that backward passes made, or added to, since the last reduction."""
        return self._tracker.accumulated

    @property
    def scales_before_adding(self) -> Collection[int]:
        """Gradients for which `before` must be called before a value is added to them."""
        return self._buckets.gains.factors.keys()

    @property
    def resume_point(self) -> ResumePoint | None:
        """The point from which a later run resumes compression; None before compression has begun."""
        return self._buckets.resume_point()

    def resume(self, point: ResumePoint) -> None:
        """Resume compression of a saved run, if all ranks request the same before the first reduction."""
        self._buckets.reduction.resume(point)

    def take_over(self, before: GradientReducer) -> None:
        """Take over the statistics, steps and residuals of another reducer. Must be called on all ranks."""
        self.statistics = before.statistics
        self.compression.load(before.compression.state())
        self._buckets.reduction.take_over(before._buckets.reduction)
        self._clock, self.report = before._clock, before.report
        reduced, gains = {before.gradients[index].name for index in before._buckets.gains.results}, self._buckets.gains
        gains.results.update(index for index in gains.factors if self.gradients[index].name in reduced)

    # Events of a training step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward passes within the context accumulate gradients on this rank only."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def set_passes_per_step(self, passes: int) -> None:
        """Make every `passes`-th backward reduce from now on. Must be called on all ranks."""
        self.options = replace(self.options, passes_per_step=passes)
        self._tracker.passes_per_step = passes

    def begin(self, *, eager: bool = True) -> None:
        """Start a backward. `eager`: buckets may be launched before it ends."""
        self._has_turn = False
        buckets = self._buckets
        if self._tracker.begin(sync=self._sync, eager=eager and buckets.overlap and buckets.reduction.may_launch):
            self._values.free()

    def before(self, index: int) -> None:
        """Prepare a gradient for an addition."""
        gains = self._buckets.gains
        if index in gains.results:
            gains.divide(index)

    def ready(self, index: int) -> None:
        """Mark a gradient as complete, and launch the buckets that are complete. Between `begin` and `end`."""
        buckets, tracker = self._buckets, self._tracker
        if buckets.unbucketed.is_new(index):
            return  # not ready: its bucket must wait until ranks have agreed on its path
        try:
            launches = tracker.ready(index)
        except RuntimeError as error:
            raise UsageError(
                f"the gradient of {self.gradients[index].name} became ready twice in one backward. {self._values.hint}"
            ) from error
        if not tracker.reducing or not buckets.reduction.may_launch:
            return  # it stays in the framework until a reducing pass, or until the buckets are known
        engine = buckets.engine
        if engine.traces.wanted and (full := tracker.completed(index)) is not None and full not in launches:
            engine.traces.ready(full)
        started = time.perf_counter()
        buckets.put(index)
        engine.statistics.exposed_seconds += time.perf_counter() - started
        for bucket in launches:
            self._take_turn()
            engine.launch(bucket)
            self._values.hide(buckets.members[bucket])

    def end(self, *, strict: bool | Collection[int] = False) -> None:
        """Finish the backward in progress, if there is one: gradients are final afterwards.

        A gradient that only some ranks lack counts as zeros on those ranks, and they get the result too. Where that is
        impossible, pass `strict`, or a collection of the gradients' numbers: then it raises MismatchError on all ranks.
        """
        tracker = self._tracker
        if not tracker.active:
            return
        if not tracker.reducing:
            tracker.end()
            return
        self._take_turn()
        self._buckets.reduce(strict)

    def give_up(self) -> None:
        """End the backward in progress, if there is one, after it raised. Its gradients are invalid.

        If it reduces, other ranks wait for its end. Those whose backward has not raised get a MismatchError from it.
        """
        if not self._tracker.active:
            return
        if not self._tracker.reducing:
            self._tracker.cleared()
            return
        self._buckets.missing.gives_up = True
        try:
            self.end()
        finally:
            self._buckets.missing.gives_up = False

    def abandon(self) -> None:
        """Drop the backward in progress, if there is one, when no rank waits for its end any more. Sends nothing.

        Passes count from 0 again, because ranks may have run different numbers of them.
        """
        was_active = self._tracker.active
        if was_active:
            self._tracker.end()
        self._tracker.cleared()
        if was_active:
            self._buckets.drop()

    def synchronize(self) -> None:
        """Reduce gradients now if the next step needs it; do nothing after a backward that reduced.

        A rank that ran no backward, because it had no loss, joins the reduction of the others here. If gradients were
        set by hand after those of the backward were reduced, all gradients are reduced again. Raises MismatchError on
        all ranks if only some ranks set them.
        """
        if self._tracker.active:  # the user caught an error of a backward; the other ranks wait for this one
            self.end()
        if self._tracker.must_reduce:
            self.reduce()
        elif late := self.late():
            self._buckets.missing.late_name = self.gradients[late[0]].name
            try:
                self.reduce()
            finally:
                self._buckets.missing.late_name = ""

    def late(self) -> list[int]:
        """Return the gradients that exist now, but that no rank had in the last reduction."""
        return self._buckets.missing.late()

    def reduce(self) -> None:
        """Reduce gradients now, even if no step needs it. Collective."""
        if self.ranks.size > 1:
            self._has_turn = False
            self._tracker.begin_step()
            self._values.free()
            self.end()

    def combine(self, value: float | None) -> float | None:
        """Return the mean (or sum) over ranks of a number, such as a loss; None if no rank has one. Collective."""
        values = [theirs for theirs in self.ranks.all_gather_object(value) if theirs is not None]
        return sum(values) / (self.ranks.size if self.options.op == "mean" else 1) if values else None

    def stepped(self) -> None:
        """Record that an optimizer stepped."""
        self._tracker.stepped()
        self._buckets.reduction.commit()
        self.report = self._clock.step(self.statistics)

    def cleared(self) -> None:
        """Prepare for gradients to be cleared. Gives up a backward whose exception the user caught."""
        self.give_up()
        self._buckets.reduction.rollback()  # no effect after a step has used the gradients
        self._tracker.cleared()
        self._buckets.gains.results.clear()

    def gather(self) -> None:
        """Start to gather the parameters that ranks have updated in their `shards`. Collective."""
        self.shards.gather(self.engine)

    def gathered(self, index: int) -> Array:
        """Wait until a parameter is gathered; return its elements: a 1-D view that the next gather overwrites."""
        return self.shards.gathered(index, self.engine)

    def contribute_nothing(self) -> int | None:
        """Take part without gradients in the reductions of the other ranks, until all ranks call this. Collective.

        Gradients and parameters of this rank do not change. Returns how often others reduced, or None if there is
        nothing to reduce, no other rank, or no need to take part.
        """
        if self._tracker.active:
            self.end()
        return self._buckets.contribute_nothing()

    def contribute_nothing_once(self) -> bool:
        """Take part without gradients in the next reduction of the others; return whether there was one. Collective."""
        return self._buckets.contribute_nothing_once()

    def _take_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            try:
                self.ranks.take_turn()
            except CommlibError:
                self._tracker.end()  # as after a failed reduction, no rank waits for its end
                raise


def abandon_all() -> None:
    """Drop all backwards in progress on this rank, and the passes before them: see `GradientReducer.abandon`.

    No rank may wait for the end of a backward.
    """
    for reducer in list(_REDUCERS):
        reducer.abandon()


def _make_compression(ranks: ReducerRanks, options: Options, gradients: Sequence[Gradient]) -> BucketCompression:
    """Return the compression of buckets on the device of most of them. Collective."""
    devices = sorted({gradient.device for gradient in gradients}, key=lambda name: (name == "cpu", name))
    return ranks.compression(
        options.scheme,
        within_node=options.within_node,
        count=int(options.bucket_cap_mib * 2**18),
        device=next(iter(devices), "cpu"),
    )


def _choose_reduction(
    ranks: ReducerRanks, options: Options, gradients: Sequence[Gradient], compression: BucketCompression
) -> BucketReduction:
    """Return the reduction that the options request, for the first step."""
    if options.shard:
        return ShardedReduction(ranks, options.shard_axis)
    if compression.scheme is not None:
        return CompressionWarmup(ranks, compression, gradients)
    return BucketReduction(ranks)
