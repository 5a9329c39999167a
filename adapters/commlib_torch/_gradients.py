"""Gradients reduced while backward runs: the mechanism of `DistributedOptimizer` and `DataParallel`.

Each gradient has a slot in a symmetric bucket. When autograd has accumulated a parameter's gradient, a hook moves it
into its slot (`_slots`); a bucket whose gradients are all there is launched, and reduced in place while backward goes
on. At the end of backward the rest is launched and all are waited for, so that gradients are final as soon as
`loss.backward()` returns: clipping, GradScaler or logging need no call into commlib. Gradients that do not fit into
buckets go another way (`_aside`). `_arrangement` says which buckets there are.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from commlib.compress import GradientCompression
from commlib.data_parallel import (
    Bucket,
    Engine,
    Statistics,
    StepClock,
    StepReport,
    Tracker,
    check_agreement,
    cores_per_rank,
    overlap_pays,
)
from commlib.data_parallel.compressed import CompressedPlans
from commlib.errors import UsageError
from commlib_torch._arrangement import Arrangement
from commlib_torch._aside import Aside
from commlib_torch._backward import backward_passes
from commlib_torch._course import Course, agree
from commlib_torch._hooks import listen
from commlib_torch._memory import keep_freed_memory
from commlib_torch._options import Options
from commlib_torch._parameters import Named, check_parameters, describe, shape_of
from commlib_torch._slots import Slots


class Gradients:
    """Reduces the gradients of `parameters` over the ranks of `comm` in every backward. Collective.

    `parameters` are (name, parameter) pairs in module order, each parameter once; `known` are ids of others that
    groups may name. Raises UsageError if they cannot be managed, MismatchError on every rank if ranks hold different
    ones.
    """

    def __init__(
        self, parameters: Sequence[Named], comm: Any, options: Options, *, known: Collection[int] = ()
    ) -> None:
        check_parameters(parameters)
        options = options.for_ranks_of(comm)
        self.comm, self.options = comm, options
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._groups = options.find_groups(self._parameters, known)
        settings = f"{options.describe()} groups={self._groups}"
        check_agreement(comm, "data-parallel parameters", [settings, *(describe(*named) for named in parameters)])
        self._ids = {id(parameter) for parameter in self._parameters}
        self._size = comm.size
        self._scale_before_adding = options.op == "sum" and comm.size > 1
        self._holds_sum = [False] * len(parameters)
        """`grad` is a sum over ranks already. Each rank then adds to 1/size of it, so that it is counted once."""
        overlap = options.overlap
        if overlap is None:
            overlap = comm.size > 1 and overlap_pays(comm, threads=torch.get_num_threads(), cores=cores_per_rank(comm))
        self._overlap = overlap
        self._sync = True
        self._somebody, self._news = len(parameters), len(parameters) + 1
        """Flags: a rank that has not joined takes part; a rank found a sparse gradient that not all know of."""
        self._aside = Aside(comm, options, parameters)
        self._slots = Slots(self._parameters, options.predivide)
        self._compression = GradientCompression(
            comm, options.scheme, within_node=options.within_node, count=int(options.bucket_cap_mib * 2**18)
        )
        self._plans = CompressedPlans(comm, self._compression, [shape_of(*named) for named in parameters])
        self._is_compressing = False
        self._is_undecided = self._compression.scheme is not None
        """Nothing was reduced so far, so ranks have not said yet whether all of them resume one saved run."""
        self._resumed: Course | None = None
        self._compressed_steps = 0
        self._arrangement = Arrangement(comm, options, parameters, self._groups, self._aside)
        buckets = self._arrangement.buckets()
        try:
            self._tracker = Tracker([b.parameters for b in buckets], passes_per_step=options.passes_per_step)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self._engine = self._start_engine(buckets)
        self._clock = StepClock()
        self.report: StepReport | None = None
        """What the last step cost; None before there was one."""
        self.serial = backward_passes.join(self)
        self._hooks: list[Any] = []
        if comm.size > 1:  # one rank: gradients are final as they are
            keep_freed_memory()
            self._hooks = listen(self, self._parameters, before=self._scale_before_adding)

    @property
    def statistics(self) -> Statistics:
        """What was reduced so far, and what it cost the training thread."""
        return self._engine.statistics

    @property
    def compression(self) -> GradientCompression:
        """How gradients are compressed, why so, and what is remembered of them."""
        return self._compression

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are reduced, in module order."""
        return self._parameters

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._ids

    @property
    def course(self) -> Course | None:
        """How compression goes on from here; None before it has begun."""
        scheme = self._compression.scheme
        if scheme is None or not self._is_compressing:
            return self._resumed
        order = None if self._arrangement.order is None else tuple(self._arrangement.order)
        return Course(scheme.name, order, tuple(sorted(self._aside.sparse)), self._compressed_steps)

    def resume(self, course: Course) -> None:
        """Begin with compression where a saved run was, if all ranks say the same before anything is reduced."""
        if self._is_undecided:
            self._resumed = course

    def take_over(self, before: Gradients) -> None:
        """Go on with the statistics, steps and residuals of another one. To be called on all ranks."""
        self._engine.statistics = before.statistics
        self._compression.load(before.compression.state())
        self._is_undecided = self._is_undecided and before._is_undecided
        self._clock, self.report = before._clock, before.report

    def close(self) -> None:
        """Stop reducing. Gradients stay what they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        backward_passes.leave(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within accumulate gradients on this rank only."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def set_passes_per_step(self, passes: int) -> None:
        """Let every `passes`-th backward reduce from now on. To be called on all ranks."""
        self.options = replace(self.options, passes_per_step=passes)
        self._tracker.passes_per_step = passes

    def synchronize(self) -> None:
        """Reduce gradients now if the next step needs it: nothing to do after a backward that reduced.

        A rank that ran no backward, for want of a loss, joins the reduction of the others here.
        """
        if self._tracker.active:  # a backward raised before its end, and was caught; the others wait for this rank
            self.end_backward()
        if self._tracker.must_reduce:
            self.reduce()

    def reduce(self) -> None:
        """Reduce gradients now, whether or not that is needed. Collective."""
        if self._size > 1:
            self._tracker.begin_step()
            with torch.no_grad():  # autograd adds to no gradient now
                self._slots.free()
            self.end_backward()

    def stepped(self) -> None:
        """Note that an optimizer stepped."""
        self._tracker.stepped()
        self._compression.commit()
        self.report = self._clock.step(self.statistics)

    def cleared(self) -> None:
        """Note that gradients were cleared."""
        self._compression.rollback()  # unless a step has used them
        self._tracker.cleared()

    def end_backward(self) -> None:
        """Finish the backward in progress, if there is one: gradients are final afterwards."""
        if not self._tracker.active:
            return
        if not self._tracker.reducing:
            self._tracker.end()
            return
        seen = self._tracker.order
        if self._is_undecided:
            self._tracker.end()
            self._decide()
            self._tracker.begin_step()
        with torch.no_grad(), self.statistics.exposing():
            missing = [index for index in self._tracker.missing() if index < len(self._parameters)]
            unused = {index for index in missing if not self._put_old(index)}
            if not self._aside.has_news:
                unused.add(self._news)
            remaining = self._tracker.end()
            try:
                self._engine.finish(remaining, unused)
                self._compression.end_step()
                for index in range(len(self._parameters)):
                    # A gradient that no rank had stays None, as it would in one process; else all take the result.
                    if index not in unused or self._engine.used(index):
                        self._slots.take(index)
            finally:
                self._slots.forget()
            self._finish_aside(seen)
        if self._scale_before_adding:
            self._holds_sum = [True] * len(self._parameters)

    def stand_in(self) -> int | None:
        """Take part with nothing in what the other ranks reduce, until all of them call this. Collective.

        Gradients and parameters of this rank stay what they are. Returns how often others reduced, None if there is
        nothing to reduce or nobody else.
        """
        if self._tracker.active:
            self.end_backward()
        if self._size == 1 or not self._engine.buckets:
            return None
        self._slots.detach()
        self._slots.free()
        everything = set(range(self._news + 1))
        times = 0
        if self._is_undecided:
            self._decide()
        while True:
            self._engine.finish(range(len(self._engine.buckets)), everything)
            if not self._engine.used(self._somebody):
                return times
            with torch.no_grad():
                self._finish_aside((), standing_in=True)
            times += 1

    def before_gradient(self, index: int) -> None:
        """Hear that autograd is about to add to the gradient of a parameter."""
        self._scale_old_sum(index)

    def on_gradient(self, index: int, parameter: Tensor) -> None:
        """Hear that autograd has accumulated the gradient of a parameter."""
        tracker = self._tracker
        backward_passes.arm()
        if not tracker.active:
            # Several reducers at once: the order in which backward reaches them may differ among ranks.
            alone = len(backward_passes.members) == 1
            if tracker.begin(sync=self._sync, eager=self._overlap and alone and not self._is_undecided):
                self._slots.free()
        if self._aside.is_new(index, parameter.grad):
            return  # not ready: its bucket must wait for what the ranks say about it
        try:
            launches = tracker.ready(index)
        except RuntimeError as error:
            raise UsageError(
                f"the gradient of {self._names[index]} became ready a second time before backward ended. Either the "
                "previous backward raised and was caught (then call synchronize() before the next one: the other ranks "
                "wait for this one), or the parameter is used in two segments of re-entrant checkpointing (then pass "
                "use_reentrant=False)"
            ) from error
        if not tracker.reducing or self._is_undecided:
            return  # it stays where autograd put it until a pass that reduces, or until the buckets are known
        started = time.perf_counter()
        self._put(index, parameter)
        self.statistics.exposed_seconds += time.perf_counter() - started
        for bucket in launches:
            self._engine.launch(bucket)
            self._slots.hide(i for i in self._engine.buckets[bucket].parameters if i < len(self._parameters))

    def _put(self, index: int, parameter: Tensor) -> None:
        """Bring the gradient of a parameter to where it is reduced from."""
        grad = parameter.grad
        if grad is None:
            raise UsageError(f"{self._names[index]} has no gradient after accumulation: did a hook take it away?")
        if index in self._aside:
            self._aside.prepare(index, grad)
        else:
            self._slots.put(index, grad)

    def _put_old(self, index: int) -> bool:
        """Put a gradient that earlier passes left; return False if there is none for the buckets."""
        parameter = self._parameters[index]
        self._scale_old_sum(index)
        if parameter.grad is None or self._aside.is_new(index, parameter.grad):
            return False
        self._put(index, parameter)
        return True

    def _scale_old_sum(self, index: int) -> None:
        if self._holds_sum[index]:
            self._holds_sum[index] = False
            grad = self._parameters[index].grad
            if grad is not None:
                with torch.no_grad():
                    grad.mul_(1 / self._size)

    def _decide(self) -> None:
        """Agree on whether to go on with a saved run. Collective, once."""
        self._is_undecided = False
        course = agree(self.comm, self._resumed)
        if course is None:
            self._compression.forget_common()
            return
        self._arrangement.restore(course.order)
        self._aside.restore(course.sparse)
        self._is_compressing, self._compressed_steps = True, course.steps
        self._rebuild(anyway=True)

    def _finish_aside(self, seen: Sequence[int], *, standing_in: bool = False) -> None:
        """Reduce what is not in the buckets, and make the buckets anew if there is a reason to. Collective.

        `seen` are the parameters that the backward made gradients of, in order.
        """
        self._compressed_steps += self._is_compressing
        engine = self._engine
        news = engine.used(self._news) if engine.buckets else False
        more = self._aside.finish(engine.used, engine.statistics, news=news, standing_in=standing_in)
        # What has just left the buckets was not ready in time: the next backward's order is the better one.
        if more or self._arrangement.learn_order(seen, overlap=self._overlap):
            self._rebuild()
        if not self._is_compressing and self._compression.scheme is not None and self._arrangement.is_settled:
            self._is_compressing = True
            self._rebuild(anyway=True)

    def _rebuild(self, *, anyway: bool = False) -> None:
        """Make the buckets anew, if they change. Collective."""
        buckets = self._arrangement.buckets()
        if anyway or buckets != self._engine.buckets:
            statistics = self._engine.statistics
            self._engine = self._start_engine(buckets)
            self._engine.statistics = statistics
            self._tracker.use([bucket.parameters for bucket in buckets])

    def _start_engine(self, buckets: Sequence[Bucket]) -> Engine:
        engine = Engine(self.comm, buckets, self._plans.start() if self._is_compressing else None)
        self._slots.use(engine, self._aside)
        return engine
