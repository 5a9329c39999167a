"""DistributedOptimizer: any torch optimizer, stepping with gradients reduced over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

import commlib
from commlib.communicator import Communicator
from commlib.data_parallel import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.errors import UsageError
from commlib_torch._gradients import Gradients, Named, unique_parameters

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[Named] | None = None,
    *,
    op: str = "mean",
    backward_passes_per_step: int = 1,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
    overlap: bool | None = None,
    comm: Communicator | None = None,
) -> OptimizerT:
    """Make `optimizer` step with gradients that are reduced over all ranks, and return it. Collective.

    The same object is returned, as an instance of a subclass of its own class, with everything it had: schedulers,
    GradScaler, `state_dict` and closures work as before. Gradients are final when `loss.backward()` returns; nothing
    needs to be called before clipping them. It gains:

    - `synchronize()`: reduce now what `step()` would have to, e.g. on a rank that had no loss in this step and wants
      to clip like the others;
    - `no_sync()`: a context in which backward accumulates on this rank only;
    - `exposed_seconds`: the time this thread waited for communication so far; `statistics` has more.

    `named_parameters`, such as `model.named_parameters()`, gives names for messages and the order of buckets; it must
    cover the optimizer's parameters. `op` is "mean" or "sum". With `backward_passes_per_step=k` only every k-th
    backward reduces; gradients of the k passes are added up, not averaged. Buckets hold up to `bucket_cap_mib` MiB,
    the first one `first_bucket_mib`. With `overlap` they are sent while backward runs, else when it ends; by default
    where the group spans several nodes, or each rank has more cores than torch has threads. `comm` is the group to
    reduce over, by default all ranks.

    A closure given to `step` returns the loss reduced over the ranks, so that all of them take the same decisions.
    `step()` takes part in the reduction even where no backward ran. `add_param_group` is collective.

    Raises UsageError for parameters that cannot be managed, MismatchError on every rank if ranks hold different ones.
    """
    if isinstance(optimizer, Distributed):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    comm = comm or commlib.init()
    named = None if named_parameters is None else list(named_parameters)
    make = functools.partial(
        Gradients,
        comm=comm,
        op=op,
        bucket_cap_mib=bucket_cap_mib,
        first_bucket_mib=first_bucket_mib,
        passes_per_step=backward_passes_per_step,
        overlap=overlap,
    )
    gradients = make(_name_parameters(optimizer, named))
    # The object itself changes class, instead of a copy being made: whoever refers to it already goes on using it.
    plain = type(optimizer)
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_plain": plain}
    optimizer.__class__ = type(plain.__name__, (Distributed, plain), names)
    distributed = cast(Any, optimizer)
    distributed._gradients = gradients
    distributed._make_gradients = make
    distributed._named = named
    distributed._closure_comm = (comm, op)
    # Hooks, not an override of step(): a scheduler made earlier has replaced step on the instance.
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return optimizer


class Distributed:
    """What a wrapped optimizer has beyond its own class. Not for direct use: see `DistributedOptimizer`."""

    _plain: type
    _gradients: Gradients
    _make_gradients: Callable[[list[Named]], Gradients]
    _named: list[Named] | None
    _closure_comm: tuple[Communicator, str]

    def synchronize(self) -> None:
        """Reduce gradients now if `step()` would have to. Nothing to do after a backward that reduced them.

        Without any backward on this rank it contributes zeros, and takes the result of the others.
        """
        self._gradients.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes within this context accumulate gradients on this rank only."""
        return self._gradients.no_sync()

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the training thread has waited for communication so far."""
        return self._gradients.statistics.exposed_seconds

    @property
    def statistics(self) -> Any:
        """What was reduced so far: `commlib.data_parallel.Statistics`."""
        return self._gradients.statistics

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does; what `no_sync` or earlier passes accumulated is given up."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._gradients.cleared()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does. Collective; between a step and the next backward."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_gradients" in self.__dict__:
            self._gradients.close()
            old = self._gradients
            self._gradients = self._make_gradients(_name_parameters(cast(Any, self), self._named, strict=False))
            self._gradients.statistics = old.statistics

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the plain optimizer: a communicator belongs to this process."""
        reduced: Any = super().__reduce_ex__(0)  # later protocols insist on the class that the object has
        arguments = tuple(self._plain if item is type(self) else item for item in reduced[1])
        return (reduced[0], arguments, *reduced[2:])


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _refuse_unmanaged(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        optimizer.synchronize()
        return None
    wrapped = _averaging(optimizer, closure)
    return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._gradients.stepped()


def _averaging(optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a closure so that it reduces gradients exactly once more than before, and returns the loss of all ranks.

    LBFGS decides by the loss how far to go, and when to stop evaluating: with losses of their own, ranks would part.
    """
    comm, op = optimizer._closure_comm

    def wrapper() -> Any:
        gradients = optimizer._gradients
        before = gradients.statistics.reductions
        loss = closure()
        if gradients.statistics.reductions == before:
            gradients.reduce()
        if comm.size == 1:
            return loss
        mine = loss.item() if isinstance(loss, Tensor) else loss
        losses = [value for value in comm.all_gather_object(mine) if value is not None]
        if not losses:
            return None
        total = sum(losses) / (comm.size if op == "mean" else 1)
        return torch.as_tensor(total, dtype=loss.dtype) if isinstance(loss, Tensor) else total

    return wrapper


def _refuse_unmanaged(optimizer: Any) -> None:
    gradients = optimizer._gradients
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None and parameter not in gradients:
                raise UsageError(
                    f"parameter {position} of group {number} has a gradient, but did not require one when the "
                    "DistributedOptimizer was made, so its gradient is not reduced: unfreeze parameters first, or "
                    "add them later by add_param_group"
                )


def _name_parameters(
    optimizer: torch.optim.Optimizer, named: list[Named] | None, *, strict: bool = True
) -> list[Named]:
    """Return the parameters to manage, in module order, with their names; those without a name last."""
    mine = {
        id(parameter): (f"group {number}, parameter {position}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }
    chosen: list[Named] = []
    for name, parameter in named or ():
        if mine.pop(id(parameter), None) is not None:
            chosen.append((name, parameter))
    left = list(mine.values())
    missing = [name for name, parameter in left if parameter.requires_grad]
    if named is not None and missing and strict:
        raise UsageError(f"named_parameters lacks parameters of the optimizer: {'; '.join(missing)}")
    return unique_parameters([*chosen, *left])
