"""Gradients reduced while backward runs: the mechanism of `DistributedOptimizer` and `DataParallel`.

Each gradient has a slot in a symmetric bucket. When autograd has accumulated a parameter's gradient, a hook moves it
into its slot (unless it already is there) and makes `parameter.grad` a view of it; a bucket whose gradients are all
there is launched, and reduced in place while backward goes on. At the end of backward the rest is launched and all
are waited for, so that gradients are final as soon as `loss.backward()` returns: clipping, GradScaler or logging need
no call into commlib.

Where a gradient is sent in another dtype than it has, or lies on a GPU, the slot has a copy of it, and the result is
copied back. Gradients that go another way, sparse ones and those that a user's compressor sends, have a slot without
elements, whose flag tells all ranks whether any of them has one; see `_aside`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from commlib.data_parallel import (
    Engine,
    Parameter,
    Statistics,
    Tracker,
    check_agreement,
    cores_per_rank,
    overlap_pays,
)
from commlib.errors import MismatchError, UsageError
from commlib_torch._aside import gather_rows, reduce_compressed
from commlib_torch._backward import backward_passes
from commlib_torch._bridge import check_dense, dtype_name, to_tensor
from commlib_torch._layout import lay_out
from commlib_torch._memory import keep_freed_memory
from commlib_torch._options import Options

Named = tuple[str, Tensor]


class Gradients:
    """Reduces the gradients of `parameters` over the ranks of `comm` in every backward. Collective.

    `parameters` are (name, parameter) pairs in module order, each parameter once; `known` are ids of others that
    groups may name. Raises UsageError if they cannot be managed, MismatchError on every rank if ranks hold different
    ones.
    """

    def __init__(
        self, parameters: Sequence[Named], comm: Any, options: Options, *, known: Collection[int] = ()
    ) -> None:
        for name, parameter in parameters:
            _check_parameter(name, parameter)
        _check_unmanaged(parameters)
        self.comm, self.options = comm, options
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._predivide = options.predivide
        self._groups = options.find_groups(self._parameters, known)
        settings = f"{options.describe()} groups={self._groups}"
        check_agreement(comm, "data-parallel parameters", [settings, *(_describe(*named) for named in parameters)])
        self._ids = {id(parameter) for parameter in self._parameters}
        self._size = comm.size
        self._scale_before_adding = options.op == "sum" and comm.size > 1
        self._holds_sum = [False] * len(parameters)
        """`grad` is a sum over ranks already. Each rank then adds to 1/size of it, so that it is counted once."""
        overlap = options.overlap
        if overlap is None:
            overlap = overlap_pays(comm, threads=torch.get_num_threads(), cores=cores_per_rank(comm))
        self._overlap = overlap
        self._sync = True
        self._somebody, self._news = len(parameters), len(parameters) + 1
        """Flags: a rank that has not joined takes part; a rank found a sparse gradient that not all know of."""
        self._sparse: set[int] = set()
        """Parameters that all ranks know to have sparse gradients."""
        self._found_sparse: set[int] = set()
        """Those that this rank found since ranks last spoke about it."""
        self._kept: dict[int, Tensor] = {}
        """Gradients whose copies are in their slots."""
        specs = [self._spec(index) for index in range(len(parameters))]
        try:
            buckets = lay_out(
                specs, self._groups, 2, first_mib=options.first_bucket_mib, cap_mib=options.bucket_cap_mib
            )
            members = [bucket.parameters for bucket in buckets]
            self._tracker = Tracker(members, passes_per_step=options.passes_per_step)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self._use(Engine(comm, buckets))
        self.serial = backward_passes.join(self)
        self._hooks: list[Any] = []
        if comm.size > 1:  # one rank: gradients are final as they are
            keep_freed_memory()
            self._hooks = self._register()

    @property
    def statistics(self) -> Statistics:
        """What was reduced so far, and the time the training thread waited for it."""
        return self._engine.statistics

    @statistics.setter
    def statistics(self, statistics: Statistics) -> None:
        self._engine.statistics = statistics

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._ids

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
            self.end_backward()

    def stepped(self) -> None:
        """Note that an optimizer stepped."""
        self._tracker.stepped()

    def cleared(self) -> None:
        """Note that gradients were cleared."""
        self._tracker.cleared()

    def end_backward(self) -> None:
        """Finish the backward in progress, if there is one: gradients are final afterwards."""
        if not self._tracker.active:
            return
        if not self._tracker.reducing:
            self._tracker.end()
            return
        with torch.no_grad():
            missing = [index for index in self._tracker.missing() if index < len(self._parameters)]
            unused = {index for index in missing if not self._put_old(index)}
            if not self._found_sparse:
                unused.add(self._news)
            remaining = self._tracker.end()
            try:
                self._engine.finish(remaining, unused)
                for index in range(len(self._parameters)):
                    # A gradient that no rank had stays None, as it would in one process; else all take the result.
                    if index not in unused or self._engine.used(index):
                        self._take(index)
            finally:
                self._kept.clear()
            self._finish_aside()
        if self._scale_before_adding:
            self._holds_sum = [True] * len(self._parameters)

    def stand_in(self) -> None:
        """Take part with nothing in what the other ranks reduce, until all of them call this. Collective.

        Gradients and parameters of this rank stay what they are.
        """
        if self._tracker.active:
            self.end_backward()
        if self._size == 1 or not self._engine.buckets:
            return
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None and parameter.grad is view:
                parameter.grad = view.clone()
        everything = set(range(self._news + 1))
        while True:
            self._engine.finish(range(len(self._engine.buckets)), everything)
            if not self._engine.used(self._somebody):
                return
            with torch.no_grad():
                self._finish_aside(standing_in=True)

    def _register(self) -> list[Any]:
        myself = weakref.ref(self)  # a parameter must not keep its reducer alive

        def after_accumulation(index: int) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                gradients = myself()
                if gradients is not None:
                    gradients._on_gradient(index, parameter)

            return hook

        def before_accumulation(index: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                gradients = myself()
                if gradients is not None:
                    gradients._scale_old_sum(index)

            return hook

        hooks: list[Any] = []
        for index, parameter in enumerate(self._parameters):
            hooks.append(parameter.register_post_accumulate_grad_hook(after_accumulation(index)))
            if self._scale_before_adding:
                hooks.append(parameter.register_hook(before_accumulation(index)))
        return hooks

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        tracker = self._tracker
        backward_passes.arm()
        if not tracker.active:
            # Several reducers at once: the order in which backward reaches them may differ among ranks.
            alone = len(backward_passes.members) == 1
            tracker.begin(sync=self._sync, eager=self._overlap and alone)
        if self._is_new_sparse(index, parameter.grad):
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
        if not tracker.reducing:
            return  # it stays where autograd put it until a pass that reduces
        self._put(index, parameter)
        for bucket in launches:
            self._engine.launch(bucket)
            for launched in self._engine.buckets[bucket].parameters:
                # In flight: whoever accumulates now, by mistake, must not do it there.
                if self._views[launched] is not None:
                    self._parameters[launched].grad = None

    # Into the slots and out of them

    def _put(self, index: int, parameter: Tensor) -> None:
        """Bring the gradient of a parameter to where it is reduced from."""
        view, grad = self._views[index], parameter.grad
        if grad is None:
            raise UsageError(f"{self._names[index]} has no gradient after accumulation: did a hook take it away?")
        if view is None:  # it travels aside, from where it is
            if index in self._sparse and grad.layout == torch.strided:
                parameter.grad = grad.detach().to_sparse(1)
            return
        if grad is not view:
            if grad.layout != torch.strided:
                grad = parameter.grad = grad.detach().to_dense()
            if not self._in_place[index]:
                self._kept[index] = grad.detach()
                view.copy_(grad.detach() / self._predivide if self._predivide != 1 else grad.detach())
                return
            # Autograd made a new tensor: zero_grad() dropped the view, or somebody put another one in its place.
            if _is_plain(grad) and grad.dtype == view.dtype:
                self._engine.write(index, grad.data_ptr())
            else:
                view.copy_(grad.detach())
            parameter.grad = view
        if self._predivide != 1:
            view.div_(self._predivide)

    def _put_old(self, index: int) -> bool:
        """Put a gradient that earlier passes left; return False if there is none for the buckets."""
        parameter = self._parameters[index]
        self._scale_old_sum(index)
        if parameter.grad is None or self._is_new_sparse(index, parameter.grad):
            return False
        self._put(index, parameter)
        return True

    def _take(self, index: int) -> None:
        """Make what was reduced the gradient of a parameter."""
        view, parameter = self._views[index], self._parameters[index]
        if view is None:
            return
        if self._in_place[index]:
            parameter.grad = grad = view
        else:
            grad = self._kept.get(index, parameter)
            if grad is parameter or not _is_plain(grad):
                grad = torch.empty_like(parameter)
            grad.copy_(view)
            parameter.grad = grad
        if self._predivide != 1:
            grad.mul_(self._predivide)

    def _scale_old_sum(self, index: int) -> None:
        if self._holds_sum[index]:
            self._holds_sum[index] = False
            grad = self._parameters[index].grad
            if grad is not None:
                with torch.no_grad():
                    grad.mul_(1 / self._size)

    # Beside the slots

    def _is_new_sparse(self, index: int, grad: Tensor | None) -> bool:
        """Note a sparse gradient of a parameter that not all ranks know to have such."""
        if grad is None or grad.layout == torch.strided or index in self._sparse or self.options.sparse_as_dense:
            return False
        self._found_sparse.add(index)
        return True

    def _finish_aside(self, *, standing_in: bool = False) -> None:
        """Reduce the gradients that travel outside the buckets. Every rank sees from the same flags which there are."""
        engine, parameters = self._engine, self._parameters
        found = self._learn() if engine.used(self._news) else set()
        for index in sorted(self._sparse):
            if index in found or engine.used(index):
                grad = None if standing_in else parameters[index].grad
                wire = self.options.wire_dtype(parameters[index].dtype)
                total = gather_rows(self.comm, self._names[index], parameters[index], grad, wire=wire)
                if not standing_in:
                    parameters[index].grad = total / self._size if self.options.op == "mean" else total
        if self.options.compressor is not None and not standing_in:  # a rank that has joined needs no standing in
            packed = [i for i in range(len(parameters)) if i not in self._sparse and engine.used(i)]
            if packed:
                named = [(self._names[index], parameters[index]) for index in packed]
                for index, grad in zip(packed, reduce_compressed(self.options, named), strict=True):
                    parameters[index].grad = grad
        if found:
            self._shrink()

    def _learn(self) -> set[int]:
        """Tell the other ranks which parameters have sparse gradients; return those that were not known to. Collective.

        Raises MismatchError on every rank if one has a dense gradient of such a parameter.
        """
        found = set().union(*self.comm.all_gather_object(self._found_sparse))
        self._found_sparse.clear()
        self._sparse |= found
        for index in sorted(found):
            if self._engine.used(index):
                raise MismatchError(
                    f"the gradient of {self._names[index]} is sparse on some ranks and dense on others: "
                    "pass sparse_as_dense=True"
                )
        return found

    def _shrink(self) -> None:
        """Make the buckets anew, without the elements of parameters whose gradients are sparse. Collective."""
        members = [[i for i in bucket.parameters if i < self._somebody] for bucket in self._engine.buckets]
        specs = [self._spec(index) for index in range(len(self._parameters))]
        engine = Engine(self.comm, lay_out(specs, members, 2, first_mib=1, cap_mib=1))
        engine.statistics = self._engine.statistics
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        self._engine = engine
        self._views = [self._view(index) for index in range(len(self._parameters))]
        self._in_place = [
            view is not None and view.dtype == parameter.dtype and view.device == parameter.device
            for view, parameter in zip(self._views, self._parameters, strict=True)
        ]

    def _goes_aside(self, index: int) -> bool:
        return index in self._sparse or self.options.compressor is not None

    def _spec(self, index: int) -> Parameter:
        name, parameter = self._names[index], self._parameters[index]
        real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
        wire = self.options.wire_dtype(real.dtype)
        count = 0 if self._goes_aside(index) else real.numel()
        return Parameter(name, count, dtype_name(wire), wire.itemsize, self.options.op)

    def _view(self, index: int) -> Tensor | None:
        """Return the slot of a parameter as a tensor of its shape, or None if it goes aside."""
        if self._goes_aside(index):
            return None
        parameter, flat = self._parameters[index], to_tensor(self._engine.slot(index))
        if parameter.is_complex():
            return torch.view_as_complex(flat.view(*parameter.shape, 2))
        return flat.view(parameter.shape)


def unique_parameters(named: Iterable[Named]) -> list[Named]:
    """Return those that require gradients, each under its first name, in order. Raises UsageError for a name twice."""
    seen: dict[int, str] = {}
    names: set[str] = set()
    result: list[Named] = []
    for name, parameter in named:
        if id(parameter) in seen:
            continue
        if name in names:
            raise UsageError(f"two parameters are named {name!r}")
        seen[id(parameter)] = name
        names.add(name)
        if parameter.requires_grad:
            result.append((name, parameter))
    return result


def _check_parameter(name: str, parameter: Tensor) -> None:
    try:
        check_dense(parameter)
    except UsageError as error:
        raise UsageError(f"parameter {name}: {error}") from error
    if not parameter.is_leaf:
        raise UsageError(f"parameter {name} is not a leaf of autograd's graph, so it never gets a gradient")


def _check_unmanaged(parameters: Sequence[Named]) -> None:
    for member in backward_passes.members:
        for name, parameter in parameters:
            if parameter in member:
                raise UsageError(
                    f"the gradient of {name} is already reduced by another DistributedOptimizer or DataParallel: "
                    "use one of them"
                )


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether the bytes behind `tensor` are its elements, in order."""
    return type(tensor) is Tensor and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _describe(name: str, parameter: Tensor) -> str:
    return f"{name}: {dtype_name(parameter.dtype)}{list(parameter.shape)}"
