"""OpaqueFunctions: record autograd functions, transforms and redistributions as one step each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _FunctionBase
from torch._functorch import apis, eager_transforms
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from commlib.tensor_parallel.equations import Equation
from commlib.tensor_parallel.recording import StepRecording, replace_attribute
from commlib_torch.tensor import moves
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor._trace_gradient_modes import GradientModes
from commlib_torch.tensor._trace_stack import CallStack
from commlib_torch.tensor._trial import gradients, try_function

TRANSFORMS = (
    (apis, "vmap_impl"), (eager_transforms, "grad_impl"), (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_vjp_with_argnums"), (eager_transforms, "_jvp_with_argnums"),
)  # fmt: skip
"""Function transforms, which use tensors of their own inside, and the modules that refer to them."""


class OpaqueFunctions:
    """Records functions whose operations cannot be traced. The result of a user's function may be of other ranks.

    tries: user-defined autograd functions are tried on shards; in a sharded model they may call other ranks.
    differentiates, recomputes: as for `TraceRecorder`.
    """

    def __init__(
        self, recording: StepRecording, stack: CallStack, *, tries: bool, differentiates: bool, recomputes: bool
    ) -> None:
        self._recording, self._stack = recording, stack
        self._tries, self.differentiates, self._recomputes = tries, differentiates, recomputes
        self._modes = GradientModes(recording, stack)
        self._tried: dict[tuple[Any, torch.Size, str], Equation | None] = {}
        self.communicates = False
        """Whether ranks communicated in such a function."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record these functions within the context.

        A user's function is intercepted below its `apply`, of which a model may have stored a reference.
        """
        with ExitStack() as stack:
            stack.enter_context(self._modes.watch())
            opaque: Any = classmethod(self._opaque(_apply, "unseen"))
            stack.enter_context(replace_attribute(_SingleLevelFunction, "apply", opaque))
            stack.enter_context(
                replace_attribute(moves, "redistribute", self._opaque(moves.redistribute, "unseen", moves=True))
            )
            for owner, transform in TRANSFORMS:
                stack.enter_context(
                    replace_attribute(owner, transform, self._opaque(getattr(owner, transform), "unknown"))
                )
            yield

    def _opaque(self, function: Any, kind: str, *, moves: bool = False) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            if not self._stack.is_running:
                return function(*args, **options)
            package = str(getattr(args[0] if args else None, "__module__", "")).partition(".")[0]
            if package == "torch" and kind == "unseen" and not moves:  # such as one that recomputes in backward
                if args[0] is not CheckpointFunction:
                    return function(*args, **options)
                if not self._recomputes:
                    return args[1](*args[3:])
                with self._modes.ignore_one():  # it computes all gradients later
                    return function(*args, **options)
            own, outermost = moves or package.startswith("commlib"), not self._stack.units
            self._stack.units.append("")
            try:
                result = function(*args, **options)
            finally:
                self._stack.units.pop()
            if outermost:
                inputs_seen, self._stack.inputs = [*tensors_in([args, options]), *self._stack.inputs], []
                known = {id(tensor): tensor for tensor in inputs_seen if self._recording.has_number(tensor)}
                inputs, what = () if own else known.values(), getattr(args[0] if args else None, "__name__", "")
                text = f"{what or 'a function'} in {self._stack.place}"
                self.communicates |= bool(own)
                alone = len(known) == 1 and not own and kind == "unseen" and self._tries
                equation = self._trial(function, args, result) if alone else None
                results, line = tensors_in(result), self._recording.line()
                self._recording.add("", kind, inputs, results, text=text, place=line, equation=equation)
                if self.differentiates and kind == "unseen" and known and not (own or self._stack.hides):
                    self.note_gradients(partial(function, args[0]), args[1:], text)
            return result

        return called

    def _trial(self, function: Any, args: Any, result: Any) -> Equation | None:
        """Find the description of an autograd function of one tensor, (class, ...), by one trial on shards."""
        places = [at for at, one in enumerate(args) if isinstance(one, Tensor)]
        others = [one for at, one in enumerate(args) if at not in (0, *places)]
        if len(places) != 1 or not isinstance(result, Tensor) or not all(map(_is_plain, others)):
            return None
        (at,) = places
        key = args[0], args[at].shape, repr(others)
        if key not in self._tried:
            with self._stack.pause():
                self._tried[key] = try_function(lambda x: function(*args[:at], x, *args[at + 1 :]), args[at], result)
        return self._tried[key]

    def note_gradients(self, function: Any, args: Any, text: str) -> None:
        """Record the gradients from a function with a user-defined backward: they are compared like values."""
        tensors = [one for one in args if isinstance(one, Tensor) and self._recording.has_number(one)]
        tensors = [one for one in tensors if one.is_floating_point() or one.is_complex()]
        if not tensors or not all(isinstance(one, Tensor) or _is_plain(one) for one in args):
            return
        with self._stack.pause():
            derivatives = gradients(function, args, tensors)
        text, line = f"the gradient of {text}", self._recording.line()
        for one, gradient in zip(tensors, derivatives, strict=True):
            self._recording.add("", "gradient", [one], [gradient], text=text, place=line)


def _apply(function: Any, *args: Any) -> Any:
    """Return the last step of `apply` of an autograd function class."""
    return vars(_FunctionBase)["apply"].__get__(None, function)(*args)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
