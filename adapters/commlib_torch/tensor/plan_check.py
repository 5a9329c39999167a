"""Plan checks: compare a plan of a PyTorch model with the rules, before its sharding or at its first call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import attrgetter, is_
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from commlib.communicator import Communicator
from commlib.comparison.agreement import run_together
from commlib.errors import CommlibError, UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.axis_equality import pause_watch
from commlib.tensor_parallel.checks.guided_run import GuidedRun
from commlib.tensor_parallel.checks.kinds import KINDS, CallKinds, SameObject, kind_of
from commlib.tensor_parallel.checks.plan_checks import (
    check_first_call,
    check_parts,
    describe_failed_check,
    describe_late_layer,
    describe_outside_call,
    describe_repeated_failure,
    describe_too_many_kinds,
    describe_unchecked,
)
from commlib.tensor_parallel.checks.trace_run import OutputPlacements, TracedRun
from commlib.tensor_parallel.checks.weight_shapes import list_weight_shapes
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib.tensor_parallel.styles import Row, Style, Vocabulary
from commlib.tensor_parallel.trace import ModelTrace
from commlib_torch._bridge import host_array
from commlib_torch._graph_breaks import disable_compile
from commlib_torch.tensor._comparison import has_numbers
from commlib_torch.tensor._forward import forward, split_calls
from commlib_torch.tensor._late_layers import report_late_layers
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor._weights import sharded_weights
from commlib_torch.tensor.layers import check_layers, find_layer
from commlib_torch.tensor.tracing import styles_in, try_trace
from commlib_torch.tensor.verify import run_model


class CheckedModel:
    """A PyTorch model for `commlib.tensor_parallel.checks.plan_checks`: a call is (arguments, options).

    axis: the axis of its sharding, present or planned; None if numbers are not compared.
    """

    def __init__(self, model: nn.Module, axis: ParallelAxis | None = None) -> None:
        self._model, self._axis = model, axis
        self.error: Exception | None = None
        """The error of its last attempt."""
        self.way: Hashable = None
        """The control-flow path of its last run."""
        self._replaces_zeros = True

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[ModelTrace, Exception | None]:
        """Return the model's trace."""
        args, options = call
        seen = list_weight_shapes(sharded_weights(self._model, styles))
        trace, self.error = try_trace(self._model, args, options, styles, seen)
        self.way = trace.way
        return trace, self.error

    def run(self, call: Any, styles: Collection[str], outputs: OutputPlacements) -> TracedRun:
        """Run the model forward and backward."""
        result = run_model(self._model, call, styles, outputs)
        self.way = result.trace.way
        return result

    def forward(
        self, call: Any, styles: Mapping[str, Style], guide: GuidedRun | None, *, evaluate: bool
    ) -> TracedRun | None:
        """Run the model forward, unsharded or as one rank. Collective.

        Weights of zeros are replaced for this run, unless the unsharded model fails with them, or returns NaN.
        """
        if self._axis is None:
            return None
        run = partial(forward, self._model, self._axis, call, styles, guide, evaluate=evaluate)
        result = run(replaces_zeros=self._replaces_zeros)
        if guide is None and self._replaces_zeros:
            self._replaces_zeros = all(self._axis.comm.all_gather_object(result is None or result.is_finite))
            result = result if self._replaces_zeros else run(replaces_zeros=False)
        return result

    def whole_and_part(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the unsharded call, and this rank's call with its parts. Collective."""
        return None if self._axis is None else split_calls(self._axis, call, dims, is_part=is_part)

    def tensor_values(self, call: Any) -> list[Any]:
        """Return the values of tensors, including those within structures."""
        tensors = tensors_in(call)
        return [host_array(one) for one in tensors] if all(map(has_numbers, tensors)) else []

    def room(self) -> int:
        """Return the free memory of the model's GPU; unlimited on the host."""
        device = next((weight.device for weight in self._model.parameters()), torch.device("cpu"))
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize

    def styles(self) -> dict[str, Style]:
        """Return the styles of sharded layers."""
        return styles_in(self._model)

    def check_layer(self, name: str, style: Style, axis: ParallelAxis) -> None:
        """Raise UsageError unless a layer can be sharded in a style among the ranks of an axis."""
        module = self._model.get_submodule(name)
        check_layers([(name, module, style, find_layer(name, module, style))], Divisibility(axis))


class PlanCheck:
    """Hooks that check a sharded model's plan at the first call of each kind. Each check runs the model once more.

    A model may behave differently in training than in evaluation, or with a flag. Calls of layers outside of the
    model's own calls cause a warning, because they are unchecked.
    """

    @classmethod
    def of(
        cls,
        model: nn.Module,
        axis: ParallelAxis,
        *,
        divided_output: bool,
        checked: Any = None,
        way: Hashable = None,
        evaluated: bool = False,
    ) -> None:
        """Attach hooks to a model. checked: a checked call, (arguments, options); `evaluated`: in evaluation mode.

        way: the control-flow path of that call, see `ModelTrace.way`.
        """
        check = cls(axis, divided_output)
        check._model = type(model).__name__
        model.commlib_within = tuple(model.modules())[1:]  # type: ignore[assignment]  # without itself: no cycle
        if checked is not None:
            modes, *others = kind_of_call(model, *checked)
            if evaluated:
                modes = False, bytes(len(modes[1])), *modes[2:]
            check._kinds.settle((modes, *others), way)
        for module in model.modules():
            if isinstance(getattr(module, "style", None), Style):
                module.plan_check = check  # type: ignore[assignment]  # no module
        model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
        model.register_forward_hook(check.after_call, always_call=True)
        report_late_layers(check, model)

    def __init__(self, axis: ParallelAxis, divided_output: bool) -> None:
        self.divided_output, self.warns = divided_output, axis.rank == 0
        self.inside = 0
        """The number of running calls of the model, including nested ones."""
        self.in_pieces = False
        """A pipeline calls the layers, and has checked them."""
        self.axis = axis
        self._kinds = CallKinds()
        self.is_checking = False
        """A check of a call is running."""
        self._model = ""
        self._warned: set[str] = set()
        self._later = self._failed = ""

    @property
    def done(self) -> bool:
        """Whether the plan was checked for at least one kind of call."""
        return bool(self._kinds.looks)

    @disable_compile  # otherwise a compiler would make one program for each kind
    def __call__(self, model: nn.Module, args: Any, options: Any) -> None:
        """Check the plan for this call if it is the first of its kind."""
        self.inside += 1
        kind = kind_of_call(model, args, options)
        if kind not in self._kinds and not self.is_checking:
            self._check_kind(model, (args, options), kind)

    @disable_compile
    def after_call(self, model: nn.Module, args: Any, result: Any) -> None:
        """Note the end of a call of the model. result: None if it has failed."""
        self.inside = max(0, self.inside - 1)
        if self._failed and not self.inside:
            if result is not None and self.warns and self.axis.size > 1 and _FAILED not in self._warned:
                self._warned.add(_FAILED)
                warnings.warn(describe_failed_check(self._model, self._failed), stacklevel=5)
            self._failed = ""

    def _check_kind(self, model: nn.Module, call: Any, kind: tuple[Any, ...]) -> None:
        if torch._C._are_functorch_transforms_active() or _is_traced(call):  # an error reaches the user by itself
            return  # the first untraced call is checked
        kind = self._kind_now(model, call, kind)
        modes, with_gradients, *others = kind
        known = modes, True, *others
        if not with_gradients and known in self._kinds and self._goes(model, call, self._kinds.way(known)):
            self._kinds.add(kind)
        elif not self._kinds.too_many:
            self._look(model, call, kind)
        elif self.warns and self.axis.size > 1 and _MANY not in self._warned:
            self._warned.add(_MANY)
            warnings.warn(describe_too_many_kinds(self._model, KINDS), stacklevel=7)

    def _kind_now(self, model: nn.Module, call: Any, kind: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the updated kind of a call if the model's modules have changed."""
        within = tuple(model.modules())[1:]
        if len(within) == len(model.commlib_within) and all(map(is_, within, model.commlib_within)):  # type: ignore[arg-type]
            return kind
        model.commlib_within = within  # type: ignore[assignment]
        report_late_layers(self, model)
        return kind_of_call(model, *call)

    def _look(self, model: nn.Module, call: Any, kind: tuple[Any, ...]) -> None:
        """Check the plan for one kind of call, and remember the kind unless the call fails: a later one may succeed."""
        traced = CheckedModel(model, self.axis)
        try:
            with _mark_checking([self]):
                self._failed = check_first_call(
                    self.axis, traced, call, divided_output=self.divided_output, warns=self.warns
                )
                if self._later:
                    run_together(self.axis.comm, lambda: _refuse_failing(traced.error))
        except UsageError as error:
            if not self._later:
                raise
            raise UsageError(describe_late_layer(self._later, f"{error}")) from error
        self._later = ""
        if not self._failed:
            self._kinds.settle(kind, traced.way)
        elif self._kinds.miss(kind) and self.warns and self.axis.size > 1 and _FAILED not in self._warned:
            self._warned.add(_FAILED)
            warnings.warn(describe_repeated_failure(self._model, self._failed), stacklevel=7)

    def _goes(self, model: nn.Module, call: Any, way: Hashable) -> bool:
        """Return whether a call takes the path of the call with gradients, on all ranks, if known. Collective."""
        if way is None:
            return True
        traced = CheckedModel(model, self.axis)
        with _mark_checking([self]), pause_watch(self.axis):
            traced.attempt(call, traced.styles())
            return all(self.axis.comm.all_gather_object(traced.way == way))

    def note_late_layer(self, what: str) -> None:
        """Note a late layer around or on a sharded one: the checked operations are no longer those that run.

        what: in words. Changes that the model's own calls make do not count.
        """
        if not self.inside:
            self._kinds.forget()
            self._later = self._later or what

    def settle_pieces(self) -> None:
        """Note that the plan was checked for a pipeline."""
        self._kinds.looks = max(1, self._kinds.looks)

    def used(self, layer: nn.Module, args: Any) -> None:
        """Warn, once per sharded layer, if it is called outside of the model's own calls.

        Recomputation in backward does not count.
        """
        is_settled = not self.warns or self.is_checking or self.in_pieces or self.axis.size == 1
        if is_settled or torch._C._current_graph_task_id() != -1 or any(isinstance(one, fx.Proxy) for one in args):
            return
        if _generates():
            return
        name = str(layer.layer_name)
        if not self.done:
            if _UNCHECKED not in self._warned:
                self._warned.add(_UNCHECKED)
                warnings.warn(describe_unchecked(self._model, name), stacklevel=6)  # the caller of the layer
        elif name not in self._warned and not self.divided_output and (does := _shard_use(layer)):
            self._warned.add(name)
            warnings.warn(describe_outside_call(self._model, name, takes=does == "takes"), stacklevel=6)


def _generates() -> bool:
    """Return whether Hugging Face's `generate` is running, which calls a model's encoder directly."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.generation.utils":
            return True
        frame = frame.f_back
    return False


_MANY, _UNCHECKED, _FAILED = "too many kinds", "not checked", "failed alone"


def _is_traced(call: Any) -> bool:
    try:
        return any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(call))
    except (RecursionError, TypeError):  # recursive, or of an unhashable class
        return False


def kind_of_call(model: nn.Module, args: Any, options: Any) -> tuple[Any, ...]:
    """Return a key for the kind of a call: modes, including those of modules, and arguments: `kind_of`.

    The key of a tensor has its dtype, layout, number of dimensions, and whether it requires gradients. Modes include
    the contexts of the call, and the dtype of weights. The order of keywords does not matter.
    """
    within: Any = model.commlib_within
    modes = model.training, bytes(map(_is_training, within)), _contexts(), _dtype(within)
    mode = None if torch.is_inference_mode_enabled() else torch.is_grad_enabled()
    kind = (modes, mode, *[kind_of(one, _kind_of_other) for one in args])
    given = [(name, kind_of(one, _kind_of_other)) for name, one in options.items()]
    return (*kind, "named", frozenset(given)) if given else kind


_is_training = attrgetter("training")


def _contexts() -> Any:
    """Return the contexts that may change a model's path: autocast dtypes, and anomaly detection."""
    if not torch._C._is_any_autocast_enabled():
        return torch.is_anomaly_enabled()
    casts = [torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)]
    return torch.is_anomaly_enabled(), *casts


def _dtype(modules: Any) -> Any:
    """Return the dtype of a model's first weight, as representative of all."""
    for module in modules:
        for weight in module._parameters.values():
            if weight is not None:
                return weight.dtype
    return None


def _kind_of_other(value: Any) -> Any:
    """Return the key of a tensor; of modules with their modes; and of dtypes, devices and the like."""
    kind = type(value)
    if kind is torch.Tensor or issubclass(kind, torch.Tensor):
        layout = value.layout
        memory = value.is_contiguous() if layout is torch.strided else layout
        return kind, value.dtype, memory, value.ndim, value.requires_grad
    if issubclass(kind, nn.Module):
        return SameObject(value), *[(type(one), one.training) for one in islice(value.modules(), _MODULES)]
    if issubclass(kind, fx.Proxy):
        return kind
    return value if kind in _PLAIN else None


_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, OpOverload, OpOverloadPacket)
_DEVICES = "cpu", "cuda", "xpu", "mps"
_MODULES = 500
"""The maximum number of submodules in the key of a module argument."""


