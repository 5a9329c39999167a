"""Gradients reduced while backward runs: the mechanism of `DistributedOptimizer` and `DataParallel`.

Each gradient has a slot in a symmetric bucket. When autograd has accumulated a parameter's gradient, a hook moves it
into its slot (unless it already is there) and makes `parameter.grad` a view of it; a bucket whose gradients are all
there is launched, and reduced in place while backward goes on. At the end of backward the rest is launched and all
are waited for, so that gradients are final as soon as `loss.backward()` returns: clipping, GradScaler or logging need
no call into commlib.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    make_buckets,
    overlap_pays,
)
from commlib.errors import UsageError
from commlib_torch._backward import backward_passes
from commlib_torch._bridge import check, dtype_name, to_tensor
from commlib_torch._memory import keep_freed_memory

REDUCTIONS = ("mean", "sum")
Named = tuple[str, Tensor]


class Gradients:
    """Reduces the gradients of `parameters` over the ranks of `comm` in every backward. Collective.

    `parameters` are (name, parameter) pairs in module order, each parameter once. Raises UsageError if they cannot be
    managed, MismatchError on every rank if ranks hold different ones.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        comm: Any,
        *,
        op: str = "mean",
        bucket_cap_mib: float,
        first_bucket_mib: float,
        passes_per_step: int = 1,
        overlap: bool | None = None,
    ) -> None:
        if op not in REDUCTIONS:
            raise UsageError(f"op must be one of {', '.join(REDUCTIONS)}, got {op!r}")
        for name, parameter in parameters:
            _check_parameter(name, parameter)
        _check_unmanaged(parameters)
        settings = f"op={op} caps={first_bucket_mib}, {bucket_cap_mib} MiB passes={passes_per_step} overlap={overlap}"
        check_agreement(comm, "data-parallel parameters", [settings, *(_describe(*named) for named in parameters)])
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._ids = {id(parameter) for parameter in self._parameters}
        self._size = comm.size
        self._scale_before_adding = op == "sum" and comm.size > 1
        self._holds_sum = [False] * len(parameters)
        """`grad` is a sum over ranks already. Each rank then adds to 1/size of it, so that it is counted once."""
        if overlap is None:
            overlap = overlap_pays(comm, threads=torch.get_num_threads(), cores=cores_per_rank(comm))
        self._overlap = overlap
        self._sync = True
        specs = [_spec(name, parameter, op) for name, parameter in parameters]
        try:
            buckets = make_buckets(specs, first_bucket_mib=first_bucket_mib, bucket_cap_mib=bucket_cap_mib)
            self._tracker = Tracker([bucket.parameters for bucket in buckets], passes_per_step=passes_per_step)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self._engine = Engine(comm, buckets)
        self._views = [_view(self._engine, index, parameter) for index, parameter in enumerate(self._parameters)]
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
            unused = {index for index in self._tracker.missing() if not self._attach_old(index)}
            remaining = self._tracker.end()
            self._engine.finish(remaining, unused)
            for bucket in self._engine.buckets[: remaining.start]:
                for index in bucket.parameters:
                    self._parameters[index].grad = self._views[index]
            for index in unused:
                # A gradient that no rank had stays None, as it would in one process; else all ranks take the result.
                if self._engine.used(index):
                    self._parameters[index].grad = self._views[index]
        if self._scale_before_adding:
            self._holds_sum = [True] * len(self._parameters)

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
        self._attach(index, parameter)
        for bucket in launches:
            self._engine.launch(bucket)
            for launched in self._engine.buckets[bucket].parameters:
                # In flight: whoever accumulates now, by mistake, must not do it there.
                self._parameters[launched].grad = None

    def _attach(self, index: int, parameter: Tensor) -> None:
        """Make `grad` the view of its slot, with the value it has."""
        view, grad = self._views[index], parameter.grad
        if grad is view:
            return
        if grad is None or grad.layout != torch.strided:
            kind = "no" if grad is None else "a sparse"
            raise UsageError(
                f"{self._names[index]} has {kind} gradient after accumulation: only dense gradients are supported. "
                "For an embedding, pass sparse=False"
            )
        # Autograd made a new tensor: zero_grad() dropped the view, or somebody put another one in its place.
        if _is_plain(grad) and grad.dtype == view.dtype:
            self._engine.write(index, grad.data_ptr())
        else:
            view.copy_(grad.detach())
        parameter.grad = view

    def _attach_old(self, index: int) -> bool:
        """Attach a gradient that earlier passes left; return False if there is none."""
        parameter = self._parameters[index]
        self._scale_old_sum(index)
        if parameter.grad is None:
            return False
        self._attach(index, parameter)
        return True

    def _scale_old_sum(self, index: int) -> None:
        if self._holds_sum[index]:
            self._holds_sum[index] = False
            grad = self._parameters[index].grad
            if grad is not None:
                with torch.no_grad():
                    grad.mul_(1 / self._size)


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
        check(parameter)
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


def _spec(name: str, parameter: Tensor, op: str) -> Parameter:
    real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
    return Parameter(name, real.numel(), dtype_name(real.dtype), real.element_size(), op)


def _view(engine: Engine, index: int, parameter: Tensor) -> Tensor:
    """Return the slot of a parameter as a tensor of its shape and dtype."""
    flat = to_tensor(engine.slot(index))
    if parameter.is_complex():
        return torch.view_as_complex(flat.view(*parameter.shape, 2))
    return flat.view(parameter.shape)
