"""Reduction of gradients during backward: how autograd drives the core's GradientReducer.

On a GPU the reducer follows the order of torch's streams: it waits for the work that backward has queued, and work
queued after backward waits for the reductions. The host waits once per backward, at its end, for flags of the other
ranks, such as "this gradient is sparse": they decide what the host does next.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from commlib.buffers.freed_memory import keep_freed_memory
from commlib.communicator import Communicator
from commlib.compress.choice import check_no_momentum
from commlib.data_parallel.groups import place_groups, read_groups
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.reducer_ranks import OrderedRanks
from commlib.errors import UsageError
from commlib.horovod.join import announce_turn, number_reducer
from commlib.horovod.join import join as core_join
from commlib.sharding.shard_replicas import find_shard_replicas
from commlib.sharding.shards import check_same_shard, group_local_shards, world_ranks
from commlib_torch._autograd import backward_passes, listen
from commlib_torch._bridge import check, dtype_name
from commlib_torch._shards import shard_of
from commlib_torch._slots import Named, ParameterValues
from commlib_torch._step_checks import before_steps
from commlib_torch.devices import StreamOrder, device_name, use_device_streams

Groups = int | Sequence[Sequence[Tensor]] | None


class AutogradReducer:
    """Reduces the gradients of `parameters` over `ranks` in every backward. The constructor is collective.

    `parameters` are (name, parameter) pairs in module order, each parameter once. `known` are the ids of other
    parameters that `groups` may name. `wrapper` is the name of the wrapping class, which must be the same on all ranks.
    Raises UsageError for parameters that cannot be managed or already are.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        ranks: OrderedRanks,
        options: Options,
        *,
        groups: Groups = None,
        known: Collection[int] = (),
        wrapper: str = "",
    ) -> None:
        _check_parameters(parameters)
        self.parameters = [parameter for _, parameter in parameters]
        """The reduced parameters, in module order."""
        self.names = [name for name, _ in parameters]
        self.passes = 0
        """The number of backwards and of reductions without a backward."""
        self._ranks, self._groups, self._wrapper = ranks, groups, wrapper
        self.ids = {id(parameter) for parameter in self.parameters}
        placed = place_groups(read_groups(groups, _key), [id(parameter) for parameter in self.parameters], known)
        self._values = ParameterValues(parameters, options.compressor, options.predivide)
        self._follow = StreamOrder()
        gradients = [_gradient_of(*named, options.op, ranks.size) for named in parameters]
        # Autograd has a thread per device: hooks of parameters on several devices would run concurrently.
        places = {gradient.device for gradient in gradients}
        several = len(places) > 1
        self._on_host = places <= {"cpu"}  # hooks on the host stay as cheap as possible
        self._alone: AbstractContextManager[Any] = threading.Lock() if several else nullcontext()
        with use_device_streams():
            threads = torch.get_num_threads()
            self.reducer = GradientReducer(
                ranks, gradients, self._values, options, groups=placed, threads=threads, wrapper=wrapper
            )
        self.number, self.takes_turns = 0, False
        number_reducer(self, lambda: backward_passes.members)
        self.serial = backward_passes.join(self)
        self._hooks: list[Any] = []
        if ranks.size > 1:  # with one rank gradients are already final
            keep_freed_memory()
            self._hooks = listen(self, self.parameters, before=self.reducer.scales_before_adding)
            before_steps.join(self)

    def take_turns(self) -> None:
        """Announce this reducer before each reduction: the communicator has others, and ranks may join."""
        if not self.takes_turns:
            self.takes_turns = True
            comm, number = self.comm, self.number
            self._ranks.turn = functools.partial(announce_turn, comm, number)

    @property
    def comm(self) -> Any:
        """The communicator over which gradients are reduced."""
        return self._ranks.comm

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self.ids

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError for an optimizer that steps within backward, before the gradients are reduced."""
        if torch._C._current_graph_task_id() == -1 or not self.reducer.syncs:
            return
        if getattr(optimizer, "_gradients", None) is self:
            return  # this optimizer reduces the gradients itself
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter in self:
                raise UsageError(
                    "an optimizer steps within backward, for example in a hook of "
                    f"{self.names[self._index_of(parameter)]}, before its gradient is reduced: step after backward(), "
                    "or wrap each optimizer that steps in hooks in a DistributedOptimizer"
                )

    def _index_of(self, parameter: Tensor) -> int:
        return next(i for i, one in enumerate(self.parameters) if one is parameter)

    def by_hand(self) -> str | None:
        """Return the name of a parameter whose gradient was not produced by this reducer; None if there is none."""
        return next((self.names[i] for i in range(len(self.names)) if not self._values.is_result(i)), None)

    def late(self, given: Container[int]) -> str | None:
        """Return the name of a parameter in `given` (ids) whose gradient appeared after the reduction of its step.

        Gradients of zeros do not count: some programs create them for optimizers that require a gradient everywhere.
        """
        return self._first_of((i for i in self.reducer.late() if _is_nonzero(self.parameters[i].grad)), given)

    def accumulated(self, given: Container[int]) -> str | None:
        """Return the name of a parameter in `given` (ids) whose gradient includes values that were not reduced."""
        return self._first_of(self.reducer.accumulated, given)

    @property
    def holds_passes(self) -> bool:
        """Whether gradients include values that were not reduced."""
        return any(_is_nonzero(self.parameters[index].grad) for index in self.reducer.accumulated)

    def _first_of(self, indices: Iterable[int], given: Container[int]) -> str | None:
        return next((self.names[i] for i in sorted(indices) if id(self.parameters[i]) in given), None)

    def again(self, parameters: Sequence[Named], known: Collection[int]) -> AutogradReducer:
        """Close this reducer; return one for other parameters, with the same options and statistics. Collective."""
        self.close()
        self._ranks.turn = None
        options = self.reducer.options
        new = AutogradReducer(parameters, self._ranks, options, groups=self._groups, known=known, wrapper=self._wrapper)
        with use_device_streams():
            new.reducer.take_over(self.reducer)
        new.passes = self.passes
        return new

    def close(self) -> None:
        """Stop reducing. Gradients keep their values."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        backward_passes.leave(self)
        before_steps.leave(self)

    def synchronize(self) -> None:
        """Reduce gradients now if the next step needs it; see `GradientReducer.synchronize`."""
        self.passes += 1
        with self._between():
            self.reducer.synchronize()

    def reduce(self) -> None:
        """Reduce gradients now, even if that is not needed. Collective."""
        with self._between():
            self.reducer.reduce()

    def give_up(self) -> None:
        """Abandon a backward whose exception was caught, if there is one; see `GradientReducer.give_up`."""
        if self.reducer.active:
            with self._between():
                self.reducer.give_up()

    def contribute_nothing_once(self) -> bool:
        """Contribute nothing to the next reduction of the others; see `GradientReducer.contribute_nothing_once`."""
        with self._between():
            return self.reducer.contribute_nothing_once()

    def contribute_nothing(self) -> int | None:
        """Contribute nothing until all ranks do; see `GradientReducer.contribute_nothing`."""
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
        with self._alone, use_device_streams():
            self.reducer.before(index)

    def on_gradient(self, index: int) -> None:
        """Note that autograd has accumulated the gradient of a parameter."""
        if not backward_passes.completes(self.parameters[index]):
            return
        backward_passes.arm()
        if self._on_host:
            self._ready(index)
            return
        with self._alone, use_device_streams():
            self._follow()
            self._ready(index)

    def _ready(self, index: int) -> None:
        reducer = self.reducer
        if not reducer.active:
            # Agreeing on the turn is collective, so all ranks do it at the end, regardless of how many reducers this
            # rank has.
            eager = len(backward_passes.members) == 1 and not self.takes_turns
            if backward_passes.pipeline is not None and self._begins_together(index, *backward_passes.pipeline):
                eager = False
            # With several reducers, backward may reach them in a different order on each rank.
            reducer.begin(eager=eager)
        reducer.ready(index)

    def _begins_together(self, index: int, comm: Any, stages: nn.Module) -> bool:
        """Return whether several ranks of a running pipeline share this reducer: all of them then end its backward.

        Raises UsageError for parameters of stages, and for averaging: each rank has one term of a sum, or none.
        """
        if not self.is_shared(comm):
            return False
        ranks = world_ranks(comm)
        what = f"{self._wrapper}: the gradient of {self.names[index]} comes from a step of the pipeline of ranks"
        remedy = "pass the communicator of the ranks that have the same stage of other pipelines"
        if any(self.parameters[index] is parameter for parameter in stages.parameters()):
            raise UsageError(
                f"{what} {list(ranks)}, and several of them would reduce it together, but they have different stages: "
                f"{remedy}"
            )
        if self.reducer.options.op != "sum":
            raise UsageError(
                f"{what} {list(ranks)}, and several of them would average it, but they compute one loss together: "
                f"each has a term of the gradient, or none. Pass op=Sum, or {remedy}"
            )
        backward_passes.started.append(self)
        return True

    def is_shared(self, comm: Any) -> bool:
        """Return whether several ranks of a communicator share this reducer."""
        return len(set(world_ranks(comm)).intersection(world_ranks(self.comm))) > 1

    @property
    def label(self) -> tuple[tuple[int, ...], str, int]:
        """The identity of this reducer, the same on all its ranks."""
        return world_ranks(self.comm), self.comm.name, self.number

    def end_together(self) -> None:
        """End a backward that has begun on at least one rank."""
        if not self.reducer.active:
            self.reducer.begin(eager=False)
        self.end_backward()

    @contextmanager
    def _between(self) -> Iterator[None]:
        """Run the body while autograd does not accumulate gradients."""
        with torch.no_grad(), use_device_streams():
            self._follow()
            yield


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; return the last rank to do so.

    Until then this rank contributes nothing to the operations of the others: see `commlib.horovod.join`.

    Args:
        device: Unused; Horovod has it.
    """
    if backward_passes.members:
        gc.collect()  # dead optimizers in a cycle with their scheduler must not be waited for
    return core_join(backward_passes.members)


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and (gradient.layout != torch.strided or bool(gradient.any()))


def trainable_parameters(named: Iterable[Named]) -> list[Named]:
    """Return the parameters that require gradients."""
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _key(member: Any) -> int:
    if not isinstance(member, Tensor):
        raise TypeError("tensors")
    return id(member)


def ranks_of(parameters: Iterable[Named], comm: Any, **options: Any) -> OrderedRanks:
    """Return the ranks over which gradients are reduced: `comm`, and ranks with the same shard of a parameter.

    Raises UsageError if some ranks have a larger shard of a parameter, or if some ranks of `comm` have another shard.
    """
    shards = [(name, shard_of(parameter)) for name, parameter in parameters]
    check_same_shard("gradients", shards, world_ranks(comm))
    return OrderedRanks(comm, group_local_shards(shards), **options)


def comm_of_marks(what: str, parameters: Iterable[Named], everyone: Any) -> Communicator | None:
    """Return the ranks that have the same shards as this one, if parameters are sharded along a mesh. Collective."""
    replicas = find_shard_replicas(what, ((name, shard_of(parameter)) for name, parameter in parameters), everyone)
    return None if replicas is None else replicas.comm


def check_momentum(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]], compression: Any) -> None:
    """Raise UsageError if both groups of parameters and the compression of their gradients have momentum."""
    for group in groups:
        momentum = {"momentum": group.get("momentum"), "beta1": (*(group.get("betas") or ()), None)[0]}
        check_no_momentum(compression, type(optimizer).__name__, momentum)


def _gradient_of(name: str, parameter: Tensor, op: str, ranks: int) -> Gradient:
    real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
    shape, kind, device = tuple(real.shape), dtype_name(real.dtype), device_name(parameter)
    shard = shard_of(parameter)
    if shard is None:
        return Gradient(name, shape, kind, device)
    return Gradient(name, shape, kind, device, shard.reduced_over, shard.scale(op, ranks))


def _check_parameters(parameters: Sequence[Named]) -> None:
    """Raise UsageError unless all parameters can be managed and no other wrapper does so."""
    for name, parameter in parameters:
        if nn.parameter.is_lazy(parameter):
            raise UsageError(f"parameter {name} has no shape yet: run one forward of its lazy layer first")
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
