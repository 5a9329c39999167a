"""Checking: hold a plan of a PyTorch model against the rules, before it is divided or at its first call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from commlib.communicator import Communicator
from commlib.functional.axis import Axis
from commlib.functional.checks import check_first_call, check_parts, not_checked
from commlib.functional.division import Division
from commlib.functional.guide import Guide
from commlib.functional.runs import Outputs, Run
from commlib.tensor.styles import Style
from commlib.tensor.trace import Trace
from commlib_torch._bridge import host_array
from commlib_torch._uncompiled import uncompiled
from commlib_torch.tensor._alike import has_numbers
from commlib_torch.tensor._forward import forward
from commlib_torch.tensor.layers import check_layers, find_layer
from commlib_torch.tensor.tracing import attempted, styles_in, tensors_in
from commlib_torch.tensor.verify import ran


class Traced:
    """A model of PyTorch for `commlib.functional.checks`: a call is (arguments, options).

    axis: among whose ranks it is, or will be, divided; None where numbers are not compared.
    """

    def __init__(self, model: nn.Module, axis: Axis | None = None) -> None:
        self._model, self._axis = model, axis

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[Trace, Exception | None]:
        """Return the model's trace."""
        args, options = call
        return attempted(self._model, args, options, styles)

    def run(self, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
        """Run the model forward and backward."""
        return ran(self._model, call, styles, outputs)

    def forward(self, call: Any, styles: Mapping[str, Style], guide: Guide | None, *, evaluate: bool) -> Run | None:
        """Run the model forward, as a whole or as one rank."""
        return None if self._axis is None else forward(self._model, self._axis, call, styles, guide, evaluate=evaluate)

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


class AtFirstCall:
    """A hook that checks a divided model's plan at its first calls, and goes. Each runs the model once more.

    A model that was evaluated first may do other things when it is trained: it is checked once more then.
    """

    @classmethod
    def of(cls, model: nn.Module, axis: Axis, *, divided_output: bool) -> None:
        """Put one on a model."""
        hook = cls(axis, divided_output)
        hook._model = type(model).__name__
        for module in model.modules():
            if isinstance(getattr(module, "style", None), Style):
                module.plan_check = hook  # type: ignore[assignment]  # no module
        hook._handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def __init__(self, axis: Axis, divided_output: bool) -> None:
        self.divided_output, self.warns = divided_output, axis.rank == 0
        self._axis = axis
        self._checked: set[tuple[bool, bool]] = set()
        """In which modes: training, and with gradients."""
        self._is_checking = False
        self._model = ""
        self._handle: Any = None  # copied with the model and its hooks

    @property
    def done(self) -> bool:
        """The plan was checked, in one mode at least."""
        return bool(self._checked)

    def __call__(self, model: nn.Module, args: Any, options: Any) -> None:
        """Check the plan for this call."""
        mode = model.training, torch.is_grad_enabled()
        is_transformed = torch._C._are_functorch_transforms_active()  # an error tells the user by and by
        if mode not in self._checked and not (self._is_checking or is_transformed):
            self._check(model, (args, options), mode)

    @uncompiled
    def _check(self, model: nn.Module, call: Any, mode: tuple[bool, bool]) -> None:
        if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(call)):
            return  # the first call that is not traced is checked
        self._is_checking = True
        try:
            traced = Traced(model, self._axis)
            check_first_call(self._axis, traced, call, divided_output=self.divided_output, warns=self.warns)
        finally:
            self._is_checking = False
        self.settle(mode)

    def settle(self, mode: tuple[bool, bool] = (True, True)) -> None:
        """Note that the plan was checked. With training and gradients all was, and the hook goes."""
        self._checked.add(mode)
        if mode == (True, True):
            self._handle.remove()

    def used(self, name: str) -> None:
        """Hear that a divided layer is used: warn, once, if that is not within a call that is checked."""
        if not (self.done or self._is_checking or not self.warns):
            self.warns = False
            warnings.warn(not_checked(self._model, name), stacklevel=6)  # who calls the layer


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
    hooks = {
        id(hook): hook for module in modules if isinstance(hook := getattr(module, "plan_check", None), AtFirstCall)
    }
    called = {id(hook) for module in modules - {model} if calls_layers for hook in module._forward_pre_hooks.values()}
    left = [hook for key, hook in hooks.items() if not hook.done and key not in called]
    own = model._forward_pre_hooks.values() if isinstance(model, nn.Module) else ()
    axes = {hook._axis.comm: hook._axis for hook in left}
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
        hook.settle()


@contextmanager
def _checking(hooks: list[AtFirstCall]) -> Iterator[None]:
    """Let hooks know that their plans are being checked, copies of them included."""
    for hook in hooks:
        hook._is_checking = True
    try:
        yield
    finally:
        for hook in hooks:
            hook._is_checking = False
