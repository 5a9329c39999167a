"""Checking: hold a plan of a PyTorch model against the rules, before it is divided or at its first call."""

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
from commlib.comparison.agreement import together
from commlib.errors import CommlibError, UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.checks.alike import unwatched
from commlib.tensor_parallel.checks.checks import (
    called_outside,
    check_first_call,
    check_parts,
    failed_again,
    failed_alone,
    not_checked,
    put_later,
    too_many_kinds,
)
from commlib.tensor_parallel.checks.guide import Guide
from commlib.tensor_parallel.checks.kinds import KINDS, Kinds, Same, kind_of
from commlib.tensor_parallel.checks.runs import Outputs, Run
from commlib.tensor_parallel.checks.seen_weights import seen_weights
from commlib.tensor_parallel.run.division import Division
from commlib.tensor_parallel.styles import Row, Style, Vocabulary
from commlib.tensor_parallel.trace import Trace
from commlib_torch._bridge import host_array
from commlib_torch._uncompiled import uncompiled
from commlib_torch.tensor._alike import has_numbers
from commlib_torch.tensor._apart import apart
from commlib_torch.tensor._forward import forward
from commlib_torch.tensor._put_later import tell
from commlib_torch.tensor._weights import divided_weights
from commlib_torch.tensor.layers import check_layers, find_layer
from commlib_torch.tensor.tracing import attempted, styles_in, tensors_in
from commlib_torch.tensor.verify import ran


