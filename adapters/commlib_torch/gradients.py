"""Gradients of parameters reduced while backward runs: how autograd drives the core's GradientReducer.

On a GPU the reducer works in the order of torch's streams: what backward has queued is waited for there, and what comes
after backward waits for the reductions there. The host waits once for each backward, at its end: for flags that say
what other ranks had, such as a gradient that became sparse, because what it does next depends on them.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from commlib.buffers.freed_memory import keep_freed_memory
from commlib.communicator import Communicator
from commlib.data_parallel import Gradient, GradientReducer, InOrder, Options, place_groups, read_groups
from commlib.errors import UsageError
from commlib.horovod.join import join as core_join
from commlib.horovod.join import say_turn
from commlib.sharding.same_parts import same_parts
from commlib.sharding.shards import check_apart, reduced_apart, world_ranks
from commlib_torch._autograd import backward_passes, listen
from commlib_torch._before_steps import before_steps
from commlib_torch._bridge import check, dtype_name
from commlib_torch._shards import shard_of
from commlib_torch._slots import Named, ParameterValues
from commlib_torch.devices import Following, in_order, where

Groups = int | Sequence[Sequence[Tensor]] | None


class Gradients:
    """Reduces the gradients of `parameters` over `ranks` in every backward. Collective to make.

    `parameters` are (name, parameter) pairs in module order, each parameter once; `known` are ids of others that
    `groups` may name, `wrapper` what this is part of: ranks must have the same one. Raises
    UsageError if they cannot be managed, or are already.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        ranks: InOrder,
        options: Options,
        *,
        groups: Groups = None,
        known: Collection[int] = (),
        wrapper: str = "",
    ) -> None:
        _check_parameters(parameters)
        self.parameters = [parameter for _, parameter in parameters]
        """Those whose gradients are reduced, in module order."""
        self.names = [name for name, _ in parameters]
        self.passes = 0
        """Backwards, and reductions without one."""
        self._ranks, self._groups, self._wrapper = ranks, groups, wrapper
        self.ids = {id(parameter) for parameter in self.parameters}
        placed = place_groups(read_groups(groups, _key), [id(parameter) for parameter in self.parameters], known)
        self._values = ParameterValues(parameters, options.compressor, options.predivide)
        self._follow = Following()
        gradients = [_gradient_of(*named, options.op, ranks.size) for named in parameters]
        # Autograd has a thread for each device: hooks of parameters on several of them would run at once.
        places = {gradient.device for gradient in gradients}
        several = len(places) > 1
        self._on_host = places <= {"cpu"}  # where a hook costs no more than it must
        self._alone: AbstractContextManager[Any] = threading.Lock() if several else nullcontext()
        with in_order():
            threads = torch.get_num_threads()
            self.reducer = GradientReducer(
                ranks, gradients, self._values, options, groups=placed, threads=threads, wrapper=wrapper
            )
        self._number_among_others()
        self.serial = backward_passes.join(self)
        self._hooks: list[Any] = []
        if ranks.size > 1:  # one rank: gradients are final as they are
            keep_freed_memory()
            self._hooks = listen(self, self.parameters, before=self.reducer.scales_before_adding)
            before_steps.join(self)

    def _number_among_others(self) -> None:
        """Find a number that no other on this communicator has, the same on all ranks, and let them take turns.

        Ranks may have dropped earlier ones at different times. Those that are still there on some are counted.
        """
        others, taken = self._others()
        if taken:
            gc.collect()  # one in a cycle would cost overlap for good
            others, taken = self._others()
        self.number, self.takes_turns = taken + 1, False
        if taken:
            for member in [*others, self]:
                member.take_turns()

    def _others(self) -> tuple[list[Any], int]:
        """Return those on this communicator, and the highest number that one has on any rank."""
        comm = self.comm
        found = [member for member in backward_passes.members if member.comm is comm]
        highest = max((member.number for member in found), default=0)
        return found, max(comm.all_gather_object(highest)) if comm.size > 1 else 0

    def take_turns(self) -> None:
        """Say before each reduction that it is this one's: others are on its communicator, and ranks may join."""
        if not self.takes_turns:
            self.takes_turns = True
            comm, number = self.comm, self.number
            self._ranks.turn = functools.partial(say_turn, comm, number)

    @property
    def comm(self) -> Any:
        """The communicator that gradients are reduced over."""
        return self._ranks.comm

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self.ids

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError for an optimizer that steps with gradients before they are reduced, within backward."""
        if torch._C._current_graph_task_id() == -1 or not self.reducer.syncs:
            return
        if getattr(optimizer, "_gradients", None) is self:
            return  # it reduces them itself
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter in self:
                raise UsageError(
                    f"an optimizer steps within backward, in a hook of {self.names[self._index_of(parameter)]} say, "
                    "before its gradient is reduced: step after backward(), or make each of the optimizers that step "
                    "in hooks a DistributedOptimizer"
                )

    def _index_of(self, parameter: Tensor) -> int:
        return next(i for i, one in enumerate(self.parameters) if one is parameter)

    def by_hand(self) -> str | None:
        """Return the name of a parameter whose gradient is none that was reduced here; None if all were."""
        return next((self.names[i] for i in range(len(self.names)) if not self._values.is_result(i)), None)

    def late(self, given: Container[int]) -> str | None:
        """Return the name of one of the `given`, by id, whose gradient came after those of its step were reduced.

        Not of one that is zeros: some give those to optimizers that want a gradient of every parameter.
        """
        return self._first_of((i for i in self.reducer.late() if _is_nonzero(self.parameters[i].grad)), given)

    def accumulated(self, given: Container[int]) -> str | None:
        """Return the name of one of the `given`, by id, whose gradient has what no reduction has seen."""
        return self._first_of(self.reducer.accumulated, given)

    @property
    def holds_passes(self) -> bool:
        """Gradients are there that have what no reduction has seen."""
        return any(_is_nonzero(self.parameters[index].grad) for index in self.reducer.accumulated)

    def _first_of(self, indices: Iterable[int], given: Container[int]) -> str | None:
        return next((self.names[i] for i in sorted(indices) if id(self.parameters[i]) in given), None)

    def again(self, parameters: Sequence[Named], known: Collection[int]) -> Gradients:
        """Stop; return what reduces other parameters in the same way, and goes on with the statistics. Collective."""
        self.close()
        self._ranks.turn = None
        options = self.reducer.options
        new = Gradients(parameters, self._ranks, options, groups=self._groups, known=known, wrapper=self._wrapper)
        with in_order():
            new.reducer.take_over(self.reducer)
        new.passes = self.passes
        return new

    def close(self) -> None:
        """Stop reducing. Gradients stay what they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        backward_passes.leave(self)
        before_steps.leave(self)

    def synchronize(self) -> None:
        """Reduce gradients now if the next step needs it: see `GradientReducer.synchronize`."""
        self.passes += 1
        with self._between():
            self.reducer.synchronize()

    def reduce(self) -> None:
        """Reduce gradients now, whether or not that is needed. Collective."""
        with self._between():
            self.reducer.reduce()

    def give_up(self) -> None:
        """Give up a backward that raised and was caught, if there is one: see `GradientReducer.give_up`."""
        if self.reducer.active:
            with self._between():
                self.reducer.give_up()

    def stand_in(self) -> bool:
        """Take part with nothing in the next reduction of the others: see `GradientReducer.stand_in`."""
        with self._between():
            return self.reducer.stand_in()

    def contribute_nothing(self) -> int | None:
        """Take part with nothing until all ranks do: see `GradientReducer.contribute_nothing`."""
        with self._between():
            return self.reducer.contribute_nothing()

    def end_backward(self) -> None:
        """Finish the backward in progress, if there is one."""
        if self.reducer.active:
            self.passes += 1
            with self._between():
                self.reducer.end()

    def before_gradient(self, index: int) -> None:
        """Note that autograd is about to add to the gradient of a parameter."""
        if self._on_host:
            self.reducer.before(index)
            return
        with self._alone, in_order():
            self.reducer.before(index)

    def on_gradient(self, index: int) -> None:
        """Note that autograd has accumulated the gradient of a parameter."""
        if not backward_passes.completes(self.parameters[index]):
            return
        backward_passes.arm()
        if self._on_host:
            self._ready(index)
            return
        with self._alone, in_order():
            self._follow()
            self._ready(index)

    def _ready(self, index: int) -> None:
        reducer = self.reducer
        if not reducer.active:
            # Whose turn it is ranks meet for, so all of them do so at the end, however many are left on this one.
            eager = len(backward_passes.members) == 1 and not self.takes_turns
            if backward_passes.pipeline is not None and self._begins_together(index, *backward_passes.pipeline):
                eager = False
            # Several reducers at once: the order in which backward reaches them may differ among ranks.
            reducer.begin(eager=eager)
        reducer.ready(index)

    def _begins_together(self, index: int, comm: Any, stages: nn.Module) -> bool:
        """Tell whether several ranks of a pipeline, whose step makes gradients now, have this: then all of them end it.

        Raises UsageError for parameters of stages, and where gradients are to be averaged: each rank has a term of a
        sum, or nothing.
        """
        if not self.is_shared(comm):
            return False
        ranks = world_ranks(comm)
        what = f"{self._wrapper}: the gradient of {self.names[index]} is one of a step of the pipeline of ranks"
        remedy = "give it the communicator of the ranks that have the same stage of other pipelines"
        if any(self.parameters[index] is parameter for parameter in stages.parameters()):
            raise UsageError(
                f"{what} {list(ranks)}, several of which are to reduce it together, but they have different stages: "
                f"{remedy}"
            )
        if self.reducer.options.op != "sum":
            raise UsageError(
                f"{what} {list(ranks)}, several of which are to average it, but they compute one loss together: each "
                f"has a term of the gradient, or none. Pass op=Sum, or {remedy}"
            )
        backward_passes.begun.append(self)
        return True

    def is_shared(self, comm: Any) -> bool:
        """Tell whether several ranks of a communicator have this."""
        return len(set(world_ranks(comm)).intersection(world_ranks(self.comm))) > 1

    @property
    def label(self) -> tuple[tuple[int, ...], str, int]:
        """What this is on all its ranks."""
        return world_ranks(self.comm), self.comm.name, self.number

    def end_together(self) -> None:
        """End a backward that has begun on another rank at least."""
        if not self.reducer.active:
            self.reducer.begin(eager=False)
        self.end_backward()

    @contextmanager
    def _between(self) -> Iterator[None]:
        """Work within when autograd adds to no gradient."""
        with torch.no_grad(), in_order():
            self._follow()
            yield


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; return the rank that did so last. `device` is not used.

    Until then this rank takes part with nothing in what the others do: see `commlib.horovod.join`.
    """
    if backward_passes.members:
        gc.collect()  # optimizers that are no more, but in a cycle with their scheduler, must not wait for anybody
    return core_join(backward_passes.members)


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and (gradient.layout != torch.strided or bool(gradient.any()))


def trained(named: Iterable[Named]) -> list[Named]:
    """Return the parameters that require gradients."""
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _key(member: Any) -> int:
    if not isinstance(member, Tensor):
        raise TypeError("tensors")
    return id(member)


def ranks_of(parameters: Iterable[Named], comm: Any, **options: Any) -> InOrder:
    """Return the ranks over which gradients are reduced: `comm`, and those that have the same part of a parameter.

    Raises UsageError for parameters of which some ranks have a larger part, or of which some ranks of `comm` have
    another part.
    """
    shards = [(name, shard_of(parameter)) for name, parameter in parameters]
    check_apart("gradients", shards, world_ranks(comm))
    return InOrder(comm, reduced_apart(shards), **options)


def comm_of_marks(what: str, parameters: Iterable[Named], everyone: Any) -> Communicator | None:
    """Return the ranks that have the same parts as this one, if parameters are divided along a mesh. Collective."""
    found = same_parts(what, ((name, shard_of(parameter)) for name, parameter in parameters), everyone)
    return None if found is None else found.comm


def _gradient_of(name: str, parameter: Tensor, op: str, ranks: int) -> Gradient:
    real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
    shape, kind, device = tuple(real.shape), dtype_name(real.dtype), where(parameter)
    shard = shard_of(parameter)
    if shard is None:
        return Gradient(name, shape, kind, device)
    return Gradient(name, shape, kind, device, shard.reduced_over, shard.scale(op, ranks))


def _check_parameters(parameters: Sequence[Named]) -> None:
    """Raise UsageError unless all of them can be managed, and nobody else does already."""
    for name, parameter in parameters:
        if nn.parameter.is_lazy(parameter):
            raise UsageError(f"parameter {name} has no shape so far: run one forward of its lazy layer first")
        try:
            check(parameter)
        except UsageError as error:
            raise UsageError(f"parameter {name}: {error}") from error
        if not parameter.is_leaf:
            raise UsageError(f"parameter {name} is not a leaf of autograd's graph, so it never gets a gradient")
    for member in backward_passes.members:
        for name, parameter in parameters:
            if parameter in member:
                raise UsageError(
                    f"the gradient of {name} is already reduced by another DistributedOptimizer or DataParallel: "
                    "use one of them"
                )
