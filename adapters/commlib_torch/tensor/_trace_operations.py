"""OperationRecorder: record PyTorch's functions that run between the layers of a model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from commlib.tensor_parallel import equations
from commlib.tensor_parallel.checks.weight_shapes import SeenWeights, WeightShape
from commlib.tensor_parallel.lengths import Length
from commlib.tensor_parallel.recording import StepRecording, replace_attribute
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor._operations import ASKING, NUMBERS, FunctionCall, describe_call
from commlib_torch.tensor._trace_functions import OpaqueFunctions
from commlib_torch.tensor._trace_lines import is_own_call
from commlib_torch.tensor._trace_retained import RetainedValues
from commlib_torch.tensor._trace_stack import CallStack

SHAPES = frozenset(("shape", "size", "numel", "nelement", "stride", "nbytes"))
"""Attributes that give a tensor's size or layout."""


class OperationRecorder(TorchFunctionMode):
    """Intercepts each function of PyTorch. weights: the weight shapes that the model sees; its queries are recorded."""

    def __init__(
        self,
        recording: StepRecording,
        stack: CallStack,
        retained: RetainedValues,
        functions: OpaqueFunctions,
        weights: SeenWeights,
    ) -> None:
        super().__init__()
        self._recording, self._stack, self._retained, self._functions = recording, stack, retained, functions
        self._weights, self._shape_requests = weights, set[tuple[str, str]]()

    def watch_parameters(self) -> AbstractContextManager[None]:
        """Record the making of parameters within the context."""
        return replace_attribute(nn.Parameter, "__new__", self._detached(nn.Parameter.__new__))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not self._stack.is_running:
            return func(*args, **options)
        given = tensors_in([args, options])
        versions = [_version(tensor) for tensor in given]
        try:
            result = func(*args, **options)
        except Exception:
            if not self._stack.units:
                self._note(_name(func), args, options, [])
            raise
        if self._stack.units:
            self._stack.inputs += tensors_in([args, options]) if self._stack.units == [""] else ()
            if self._retained.looks_inside:
                self._retained.inner += tensors_in(result)
            return result
        name = _name(func)
        if name in SHAPES and (seen := self._weights.get(id(args[0]))) is not None:
            return self._note_shape_request(seen, func, name, result, args, options)
        if name in ("shape", "size"):
            lengths = self._measured(args[0])
            return lengths if isinstance(result, torch.Size) else lengths[args[1] if len(args) > 1 else options["dim"]]
        if name == "iter":
            result = list(result)
        written = [tensor for tensor, version in zip(given, versions, strict=True) if _version(tensor) != version]
        if name == "setitem" or getattr(func, "__name__", "") == "__set__":
            written = given[:1]
        if outputs := tensors_in(result) or written:
            self._note(name, args, options, outputs)
            if name in ("detach", "data"):
                self._recording.detach(outputs[0])
            for tensor in written:
                self._retained.note_written(tensor)
            if self._functions.differentiates and _is_custom(func):
                self._functions.note_gradients(partial(func, **options), args, f"{name} in {self._stack.place}")
        elif name in NUMBERS and given and not is_own_call():
            text = f"{NUMBERS[name]} in {self._stack.place}"
            dim = 0 if name == "len" else -1
            self._recording.add("", "number", given, (), text=text, place=self._recording.line(), dim=dim)
        return iter(result) if name == "iter" else result

    def _note_shape_request(self, seen: WeightShape, func: Any, name: str, result: Any, args: Any, options: Any) -> Any:
        """Record a query of a sharded weight's shape outside of its layer; return the shape that the model sees."""
        if is_own_call():  # a sharded layer that reads its own weights
            return result
        if (request := (seen.layer, self._recording.line())) not in self._shape_requests:
            self._shape_requests.add(request)
            self._recording.add(seen.layer, "shape", (), (), text="the shape of its weight", place=request[1])
        if seen.shape is None:
            return result
        like = torch.empty(seen.shape, device="meta")
        with torch._C.DisableTorchFunction():
            return func(like, *args[1:], **options)

    def _note(self, name: str, args: Any, options: Any, outputs: list[Tensor]) -> None:
        inputs = tensors_in([args, options])
        lengths = self._measured(inputs[0]) if inputs else ()
        if name == "glu":
            return self._note_gate(FunctionCall(name, args, options, inputs, outputs))
        fields = {"inputs": inputs, **describe_call(FunctionCall(name, args, options, inputs, outputs, lengths))}
        for one in () if name in ASKING else (*args, *options.values()):
            if isinstance(one, Length):
                one.note_use()
        text = f"{name} in {self._stack.place}"
        self._recording.add("", outputs=outputs, text=text, place=self._recording.line(), **fields)

    def _note_gate(self, called: FunctionCall) -> None:
        """Record a gated unit: the halves of a fused dimension, and their product."""
        dim = called.argument(1, "dim", -1)
        halves = called.inputs[0].chunk(2, dim)
        text, place = f"{called.name} in {self._stack.place}", self._recording.line()
        self._recording.add("", "split", called.inputs, halves, text=text, place=place, dim=dim)
        terms = equations.pointwise(*(tuple(one.shape) for one in halves))
        self._recording.add("", "equation", halves, called.outputs, text=text, place=place, equation=terms)

    def _measured(self, tensor: Tensor) -> torch.Size:
        """Return a tensor's shape as numbers that remember their origin."""
        number = self._recording.number_of(tensor)
        return tensor.shape if number is None else torch.Size(self._recording.lengths_of(number, tensor.shape))

    def _detached(self, function: Any) -> Any:
        """Wrap the function that makes a parameter from a tensor: it is recorded as a call of `detach`."""

        def called(kind: Any, *args: Any, **options: Any) -> Any:
            result, given = function(kind, *args, **options), tensors_in([args, options])
            if given and self._stack.is_running and not self._stack.units:
                self._note("detach", (given[0],), {}, [result])
                self._recording.detach(result)
            return result

        return called


def _version(tensor: Tensor) -> int:
    """Return a tensor's version counter, if it has one."""
    return -1 if tensor.is_inference() else tensor._version


def _is_custom(func: Any) -> bool:
    """Return whether a function is an operator of another library, with a possible custom backward."""
    full = str(getattr(func, "_qualified_op_name", "") or getattr(func, "namespace", ""))
    return full.partition("::")[0] not in ("", "aten", "prims", "prim", "quantized")


def _name(func: Any) -> str:
    """Return a function's base name without marks of methods, properties and in-place forms: "add" for `__iadd__`."""
    if getattr(func, "__name__", "") == "__get__":
        return str(getattr(func.__self__, "__name__", ""))
    full = resolve_name(func) or getattr(func, "__name__", "")
    return str(full).removesuffix(".default").rpartition(".")[2].strip("_")
