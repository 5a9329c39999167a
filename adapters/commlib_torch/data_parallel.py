"""DataParallel: wrap a module, and reduce its gradients over all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from commlib import horovod as core
from commlib.compress.casts import Compressing
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.data_parallel.naming import drop_duplicates
from commlib.data_parallel.options import Options
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.report import Reporting
from commlib.data_parallel.state import load_compression, save_compression
from commlib.errors import UsageError
from commlib.horovod.reductions import reduction_name
from commlib.literals import AveragingOp
from commlib.ranks import Ranks, communicator_of
from commlib_torch._bridge import to_array
from commlib_torch._readiness import check_module
from commlib_torch._registrations import registrations
from commlib_torch._step_checks import before_steps, parameters_to_update
from commlib_torch.broadcast import broadcast_parameters
from commlib_torch.compression import Compression
from commlib_torch.devices import use_device_streams
from commlib_torch.gradients import AutogradReducer, check_momentum, comm_of_marks, ranks_of, trainable_parameters

_INNER = "module."


class DataParallel(nn.Module, Reporting):
    """Wrap `module` so that backward reduces its gradients over all ranks. Collective.

    The constructor broadcasts parameters and buffers from rank 0. Buffers (running statistics) are not kept equal
    afterwards; call `broadcast_parameters(model.named_buffers())` where that matters. Any optimizer may use
    `parameters()`, with two exceptions: a DistributedOptimizer does the same work, and LBFGS chooses its steps by the
    loss, which is local to each rank here (a DistributedOptimizer reduces it). A rank that runs no backward in a step
    must call `synchronize()` instead. The next forward takes in new parameters (a replaced head, an adapter,
    `load_state_dict(assign=True)`), with the values of rank 0, and parameters that were frozen before; that forward is
    collective. An exception in backward may be caught: the next forward then notifies the other ranks, whose own
    backward raises MismatchError, so all ranks leave this step out.

    Names are the wrapped module's in `state_dict()`, `load_state_dict()` and `named_parameters()`: checkpoints
    are interchangeable with those of a single-process program. Attributes that this class lacks are looked up in
    `module`. A copy or a pickle computes the same but reduces nothing.

    Args:
        module: The module.
        op: "mean" or "sum".
        bucket_cap_mib: The size of a bucket, MiB.
        first_bucket_mib: The size of the first bucket, MiB.
        overlap: Whether buckets are sent while backward runs, otherwise at its end; None: if the group spans several
            nodes, or if each rank has more cores than the framework has threads.
        compression: As for `DistributedOptimizer`, without custom compressors.
        compress_within_node: Whether gradients are compressed between the ranks of a node, too.
        ranks: The ranks to reduce over; None: all or, if parameters are sharded along an axis of a mesh, the ranks that
            have the same shards.

    Raises:
        UsageError: For parameters that cannot be managed, and in a step of LBFGS.
        MismatchError: On every rank if ranks hold different parameters.

    Examples:
        >>> model = ct.DataParallel(nn.Linear(2, 1))
        >>> model(torch.full((3, 2), float(comm.rank))).sum().backward()
        >>> model.module.weight.grad  # the mean of 0 on rank 0 and 3 on rank 1
        tensor([[1.5000, 1.5000]])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        op: AveragingOp = "mean",
        bucket_cap_mib: float = BUCKET_CAP_MIB,
        first_bucket_mib: float = FIRST_BUCKET_MIB,
        overlap: bool | None = None,
        compression: Compressing = Compression.none,
        compress_within_node: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        check_module(type(self).__name__, module)
        self.module = module
        parameters = trainable_parameters(drop_duplicates(module.named_parameters()))
        if ranks is None:
            world = core.require_world()
            comm = comm_of_marks(type(self).__name__, drop_duplicates(module.named_parameters()), world) or world
        else:
            comm = communicator_of(ranks, type(self).__name__)
        options = Options(
            op=reduction_name(op),
            bucket_cap_mib=bucket_cap_mib,
            first_bucket_mib=first_bucket_mib,
            overlap=overlap,
            compression=compression,
            within_node=compress_within_node,
        )
        registrations.start()
        self._gradients: AutogradReducer | None = AutogradReducer(
            parameters, ranks_of(parameters, comm), options, wrapper=type(self).__name__
        )
        broadcast_parameters([*module.named_parameters(), *module.named_buffers()], ranks=comm)
        self._look()
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers of other models."""
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        if comm.size > 1:
            before_steps.join(self)
        self.register_state_dict_post_hook(_strip_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module. Collective if it has new parameters, or some that require gradients only now."""
        if self._gradients is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._prepare(self._gradients)
        return self.module(*args, **kwargs)

    def _prepare(self, gradients: AutogradReducer) -> None:
        """Abandon a backward whose exception was caught; take in new and newly unfrozen parameters."""
        if gradients.reducer.active and torch._C._current_graph_task_id() == -1:
            gradients.give_up()
        if not self._has_changed():
            return
        if gradients.comm.size == 1 or not gradients.reducer.syncs or gradients.reducer.active:
            return
        named = drop_duplicates(self.module.named_parameters())
        if any(parameter.requires_grad and parameter not in gradients for _, parameter in named):
            known = self._known
            self._gradients = gradients.again(trainable_parameters(named), ())
            new = [(name, parameter) for name, parameter in named if id(parameter) not in known]
            if new:
                broadcast_parameters(new, ranks=gradients.comm)
        self._look()

    def _has_changed(self) -> bool:
        """Return whether parameters may have been replaced or unfrozen since the last check."""
        if self._registered != registrations.count or any(parameter.requires_grad for parameter in self._frozen):
            return True
        # Converting a model may replace all parameters without registering any.
        place, name, parameter = self._first
        return name not in place or place[name] is not parameter  # a scripted module's has no get

    def _look(self) -> None:
        """Record the current parameters."""
        places = (module._parameters for module in self.module.modules())
        self._first: tuple[Mapping[str, Any], str, Any] = next(
            ((place, name, parameter) for place in places for name, parameter in place.items()), ({}, "", None)
        )
        parameters = list(self.module.parameters())
        self._registered = registrations.count
        self._known = {
            id(parameter): parameter for parameter in parameters
        }  # kept alive, so no other parameter gets the same id
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError if an optimizer is about to use gradients that were not reduced."""
        gradients = self._gradients
        if gradients is None:
            return
        gradients.before_step(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS) and gradients.reducer.syncs and _is_of(optimizer, gradients):
            raise UsageError(
                "LBFGS chooses the length of its step and the number of closure calls by the loss, and with "
                "DataParallel each rank has its own loss: wrap the optimizer of the plain module in a "
                "DistributedOptimizer instead, whose closures return the loss reduced over the ranks"
            )
        if gradients.reducer.options.scheme is not None and _is_of(optimizer, gradients):
            check_momentum(optimizer, optimizer.param_groups, gradients.reducer.options.compression)
        given = set(map(id, parameters_to_update(optimizer)))
        if not gradients.ids.issuperset(given):
            if optimizer in self._others:
                return
            for name, parameter in self.module.named_parameters():
                if id(parameter) in given and parameter not in gradients:
                    raise UsageError(
                        f"{name} has a gradient but was frozen, or was not a parameter of this DataParallel, when its "
                        "forward began, so the gradient is not reduced: add and unfreeze parameters before the forward"
                    )
            if gradients.ids.isdisjoint(given):
                self._others.add(optimizer)
                return
        if self._steps.get(optimizer, 0) == gradients.passes and (strange := gradients.by_hand()) is not None:
            raise UsageError(
                f"the gradient of {strange} was put into .grad by hand (for example by torch.autograd.grad), and "
                "DataParallel reduces the gradients of backward(): call its synchronize() before the step, on all "
                "ranks, or use a DistributedOptimizer"
            )
        self._steps[optimizer] = gradients.passes
        if (strange := gradients.late(given)) is not None:
            raise UsageError(
                f"the gradient of {strange} was put into .grad by hand after backward() had reduced the gradients of "
                "this step: call DataParallel's synchronize() before the step, on all ranks, or use a "
                "DistributedOptimizer"
            )
        if gradients.reducer.syncs and (strange := gradients.accumulated(given)) is not None:
            raise UsageError(
                f"the gradient of {strange} was accumulated under no_sync(), and no later backward has reduced it: "
                "call DataParallel's synchronize() before the step, on all ranks; or step under no_sync() too, if "
                "each rank is to step by itself"
            )

    def synchronize(self) -> None:
        """Join the reduction of this step on a rank that runs no backward in it. Collective.

        It also reduces gradients that were put into `.grad` by hand.
        """
        if self._gradients is not None:
            self._gradients.reducer.stepped()
            self._gradients.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank only, within this context.

        The next backward outside reduces the accumulated gradients, or `synchronize()` does. An optimizer may step with
        unreduced gradients only within the context: each rank then steps by itself.
        """
        return nullcontext() if self._gradients is None else self._gradients.reducer.no_sync()

    def compression_state(self) -> dict[str, Any]:
        """Return this rank's compression state (error feedback) for `load_compression_state`; {} without any.

        It is not in `state_dict()`, which is the wrapped module's.
        """
        if self._gradients is None:
            return {}
        with use_device_streams():
            return save_compression(self._gradients.reducer, torch.from_numpy)

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Load the result of `compression_state`. If all ranks load it before their first step, bits are equal."""
        if self._gradients is not None and state:
            with use_device_streams():
                load_compression(self._gradients.reducer, state, to_array)

    @property
    def reducer(self) -> GradientReducer | None:
        """The gradient reducer: its buckets, options and compression; None in a copy."""
        return None if self._gradients is None else self._gradients.reducer

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the wrapped module, under its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the wrapped module, under its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        # A communicator belongs to this process, and so do notes about its parameters.
        of_this = ("_gradients", "_steps", "_others", "_known", "_frozen", "_first")
        return {**self.__dict__, **dict.fromkeys(of_this)}


def _is_of(optimizer: torch.optim.Optimizer, gradients: AutogradReducer) -> bool:
    return any(id(one) in gradients.ids for group in optimizer.param_groups for one in group["params"])


def _strip_prefix(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    _rename(state, prefix + _INNER, prefix)
    versions = getattr(state, "_metadata", {})  # format versions of modules, by name
    for key in [key for key in versions if f"{key}.".startswith(prefix + _INNER)]:
        versions[(prefix + f"{key}."[len(prefix + _INNER) :])[:-1]] = versions[key]


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _rename(state, prefix, prefix + _INNER)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Replace a prefix of keys, keeping their order."""
    renamed = [(new + key[len(old) :] if key.startswith(old) else key, value) for key, value in state.items()]
    state.clear()
    state.update(renamed)
