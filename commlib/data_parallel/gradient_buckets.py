"""GradientBuckets: the buckets in use, with the gradients in them, their reduction, and their replacement by others.

put(index), ... | reduce(remaining, unused) | take(unused) | finish(seen): others from now on, if ranks agree on them
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from commlib.data_parallel.bucket_order import BucketOrder, Flags
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.bucket_reduction import BucketReduction
from commlib.data_parallel.gains import Gains
from commlib.data_parallel.missing_gradients import MissingGradients
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.data_parallel.report import Statistics
from commlib.data_parallel.resume_point import ResumePoint
from commlib.data_parallel.tracker import Tracker
from commlib.data_parallel.unbucketed_gradients import UnbucketedGradients
from commlib.data_parallel.values import Values
from commlib.errors import CommlibError


class GradientBuckets:
    """The buckets of `gradients` and their reduction, the same on all ranks. Construction is collective.

    `tracker` gets new buckets. groups, sparse, order: see `GradientReducer`. overlap: this rank launches buckets while
    backward runs.
    """

    def __init__(
        self,
        ranks: ReducerRanks,
        options: Options,
        gradients: Sequence[Gradient],
        values: Values,
        tracker: Tracker,
        reduction: BucketReduction,
        *,
        groups: Sequence[Sequence[int]],
        sparse: Sequence[int],
        order: Sequence[int] | None,
        overlap: bool,
    ) -> None:
        self._ranks, self._values, self._tracker, self.overlap = ranks, values, tracker, overlap
        self.flags = Flags.after(len(gradients))
        self.unbucketed = UnbucketedGradients(ranks, options, gradients, values)
        self.unbucketed.restore(sparse)
        if order is not None:  # ranks may have seen different orders
            order = ranks.all_gather_object(order)[0]
        self.order = BucketOrder(ranks, options, gradients, groups, self.unbucketed, order)
        self.reduction = reduction
        """How the buckets are reduced."""
        self.gains = Gains(ranks, options, gradients, values)
        self.missing = MissingGradients(ranks, gradients, values)
        self._count = len(gradients)
        self._start(Statistics())

    def put(self, index: int) -> None:
        """Copy a gradient to its slot, or prepare it for its reduction outside the buckets."""
        if self._has_slot[index]:
            self._values.put(index)
        else:
            self.unbucketed.prepare(index)

    def reduce(self, strict: bool | Collection[int]) -> None:
        """Reduce all gradients of the backward in progress, which ends. Collective. See `GradientReducer.end`."""
        tracker, missing, flags = self._tracker, self.missing, self.flags
        seen = tracker.order
        if not self.reduction.may_launch:
            tracker.end()
            self._agree()
            tracker.begin_step()
        with self.engine.statistics.exposing():
            unused = {index for index in tracker.missing() if index < self._count and not self._put_old(index)}
            objects = missing.objects(unused, strict)
            remaining = tracker.end()
            unset = set(unused)
            if not self.unbucketed.has_found:
                unset.add(flags.sparse_found)
            if not objects:
                unset.add(flags.others_missing)
            try:
                self.engine.finish(remaining, unset)
                self.reduction.end(self.engine)
                if self.engine.buckets and self.engine.used(flags.others_missing) and not missing.check():
                    return
                # A gradient that no rank had stays None, as in one process; otherwise every rank takes the result.
                used = self.engine.used
                slots = enumerate(self._has_slot)
                results = [index for index, there in slots if there and (index not in unused or used(index))]
                self.reduction.take(self._values, results)
            finally:
                self._values.forget()
            self._finish(seen)
        missing.note_absent(unused)
        self.gains.note_results()

    def resume_point(self) -> ResumePoint | None:
        """Return the point from which a later run resumes."""
        return self.reduction.resume_point(self.order, self.unbucketed)

    def drop(self) -> None:
        """Wait for the launched buckets, and drop them."""
        try:
            self.engine.finish(())
        except CommlibError:  # this rank's launched buckets were matched with other calls
            pass
        finally:
            self._values.forget()

    def contribute_nothing(self) -> int | None:
        """Take part without gradients in all reductions of the others; return their number, None if there is no need.

        Collective.
        """
        ranks = self._ranks
        if ranks.size == 1 or not self.engine.buckets or not ranks.needs_all_ranks:
            return None
        times = 0
        while self.contribute_nothing_once():
            times += 1
        return times

    def contribute_nothing_once(self) -> bool:
        """Take part without gradients in the next reduction of the others; return whether there was one. Collective."""
        self.reduction.check_join()
        self._values.detach()
        self._values.free()
        self._agree()
        engine, flags = self.engine, self.flags
        engine.finish(range(len(engine.buckets)), range(self._count + len(flags)))
        if engine.buckets and not engine.used(flags.active):
            return False
        self.reduction.end(engine)
        if not engine.buckets or not engine.used(flags.others_missing) or self.missing.check(has_joined=True):
            self._finish((), has_joined=True)
        return True

    def _put_old(self, index: int) -> bool:
        """Put a gradient that earlier passes left; return False if there is none for the buckets."""
        if index in self.gains.results:
            self.gains.divide(index)
        if not self._values.exists(index) or self.unbucketed.is_new(index):
            return False
        self.put(index)
        return True

    def _finish(self, seen: Sequence[int], *, has_joined: bool = False) -> None:
        """Reduce the gradients outside the buckets, and replace the buckets if necessary. Collective.

        `seen` lists the gradients of the backward, in order.
        """
        engine = self.engine
        any_found = engine.used(self.flags.sparse_found) if engine.buckets else False
        more = self.unbucketed.finish(engine.used, engine.statistics, any_found=any_found, has_joined=has_joined)
        # Gradients that just left the buckets were not ready in time: the next backward shows a better order.
        is_new = more or (not self.order.is_settled and self.order.learn(seen, overlap=self.overlap))
        successor = self.reduction.successor(self.order, self.unbucketed)
        if is_new or successor is not self.reduction:
            self._replace(successor)

    def _agree(self) -> None:
        """Agree on the reduction to begin with, if ranks have not. Collective."""
        if not self.reduction.may_launch:
            self._replace(self.reduction.successor(self.order, self.unbucketed))

    def _replace(self, successor: BucketReduction) -> None:
        """Go on with this reduction, and with new buckets if they changed or if it is another one."""
        before, self.reduction = self.reduction, successor
        if successor is not before or self.order.buckets() != self.engine.buckets:
            self._start(self.engine.statistics)

    def _start(self, statistics: Statistics) -> None:
        buckets = self.order.buckets()
        self.reduction.use(buckets)
        self.engine = BucketReducer(self._ranks.along, buckets, self.reduction.plan, together=self._ranks.together)
        """Owns the memory of the buckets. It is replaced when the buckets change."""
        self.engine.statistics = statistics
        self._tracker.use([bucket.parameters for bucket in buckets])
        self._has_slot = [index not in self.unbucketed for index in range(self._count)]
        self.members = [[i for i in bucket.parameters if i < self._count and self._has_slot[i]] for bucket in buckets]
        """The gradients in each bucket."""
        self._values.use(self.engine, self.members)