def _refuse_failing(error: Exception | None) -> None:
    if error is not None:
        raise error if isinstance(error, CommlibError) else UsageError(f"the model fails: {error}") from error


def _shard_use(layer: Any) -> str:
    """Return whether a sharded layer "takes" this rank's part, or "returns" one; "" if neither."""
    style = layer.style
    if getattr(style, "sequence", None) is not None:
        return "returns"
    if isinstance(style, Row):
        return "" if style.split else "takes"
    is_whole = isinstance(layer, nn.MultiheadAttention) or (
        isinstance(layer, nn.Embedding) and isinstance(style, Vocabulary)
    )
    return "" if is_whole or getattr(style, "gather", True) else "returns"


def check_stages(
    comm: Communicator, model: Any, whole: Callable[[], nn.Module], call: Any, *, calls_layers: bool
) -> None:
    """Check the plan of the sharded layers of a model that a pipeline calls in parts, if it is unchecked.

    model: a module or a list of them. whole: makes all of it one stage, to be called with `call` on the ranks that have
    one. calls_layers: the layers of the model are called directly, with their hooks. Collective over `comm`.
    """
    given = [model] if isinstance(model, nn.Module) else model
    modules = {module for one in given for module in one.modules()}
    if not any(isinstance(getattr(module, "style", None), Style) for module in modules):
        return
    hooks = {id(hook): hook for module in modules if isinstance(hook := getattr(module, "plan_check", None), PlanCheck)}
    called = {id(hook) for module in modules - {model} if calls_layers for hook in module._forward_pre_hooks.values()}
    left = [hook for key, hook in hooks.items() if not hook.done and key not in called]
    for hook in hooks.values():
        hook.in_pieces = True
    own = model._forward_pre_hooks.values() if isinstance(model, nn.Module) else ()
    axes = {hook.axis.comm: hook.axis for hook in left}
    axis = next(iter(axes.values())) if len(axes) == 1 else None
    with _mark_checking(left):
        check_parts(
            comm,
            CheckedModel(whole(), axis),
            call,
            axis=axis,
            checked=not left,
            divided_output=any(hook.divided_output or hook not in own for hook in left),
            warns=any(hook.warns for hook in left),
        )
    for hook in left:
        hook.settle_pieces()


@contextmanager
def _mark_checking(hooks: list[PlanCheck]) -> Iterator[None]:
    """Mark hooks and their copies as being in a check, within the context."""
    for hook in hooks:
        hook.is_checking = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.is_checking = False