class Traced:
    """A model of PyTorch for `commlib.tensor_parallel.checks.checks`: a call is (arguments, options).

    axis: among whose ranks it is, or will be, divided; None where numbers are not compared.
    """

    def __init__(self, model: nn.Module, axis: Axis | None = None) -> None:
        self._model, self._axis = model, axis
        self.error: Exception | None = None
        """What its last attempt failed with."""
        self.way: Hashable = None
        """Which way the model went when it was last run."""
        self._stands_in = True

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[Trace, Exception | None]:
        """Return the model's trace."""
        args, options = call
        seen = seen_weights(divided_weights(self._model, styles))
        trace, self.error = attempted(self._model, args, options, styles, seen)
        self.way = trace.way
        return trace, self.error

    def run(self, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
        """Run the model forward and backward."""
        found = ran(self._model, call, styles, outputs)
        self.way = found.trace.way
        return found

    def forward(self, call: Any, styles: Mapping[str, Style], guide: Guide | None, *, evaluate: bool) -> Run | None:
        """Run the model forward, as a whole or as one rank. Collective.

        Weights that are zeros have other numbers for that, unless the whole fails with them, or gives no numbers.
        """
        if self._axis is None:
            return None
        run = partial(forward, self._model, self._axis, call, styles, guide, evaluate=evaluate)
        found = run(stands_in=self._stands_in)
        if guide is None and self._stands_in:
            self._stands_in = all(self._axis.comm.all_gather_object(found is None or found.is_finite))
            found = found if self._stands_in else run(stands_in=False)
        return found

    def apart(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the call of the whole, and that of this rank with its parts. Collective."""
        return None if self._axis is None else apart(self._axis, call, dims, is_part=is_part)

    def given(self, call: Any) -> list[Any]:
        """Return the values of tensors, also of those within structures."""
        tensors = tensors_in(call)
        return [host_array(one) for one in tensors] if all(map(has_numbers, tensors)) else []

    def room(self) -> int:
        """Return how much memory is free on the GPU where the model is; any number if that is the host."""
        device = next((weight.device for weight in self._model.parameters()), torch.device("cpu"))
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize

    def styles(self) -> dict[str, Style]:
        """Return the styles of the layers that are divided."""
        return styles_in(self._model)

    def check_layer(self, name: str, style: Style, axis: Axis) -> None:
        """Raise UsageError unless a layer can be divided in a style among the ranks of an axis."""
        module = self._model.get_submodule(name)
        check_layers([(name, module, style, find_layer(name, module, style))], Division(axis))


class PlanCheck:
    """Hooks that check a divided model's plan at the first call of each kind. Each such look runs the model once more.

    A model that was evaluated first may do other things when it is trained, or when it is called with a flag. Layers
    that are called outside of the model's own calls are warned of: nobody has looked at what is done there.
    """

    @classmethod
    def of(
        cls,
        model: nn.Module,
        axis: Axis,
        *,
        divided_output: bool,
        checked: Any = None,
        way: Hashable = None,
        evaluated: bool = False,
    ) -> None:
        """Put one on a model. checked: a call that was checked, as (arguments, options); `evaluated`: in that mode.

        way: that of this call, see `Trace.way`.
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
        model.register_forward_hook(check.left, always_call=True)
        tell(check, model)

    def __init__(self, axis: Axis, divided_output: bool) -> None:
        self.divided_output, self.warns = divided_output, axis.rank == 0
        self.inside = 0
        """How many calls of the model are running, one within the other."""
        self.in_pieces = False
        """A pipeline calls the layers, which has checked that."""
        self.axis = axis
        self._kinds = Kinds()
        self.is_checking = False
        """Somebody looks at a call."""
        self._model = ""
        self._told: set[str] = set()
        self._later = self._failed = ""

    @property
    def done(self) -> bool:
        """The plan was checked, for one kind of call at least."""
        return bool(self._kinds.looks)

    @uncompiled  # else a compiler would make one program for each kind
    def __call__(self, model: nn.Module, args: Any, options: Any) -> None:
        """Check the plan for this call, if it is the first of its kind."""
        self.inside += 1
        kind = kind_of_call(model, args, options)
        if kind not in self._kinds and not self.is_checking:
            self._meet(model, (args, options), kind)

    @uncompiled
    def left(self, model: nn.Module, args: Any, result: Any) -> None:
        """Hear that a call of the model has ended. result: None if it has failed."""
        self.inside = max(0, self.inside - 1)
        if self._failed and not self.inside:
            if result is not None and self.warns and self.axis.size > 1 and _FAILED not in self._told:
                self._told.add(_FAILED)
                warnings.warn(failed_alone(self._model, self._failed), stacklevel=5)
            self._failed = ""

    def _meet(self, model: nn.Module, call: Any, kind: tuple[Any, ...]) -> None:
        if torch._C._are_functorch_transforms_active() or _is_traced(call):  # an error tells the user by and by
            return  # the first call that is not traced is checked
        kind = self._kind_now(model, call, kind)
        modes, with_gradients, *others = kind
        known = modes, True, *others
        if not with_gradients and known in self._kinds and self._goes(model, call, self._kinds.way(known)):
            self._kinds.add(kind)
        elif not self._kinds.too_many:
            self._look(model, call, kind)
        elif self.warns and self.axis.size > 1 and _MANY not in self._told:
            self._told.add(_MANY)
            warnings.warn(too_many_kinds(self._model, KINDS), stacklevel=7)

    def _kind_now(self, model: nn.Module, call: Any, kind: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the kind of a call again if other modules are within the model by now."""
        within = tuple(model.modules())[1:]
        if len(within) == len(model.commlib_within) and all(map(is_, within, model.commlib_within)):  # type: ignore[arg-type]
            return kind
        model.commlib_within = within  # type: ignore[assignment]
        tell(self, model)
        return kind_of_call(model, *call)

    def _look(self, model: nn.Module, call: Any, kind: tuple[Any, ...]) -> None:
        """Check the plan for a call of a kind, which is known then, unless the call fails: the next one may not."""
        traced = Traced(model, self.axis)
        try:
            with _checking([self]):
                self._failed = check_first_call(
                    self.axis, traced, call, divided_output=self.divided_output, warns=self.warns
                )
                if self._later:
                    together(self.axis.comm, lambda: _refuse_failing(traced.error))
        except UsageError as error:
            if not self._later:
                raise
            raise UsageError(put_later(self._later, f"{error}")) from error
        self._later = ""
        if not self._failed:
            self._kinds.settle(kind, traced.way)
        elif self._kinds.miss(kind) and self.warns and self.axis.size > 1 and _FAILED not in self._told:
            self._told.add(_FAILED)
            warnings.warn(failed_again(self._model, self._failed), stacklevel=7)

    def _goes(self, model: nn.Module, call: Any, way: Hashable) -> bool:
        """Return whether a call goes the way that one with gradients went, if it is known, on all ranks. Collective."""
        if way is None:
            return True
        traced = Traced(model, self.axis)
        with _checking([self]), unwatched(self.axis):
            traced.attempt(call, traced.styles())
            return all(self.axis.comm.all_gather_object(traced.way == way))

    def came_later(self, what: str) -> None:
        """Hear that something was put around a divided layer, or onto it: what was checked is no more what is called.

        what: in words. What the model itself does in its calls is no news.
        """
        if not self.inside:
            self._kinds.forget()
            self._later = self._later or what

    def settle_pieces(self) -> None:
        """Note that the plan was checked for a pipeline."""
        self._kinds.looks = max(1, self._kinds.looks)

    def used(self, layer: nn.Module, args: Any) -> None:
        """Hear that a divided layer is called outside of the model's own calls: warn, once for each that has parts.

        What backward computes again is none of that.
        """
        is_told = not self.warns or self.is_checking or self.in_pieces or self.axis.size == 1
        if is_told or torch._C._current_graph_task_id() != -1 or any(isinstance(one, fx.Proxy) for one in args):
            return
        if _generates():
            return
        name = str(layer.layer_name)
        if not self.done:
            if _UNCHECKED not in self._told:
                self._told.add(_UNCHECKED)
                warnings.warn(not_checked(self._model, name), stacklevel=6)  # who calls the layer
        elif name not in self._told and not self.divided_output and (does := _with_part(layer)):
            self._told.add(name)
            warnings.warn(called_outside(self._model, name, takes=does == "takes"), stacklevel=6)


def _generates() -> bool:
    """Return whether Hugging Face's `generate` is running, which calls the encoder of a model by itself."""
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
    except (RecursionError, TypeError):  # what is within itself, or of a class without a hash
        return False


def kind_of_call(model: nn.Module, args: Any, options: Any) -> tuple[Any, ...]:
    """Return what tells a call from those of other kinds: modes, of modules within, too, and what is given: `kind_of`.

    Of tensors that is their dtype and layout, how many dimensions they have, and whether they have a gradient. Modes
    are also the contexts of the call, and the dtype of weights. The order of keywords says nothing.
    """
    within: Any = model.commlib_within
    modes = model.training, bytes(map(_is_training, within)), _contexts(), _dtype(within)
    mode = None if torch.is_inference_mode_enabled() else torch.is_grad_enabled()
    kind = (modes, mode, *[kind_of(one, _kind_of_other) for one in args])
    given = [(name, kind_of(one, _kind_of_other)) for name, one in options.items()]
    return (*kind, "named", frozenset(given)) if given else kind


_is_training = attrgetter("training")


def _contexts() -> Any:
    """Return by which contexts a model may go: to which dtypes they cast, and whether they look for anomalies."""
    if not torch._C._is_any_autocast_enabled():
        return torch.is_anomaly_enabled()
    casts = [torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)]
    return torch.is_anomaly_enabled(), *casts


def _dtype(modules: Any) -> Any:
    """Return the dtype of a model's first weight: it changes with those of the others."""
    for module in modules:
        for weight in module._parameters.values():
            if weight is not None:
                return weight.dtype
    return None


def _kind_of_other(value: Any) -> Any:
    """Return what is told of a tensor; of modules which one, and their modes; and dtypes, devices, and their like."""
    kind = type(value)
    if kind is torch.Tensor or issubclass(kind, torch.Tensor):
        layout = value.layout
        lies = value.is_contiguous() if layout is torch.strided else layout
        return kind, value.dtype, lies, value.ndim, value.requires_grad
    if issubclass(kind, nn.Module):
        return Same(value), *[(type(one), one.training) for one in islice(value.modules(), _MODULES)]
    if issubclass(kind, fx.Proxy):
        return kind
    return value if kind in _PLAIN else None


_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, OpOverload, OpOverloadPacket)
_DEVICES = "cpu", "cuda", "xpu", "mps"
_MODULES = 500
"""Of a module that is given, those within that are looked at."""


def _refuse_failing(error: Exception | None) -> None:
    if error is not None:
        raise error if isinstance(error, CommlibError) else UsageError(f"the model fails: {error}") from error


def _with_part(layer: Any) -> str:
    """Return whether a divided layer "takes" this rank's part, or "returns" one; "" if neither."""
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
    """Check the plan of the divided layers of a model that a pipeline calls part by part, if nobody has yet.

    model: a module or a list of them. whole: makes all of it one part, to be called as `call` says on the ranks that
    have one. calls_layers: the layers of the model are called as they are, with their hooks. Collective over `comm`.
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
    with _checking(left):
        check_parts(
            comm,
            Traced(whole(), axis),
            call,
            axis=axis,
            checked=not left,
            divided_output=any(hook.divided_output or hook not in own for hook in left),
            warns=any(hook.warns for hook in left),
        )
    for hook in left:
        hook.settle_pieces()


@contextmanager
def _checking(hooks: list[PlanCheck]) -> Iterator[None]:
    """Let hooks know that their plans are being checked, copies of them included."""
    for hook in hooks:
        hook.is_checking = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.is_checking = False
