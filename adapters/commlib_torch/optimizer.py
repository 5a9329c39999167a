"""DistributedOptimizer: any torch optimizer, stepping with gradients reduced over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.arguments import list_of
from commlib.communicator import Communicator
from commlib.compress.casts import Compressing, check_compressor
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.data_parallel.naming import ids_in, name_parameters
from commlib.data_parallel.options import Options
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.report import Reporting
from commlib.data_parallel.state import load_compression, save_compression
from commlib.errors import UsageError
from commlib.group.single_rank import SingleRank
from commlib.horovod.reductions import OptimizerOpName, ReduceOp, reduction_name
from commlib.horovod.wrapping import PlainPickling, change_class
from commlib.mesh_groups import Mesh
from commlib.named_gradients.named_buckets import reduce_by_name
from commlib.ranks import Ranks, check_one_choice, communicator_of
from commlib.sharding.data_axes import data_axes
from commlib.sharding.shards import check_same_shard
from commlib_torch._bridge import to_array
from commlib_torch._shards import shard_of
from commlib_torch._slots import Named
from commlib_torch.adasum import AdasumMixin
from commlib_torch.clip import clip_grad_norm_
from commlib_torch.compression import Compression
from commlib_torch.devices import use_device_streams
from commlib_torch.gradients import (
    AutogradReducer,
    Groups,
    check_momentum,
    comm_of_marks,
    ranks_of,
    trainable_parameters,
)
from commlib_torch.named_verbs._named_operations import ProcessSets

KEY = "commlib"
"""The key of the compression state in a `state_dict`; plain optimizers ignore it."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[Named] | None = None,
    compression: Compressing = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | OptimizerOpName = core.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSets = None,
    *,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
    overlap: bool | None = None,
    compress_within_node: bool = False,
    ranks: Ranks | None = None,
    mesh: Mesh | None = None,
) -> WrappedOptimizer:
    """Make `optimizer` step with gradients that are reduced over all ranks, and return it. Collective.

    The same object is returned, as an instance of a subclass of its class, with its state: schedulers, GradScaler,
    `state_dict` and closures work as before. Gradients are final when `loss.backward()` returns; clip them without
    further calls. If ranks have parts of a model (experts, stages, shards of weights), an infinity may appear in the
    gradients of one rank only: use `commlib_torch.GradScaler(ranks=mesh)` in this case, because with torch's GradScaler
    only that rank would skip the step. The optimizer gains:

    - `synchronize()`: do the reduction of `step()` now, e.g. on a rank without a loss in this step that clips like the
      others;
    - `skip_synchronize()`: a context in which `step()` reduces nothing. `step()` never reduces a gradient twice;
    - `no_sync()`: a context in which backward accumulates on this rank only;
    - `set_backward_passes_per_step(k)`;
    - `clip_grad_norm(max_norm)`: clip by the norm of all gradients, with the same bits on all ranks, on any CPUs;
    - `report`: the cost of communication in the last step, a `commlib.data_parallel.StepReport`; `statistics` are the
      sums so far, and `exposed_seconds` is the time this thread has waited for communication.

    Compression errors are added to the next step's gradients (error feedback). They are in this rank's `state_dict()`:
    a new run that loads each rank's state before the first step continues with the same bits.
    `compression_choice` shows what "auto" chose and why.

    With op=Adasum gradients stay on their rank: `clip_grad_norm` clips this rank's, `no_sync` changes nothing, and
    `skip_synchronize` raises UsageError.

    Ranks along "tp" have the same data, or shards of a parameter, and are not reduced over. Parameters sharded along an
    axis of a mesh record their axis and need none of `process_set`, `ranks` and `mesh`.

    A closure given to `step` returns the loss reduced over the ranks, so all of them take the same decisions. `step()`
    is reduced even if no backward ran. `add_param_group` is collective, and so is the first
    `zero_grad()` after a parameter was unfrozen. An exception in backward may be caught: see `zero_grad`.

    Args:
        optimizer: The optimizer.
        named_parameters: Such as `model.named_parameters()`: names for messages and the order of buckets; all of the
            optimizer's parameters. None: names by counting.
        compression: What is sent: `Compression.fp16` or `.bf16` (or their names): gradients in half precision, summed
            in float32; "int8", "topk:ratio=0.01", "powersgd:rank=4", "auto", or a codec or scheme of
            `commlib.compress`: fewer bytes between nodes, from the second step on; or an object with `compress(tensor)
            -> (tensor, ctx)` and `decompress(tensor, ctx)`, called at the end of backward.
        backward_passes_per_step: Only every k-th backward reduces; gradients of the k passes are summed, not averaged.
        op: Average ("mean", over all ranks, including those that have joined), Sum ("sum") or Adasum, which lets every
            rank step by itself and combines the steps.
        gradient_predivide_factor: The factor f: divide by f before the sum, and multiply by f / size afterwards.
        num_groups: The older name of `groups`.
        groups: Lists of parameters that share a bucket, or the number of such lists to make; None: by size.
        sparse_as_dense: Whether sparse gradients are sent dense, and are sparse again afterwards; otherwise they are
            gathered.
        process_set: The ranks to reduce over; other ranks step by themselves. None: all.
        bucket_cap_mib: The size of a bucket, MiB.
        first_bucket_mib: The size of the first bucket, MiB.
        overlap: Whether buckets are sent while backward runs, otherwise at its end; None: if the group spans several
            nodes, or if each rank has more cores than the framework has threads.
        compress_within_node: Whether gradients are compressed between the ranks of a node, too.
        ranks: The ranks to reduce over, such as `mesh["dp"]`.
        mesh: A mesh of any number of axes, to reduce over its axes "dp" and "cp" (and "edp", "ep").

    Raises:
        UsageError: For parameters that cannot be managed, and for a process set that is not registered; also a
            ValueError.
        MismatchError: On every rank if ranks hold different parameters.
    """
    if isinstance(optimizer, DistributedMixin | AdasumMixin):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    if getattr(optimizer, "averages_by_itself", False):
        raise UsageError(f"{type(optimizer).__name__} averages over the ranks by itself: use it as it is")
    check_momentum(optimizer, optimizer.param_groups, compression)
    check_one_choice("DistributedOptimizer", process_set=process_set, ranks=ranks, mesh=mesh)
    comm: Communicator | None = None
    if mesh is not None:
        comm = mesh[data_axes(mesh)]
    elif ranks is not None:
        comm = communicator_of(ranks, "DistributedOptimizer")
    core.require_world()
    if num_groups:
        warnings.warn("num_groups is deprecated, in Horovod too: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    expected = "named_parameters= such as model.named_parameters()"
    named = None if named_parameters is None else list_of("DistributedOptimizer", expected, named_parameters)
    everything = name_parameters(optimizer.param_groups, named)
    chosen = trainable_parameters(everything)
    outside = core.process_set_of(process_set).included() is False
    combines = op == core.Adasum or op == "adasum"
    options = Options(
        op="mean" if combines else reduction_name(op, adasum=True),
        bucket_cap_mib=bucket_cap_mib,
        first_bucket_mib=first_bucket_mib,
        passes_per_step=backward_passes_per_step,
        overlap=overlap,
        compression=compression,
        within_node=compress_within_node,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
    )
    if combines:
        if gradient_predivide_factor != 1 or comm is not None:
            raise UsageError("op=Adasum takes neither gradient_predivide_factor nor ranks= or mesh=; pass process_set=")
        local = [name for name, parameter in chosen if (shard := shard_of(parameter)) is not None and shard.is_local]
        if local:
            raise UsageError(
                f"op=Adasum combines parameters that all ranks have, and {local[0]} has different experts on each rank"
            )
        if not outside:
            core.process_set_of(process_set).coordinator("DistributedOptimizer")  # raises if it is not registered
        together = core.process_set_of(process_set).ranks or ()
        check_same_shard("op=Adasum", ((name, shard_of(one)) for name, one in chosen), together, local=True)
        check_compressor(compression, "compression with op=Adasum")
        change_class(optimizer, AdasumMixin)
        wrapped: Any = optimizer
        wrapped._start_adasum(everything, compression, process_set)
        return cast(WrappedOptimizer, optimizer)
    if options.compressor is not None and comm is not None:
        raise UsageError("a custom compressor needs process_set= instead of ranks= or mesh=: it reduces by name")
    if comm is None and process_set is None:
        comm = comm_of_marks(
            "DistributedOptimizer", chosen, core.process_set_of(None).communicator("DistributedOptimizer")
        )
    if comm is not None:
        over = ranks_of(chosen, comm)
    else:
        own: Any = SingleRank() if outside else core.process_set_of(process_set).communicator("DistributedOptimizer")
        over = ranks_of(chosen, own, reduce_by_name=reduce_by_name(process_set))
    known = ids_in(optimizer.param_groups)
    gradients = AutogradReducer(chosen, over, options, groups=groups, known=known, wrapper="DistributedOptimizer")
    change_class(optimizer, DistributedMixin)
    distributed: Any = optimizer
    distributed._gradients = gradients
    distributed._named = named
    distributed._skip = False
    distributed._note_left_out()
    # Hooks, not an override of step(): an earlier scheduler has replaced step on the instance.
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return cast(WrappedOptimizer, optimizer)


class DistributedMixin(PlainPickling, Reporting):
    """The methods that a wrapped optimizer gains. Not for direct use: see `DistributedOptimizer`."""

    _gradients: AutogradReducer
    _named: list[Named] | None
    _skip: bool
    _left_out: list[Tensor]
    _count: int

    def synchronize(self) -> None:
        """Do the reduction of `step()` now. Does nothing after a backward that reduced the gradients.

        It also reduces gradients that were put into `.grad` by hand since, and raises MismatchError on all ranks if
        only some ranks have such gradients. A tensor that replaces a reduced gradient counts as derived from it.
        Without any backward on this rank it contributes zeros, and takes the result of the others.
        """
        self._gradients.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` within the context use gradients as they are, for example after `synchronize()` and clipping."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def close(self) -> None:
        """Stop reducing: gradients are local to this rank from now on. Not collective."""
        self._gradients.close()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce in every `passes`-th backward from now on."""
        self.reducer.set_passes_per_step(passes)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank only, within this context."""
        return self.reducer.no_sync()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale gradients to a total 2-norm of at most `max_norm`; return the norm before scaling.

        Gradients are reduced first if `step()` would reduce them; the call is then collective. See `clip_grad_norm_`.
        """
        gradients = self._gradients
        if not self._skip:
            gradients.synchronize()
        return clip_grad_norm_(gradients.parameters, max_norm)

    @property
    def reducer(self) -> GradientReducer:
        """The gradient reducer: its buckets, options and compression."""
        return self._gradients.reducer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, as torch does, with the compression state of this rank.

        A run that loads it on every rank before the first step continues with the same bits.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        with use_device_streams():
            remembered = save_compression(self.reducer, torch.from_numpy)
        return {**state, KEY: remembered} if remembered else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state, as torch does, and the compression state if this rank saved it."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != KEY})  # type: ignore[misc]
        if KEY in state_dict:
            with use_device_streams():
                load_compression(self.reducer, state_dict[KEY], to_array)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does, and discard gradients accumulated by `no_sync` or earlier passes.

        A backward whose exception was caught is abandoned. If it reduces, this is collective: other ranks wait for its
        end, and those that did not raise get a MismatchError, so all of them leave this step out. Parameters that
        require gradients only now are reduced from now on; this is collective, too.
        """
        self._gradients.give_up()
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        if self._count != sum(len(g["params"]) for g in groups) or any(p.requires_grad for p in self._left_out):
            self._take_in()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self.reducer.cleared()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does. Collective; call it between a step and the next backward."""
        if "_gradients" in self.__dict__:
            optimizer: Any = self
            check_momentum(optimizer, [{**optimizer.defaults, **param_group}], self.reducer.options.compression)
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_gradients" in self.__dict__:
            self._take_in()

    def _take_in(self) -> None:
        """Reduce the gradients of all parameters that require gradients now. Collective."""
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        named = trainable_parameters(name_parameters(groups, self._named, strict=False))
        self._gradients = self._gradients.again(named, ids_in(groups))
        self._note_left_out()

    def _note_left_out(self) -> None:
        """Record the parameters that require no gradients."""
        everything = [parameter for group in self.param_groups for parameter in group["params"]]  # type: ignore[attr-defined]
        self._count = len(everything)
        self._left_out = [parameter for parameter in everything if not parameter.requires_grad]


if TYPE_CHECKING:

    class WrappedOptimizer(DistributedMixin, Any):  # type: ignore[misc]
        """What `DistributedOptimizer` returns: an optimizer of the user's class, with more methods.

        These methods are for type checkers. Any is the user's class: a variable of that class may hold the result.
        """

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """Reduce the gradients unless backward has, and step as the user's class does. Collective."""
else:
    WrappedOptimizer = DistributedMixin


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _refuse_unmanaged(optimizer)
    options = optimizer.reducer.options
    if options.scheme is not None:
        check_momentum(optimizer, optimizer.param_groups, options.compression)
    if optimizer._skip:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        optimizer.synchronize()
        return None
    wrapped = _wrap_closure(optimizer, closure)
    return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer.reducer.stepped()


def _wrap_closure(optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a closure: each call ends with reduced gradients, and returns the loss of all ranks.

    LBFGS chooses its steps and the number of evaluations by the loss: with local losses, ranks would diverge.
    """

    def wrapper() -> Any:
        before = optimizer.statistics.reductions
        loss = closure()
        if optimizer.statistics.reductions == before:
            optimizer._gradients.reduce()
        else:
            optimizer._gradients.synchronize()
        if optimizer.reducer.ranks.size == 1:
            return loss
        total = optimizer.reducer.combine(loss.item() if isinstance(loss, Tensor) else loss)
        if not isinstance(loss, Tensor) or total is None:
            return total
        return torch.as_tensor(total, dtype=loss.dtype, device=loss.device)

    return wrapper


def _refuse_unmanaged(optimizer: Any) -> None:
    gradients = optimizer._gradients
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None and parameter not in gradients:
                raise UsageError(
                    f"parameter {position} of group {number} has a gradient but did not require one when the "
                    "DistributedOptimizer was made or zero_grad() was last called, so its gradient is not reduced: "
                    "unfreeze parameters before zero_grad(), or add them with add_param_group"
                )
