"""GradientReducer: reduce the gradients of one set of parameters while backward runs. Every adapter drives it.

    begin | ready(3), ready(2) -> launch bucket 0, ready(1), ... | end: launch the rest, wait for all

Each gradient has a slot in a symmetric bucket, which `BucketOrder` assigns. The adapter reports when a gradient is
ready and copies it to its slot (`Values`). A bucket whose gradients are all ready is launched, and reduced in place
while backward continues. After `end`, gradients are final: clipping, loss scaling or logging need no call into commlib.
Gradients that do not fit into buckets travel by other paths (`UnbucketedGradients`). This module does not depend on a
framework.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from commlib.comparison.parameter_check import check_agreement, check_missing
from commlib.data_parallel.bucket_order import ACTIVE, FLAGS, OTHERS_MISSING, SPARSE_FOUND, BucketOrder
from commlib.data_parallel.bucket_reducer import BucketReducer, MakePlan
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.compressed_plans import CompressedPlans
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer_ranks import BucketCompression, ReducerRanks
from commlib.data_parallel.report import Statistics, StepClock, StepReport
from commlib.data_parallel.resume_point import ResumePoint, agree_on_resume_point
from commlib.data_parallel.shards import Shards
from commlib.data_parallel.tracker import Tracker
from commlib.data_parallel.unbucketed_gradients import UnbucketedGradients
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
        options = self.options
        self.gradients, self._values = tuple(gradients), values
        self.groups = tuple(tuple(group) for group in groups)
        named = [
            f"{gradient}, sparse" if index in sparse else str(gradient) for index, gradient in enumerate(gradients)
        ]
        lines = [wrapper, *options.lines(), f"groups={self.groups}"]
        exact, counts = ([], named) if counted else (named, [])
        check_agreement(ranks, what, [*lines, *exact], counted=counts, remedy=_REMEDY)
        if order is not None:  # ranks may have seen different orders
            order = ranks.all_gather_object(order)[0]
        self._all = range(len(gradients))
        self._active, self._sparse_found, self._others_missing = (
            len(gradients) + flag for flag in (ACTIVE, SPARSE_FOUND, OTHERS_MISSING)
        )
        self._agreed_missing: frozenset[int] = frozenset()
        self._gains = _gains(ranks, options, gradients) if values.accumulates else {}
        self._reduced: set[int] = set()
        """Gradients with a gain that are results of a reduction. If a backward adds to one, it is first divided by its
        gain on each rank. The next reduction then counts the earlier result once."""
        self._absent: list[int] = []
        """Gradients that no rank had in the last reduction."""
        self._late = ""
        """The gradient that made the reduction in progress necessary: it was set after the reduction of its step."""
        self._has_turn = False
        self._gives_up = False
        """The backward in progress raised. Other ranks learn of it where they wait for the end of the backward."""
        self._overlap = ranks.overlap_pays(threads) if options.overlap is None else options.overlap
        self._sync = True
        self._unbucketed = UnbucketedGradients(ranks, options, gradients, values)
        self._unbucketed.restore(sparse)
        devices = sorted({gradient.device for gradient in gradients}, key=lambda name: (name == "cpu", name))
        self._compression = ranks.compression(
            options.scheme,
            within_node=options.within_node,
            count=int(options.bucket_cap_mib * 2**18),
            device=next(iter(devices), "cpu"),
        )
        shapes = [(gradient.name, gradient.shape) for gradient in gradients]
        self._plans = CompressedPlans(ranks.plan, self._compression, shapes)
        self._order = BucketOrder(ranks, options, gradients, groups, self._unbucketed, order)
        self._is_undecided = self._compression.scheme is not None
        """Nothing was reduced so far, so ranks have not yet agreed on whether all of them resume one saved run."""
        self._is_compressing = False
        self._resumed: ResumePoint | None = None
        self._compressed_steps = 0
        buckets = self._order.buckets()
        self.shards = Shards(ranks, buckets) if options.shard else None
        """This rank's parts of the buckets, if gradients are sharded."""
        self._tracker = Tracker([b.parameters for b in buckets], passes_per_step=options.passes_per_step)
        self._engine = self._start_engine(buckets)
        self._clock = StepClock()
        self.report: StepReport | None = None
        """Costs of the last step; None before the first step."""
        _REDUCERS.add(self)

    @property
    def statistics(self) -> Statistics:
        """Totals of the reductions so far, and their cost to the training thread."""
        return self._engine.statistics

    @statistics.setter
    def statistics(self, shared: Statistics) -> None:
        self._engine.statistics = shared

    @property
    def compression(self) -> BucketCompression:
        """The compression of gradients: its choice, the reason for it, and its memory."""
        return self._compression

    @property
    def compression_choice(self) -> str:
        """The compression of gradients, and the reason for its choice."""
        wire = self.options.wire_dtype("float32")
        return self._compression.why if wire == "float32" else f"{wire} on the wire: as requested"

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in launch order. Parameter numbers from `len(gradients)` on are flags."""
        return self._engine.buckets

    @property
    def engine(self) -> BucketReducer:
        """The BucketReducer in use; replaced when the buckets change."""
        return self._engine

    @property
    def sparse(self) -> frozenset[int]:
        """The gradients that all ranks know to be sparse, and that travel as rows."""
        return self._unbucketed.sparse

    @property
    def order_is_settled(self) -> bool:
        """Whether the order of gradients is final, so it no longer changes the buckets."""
        return self._order.is_settled

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
    def overlaps(self) -> bool:
        """Whether buckets are launched while backward runs."""
        return self._overlap

    @property
    def scales_before_adding(self) -> Collection[int]:
        """Gradients for which `before` must be called before a value is added to them."""
        return self._gains.keys()

    @property
    def course(self) -> ResumePoint | None:
        """The point from which a later run resumes compression; None before compression has begun."""
        scheme = self._compression.scheme
        if scheme is None or not self._is_compressing:
            return self._resumed
        order = None if self._order.order is None else tuple(self._order.order)
        return ResumePoint(scheme.name, order, tuple(sorted(self._unbucketed.sparse)), self._compressed_steps)

    def resume(self, course: ResumePoint) -> None:
        """Resume compression of a saved run, if all ranks request the same before the first reduction."""
        if self._is_undecided:
            self._resumed = course

    def take_over(self, before: GradientReducer) -> None:
        """Take over the statistics, steps and residuals of another reducer. Must be called on all ranks."""
        self._engine.statistics = before.statistics
        self._compression.load(before.compression.state())
        self._is_undecided = self._is_undecided and before._is_undecided
        self._clock, self.report = before._clock, before.report
        reduced = {before.gradients[index].name for index in before._reduced}
        self._reduced.update(index for index in self._gains if self.gradients[index].name in reduced)

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
        if self._tracker.begin(sync=self._sync, eager=self._overlap and eager and not self._is_undecided):
            self._values.free()

    def before(self, index: int) -> None:
        """Prepare a gradient for an addition."""
        if index in self._reduced:
            self._reduced.discard(index)
            if self._values.exists(index):
                self._values.scale(index, 1 / self._gains[index])

    def ready(self, index: int) -> None:
        """Mark a gradient as complete, and launch the buckets that are complete. Between `begin` and `end`."""
        if self._unbucketed.is_new(index):
            return  # not ready: its bucket must wait until ranks have agreed on its path
        tracker = self._tracker
        try:
            launches = tracker.ready(index)
        except RuntimeError as error:
            raise UsageError(
                f"the gradient of {self.gradients[index].name} became ready twice in one backward. {self._values.hint}"
            ) from error
        if not tracker.reducing or self._is_undecided:
            return  # it stays in the framework until a reducing pass, or until the buckets are known
        if self._engine.traces.wanted and (full := tracker.completed(index)) is not None and full not in launches:
            self._engine.traces.ready(full)
        started = time.perf_counter()
        self._put(index)
        self.statistics.exposed_seconds += time.perf_counter() - started
        for bucket in launches:
            self._take_turn()
            self._engine.launch(bucket)
            self._values.hide(self._members[bucket])

    def end(self, *, strict: bool | Collection[int] = False) -> None:
        """Finish the backward in progress, if there is one: gradients are final afterwards.

        A gradient that only some ranks lack counts as zeros on those ranks, and they get the result too. Where that is
        impossible, pass `strict`, or a collection of the gradients' numbers: then it raises MismatchError on all ranks.
        """
        if not self._tracker.active:
            return
        if not self._tracker.reducing:
            self._tracker.end()
            return
        seen = self._tracker.order
        self._take_turn()
        if self._is_undecided:
            self._tracker.end()
            self._decide()
            self._tracker.begin_step()
        with self.statistics.exposing():
            missing = [index for index in self._tracker.missing() if index in self._all]
            unused = {index for index in missing if not self._put_old(index)}
            watched = strict if isinstance(strict, Collection) else self._all if strict else ()
            lacking = frozenset(index for index in unused if index in watched)
            if not self._unbucketed.has_found:
                unused.add(self._sparse_found)
            if not self._gives_up and not self._late and lacking == self._agreed_missing:
                unused.add(self._others_missing)
            remaining = self._tracker.end()
            try:
                self._engine.finish(remaining, unused)
                self._compression.end_step()
                if self.shards is not None:
                    self.shards.take(self._engine)
                if self._engine.used(self._others_missing):
                    if not self._check_missing(lacking):
                        return
                    self._agreed_missing = lacking
                take = self._values.take if self.shards is None else self._drop
                for index in self._all:
                    # A gradient that no rank had stays None, as in one process; otherwise every rank takes the result.
                    if self._has_slot[index] and (index not in unused or self._engine.used(index)):
                        take(index)
            finally:
                self._values.forget()
            self._finish_unbucketed(seen)
        self._absent = [index for index in unused if index in self._all and not self._values.exists(index)]
        self._reduced.update(index for index in self._gains if self._values.exists(index))

    def give_up(self) -> None:
        """End the backward in progress, if there is one, after it raised. Its gradients are invalid.

        If it reduces, other ranks may wait for its end. Ranks whose backward has not raised get a MismatchError from
        it.
        """
        if not self._tracker.active:
            return
        if not self._tracker.reducing:
            self._tracker.cleared()
            return
        self._gives_up = True
        try:
            self.end()
        finally:
            self._gives_up = False

    def abandon(self) -> None:
        """Drop the backward in progress, if there is one, when no rank waits for its end any more. Sends nothing.

        Passes count from 0 again, because ranks may have run different numbers of them.
        """
        was_active = self._tracker.active
        if was_active:
            self._tracker.end()
        self._tracker.cleared()
        if not was_active:
            return
        try:
            self._engine.finish(())
        except CommlibError:  # this rank's launched buckets were matched with other calls
            pass
        finally:
            self._values.forget()

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
            self._late = self.gradients[late[0]].name
            try:
                self.reduce()
            finally:
                self._late = ""

    def late(self) -> list[int]:
        """Return the gradients that exist now, but that no rank had in the last reduction."""
        return [index for index in self._absent if self._values.exists(index)]

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
        self._compression.commit()
        self.report = self._clock.step(self.statistics)

    def cleared(self) -> None:
        """Prepare for gradients to be cleared. Gives up a backward whose exception the user caught."""
        self.give_up()
        self._compression.rollback()  # no effect after a step has used the gradients
        self._tracker.cleared()
        self._reduced.clear()

    def gather(self) -> None:
        """Start to gather the parameters that ranks have updated in their `shards`, last bucket first. Collective.

        Backward makes gradients in the order of the buckets, so forward needs parameters in the reverse order.
        """
        assert self.shards is not None, "nothing is sharded"
        self._engine.prefetch(reversed(self.shards.gathers()))

    def gathered(self, index: int) -> Array:
        """Wait until a parameter is gathered; return its elements as a 1-D array, valid until the next gather."""
        assert self.shards is not None, "nothing is sharded"
        self._engine.fetched(len(self.buckets) - 1 - self.shards.bucket_of(index))
        return self.shards.parameter(index)

    def contribute_nothing(self) -> int | None:
        """Take part without gradients in the reductions of the other ranks, until all ranks call this. Collective.

        Gradients and parameters of this rank do not change. Returns how often others reduced, or None if there is
        nothing to reduce, no other rank, or no need to take part.
        """
        if self._tracker.active:
            self.end()
        if self.ranks.size == 1 or not self.buckets or not self.ranks.needs_all_ranks:
            return None
        times = 0
        while self.contribute_nothing_once():
            times += 1
        return times

    def contribute_nothing_once(self) -> bool:
        """Take part without gradients in the next reduction of the others; return whether there was one. Collective."""
        if self.shards is not None:
            raise UsageError(
                "join is impossible with sharded parameters: the other ranks need this rank's part to gather them"
            )
        self._values.detach()
        self._values.free()
        everything = {*self._all, *range(len(self._all), len(self._all) + FLAGS)}
        if self._is_undecided:
            self._decide()
        self._engine.finish(range(len(self.buckets)), everything)
        if self.buckets and not self._engine.used(self._active):
            return False
        if not self.buckets or not self._engine.used(self._others_missing) or self._check_missing(None):
            self._finish_unbucketed((), has_joined=True)
        return True

    # Implementation

    def _take_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            try:
                self.ranks.take_turn()
            except CommlibError:
                self._tracker.end()  # as after a failed reduction, no rank waits for its end
                raise

    def _put(self, index: int) -> None:
        """Copy a gradient to its slot, or prepare it for its reduction outside the buckets."""
        if self._has_slot[index]:
            self._values.put(index)
        else:
            self._unbucketed.prepare(index)

    def _check_missing(self, lacking: frozenset[int] | None) -> bool:
        names = [gradient.name for gradient in self.gradients]
        return check_missing(self.ranks, names, lacking, gave_up=self._gives_up, late=self._late)

    def _drop(self, index: int) -> None:
        """Leave a parameter without a gradient, because this rank has only a part of it."""
        self._values.hide([index])

    def _put_old(self, index: int) -> bool:
        """Put a gradient that earlier passes left; return False if there is none for the buckets."""
        self.before(index)
        if not self._values.exists(index) or self._unbucketed.is_new(index):
            return False
        self._put(index)
        return True

    def _decide(self) -> None:
        """Agree on whether to resume a saved run. Collective, once."""
        self._is_undecided = False
        course = agree_on_resume_point(self.ranks, self._resumed)
        if course is None:
            self._compression.drop_common()
            if self._order.is_settled:
                self._compress()
            return
        self._order.restore(course.order)
        self._unbucketed.restore(course.sparse)
        self._compressed_steps = course.steps
        self._compress()

    def _finish_unbucketed(self, seen: Sequence[int], *, has_joined: bool = False) -> None:
        """Reduce the gradients outside the buckets, and rebuild the buckets if necessary. Collective.

        `seen` lists the gradients of the backward, in order.
        """
        self._compressed_steps += self._is_compressing
        engine = self._engine
        any_found = engine.used(self._sparse_found) if engine.buckets else False
        more = self._unbucketed.finish(engine.used, engine.statistics, any_found=any_found, has_joined=has_joined)
        # Gradients that just left the buckets were not ready in time: the next backward shows a better order.
        if more or self._order.learn(seen, overlap=self._overlap):
            self._rebuild()
        if not self._is_compressing and self._compression.scheme is not None and self._order.is_settled:
            self._compress()

    def _compress(self) -> None:
        self._is_compressing = True
        self._rebuild(anyway=True)

    def _rebuild(self, *, anyway: bool = False) -> None:
        """Rebuild the buckets, if they change. Collective. Raises UsageError on every rank if they are sharded."""
        buckets = self._order.buckets()
        if anyway or buckets != self.buckets:
            if self.shards is not None:
                raise UsageError(
                    "a gradient turned out to be sparse and must leave its bucket, but buckets are sharded: pass "
                    "sparse_as_dense=True"
                )
            statistics = self._engine.statistics
            self._engine = self._start_engine(buckets)
            self._engine.statistics = statistics
            self._tracker.use([bucket.parameters for bucket in buckets])

    def _plan(self) -> MakePlan:
        """Return the function that makes the plans of buckets."""
        if self.shards is not None:
            return self.shards.reduction
        return self._plans.start() if self._is_compressing else self.ranks.plan

    def _start_engine(self, buckets: Sequence[Bucket]) -> BucketReducer:
        engine = BucketReducer(self.ranks.along, buckets, self._plan(), together=self.ranks.together)
        self._has_slot = [index not in self._unbucketed for index in self._all]
        self._members = [[i for i in bucket.parameters if i in self._all and self._has_slot[i]] for bucket in buckets]
        self._values.use(engine, self._members)
        return engine


def abandon_all() -> None:
    """Drop all backwards in progress on this rank, and the passes before them: see `GradientReducer.abandon`.

    No rank may wait for the end of a backward.
    """
    for reducer in list(_REDUCERS):
        reducer.abandon()


def _gains(ranks: ReducerRanks, options: Options, gradients: Sequence[Gradient]) -> dict[int, float]:
    """Return the gains other than 1, by gradient: the factor of a reduction for a value equal on all ranks."""
    if ranks.size == 1:
        return {}
    gains = {}
    for index, gradient in enumerate(gradients):
        gain = gradient.scale * (ranks.along(gradient.axis).size if options.op == "sum" else 1)
        if gain != 1:
            gains[index] = gain
    return gains
