"""Tracing: run a model once on an example, and return its operations as a `ModelTrace`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.tensor_parallel.checks.guided_run import GuidedRun
from commlib.tensor_parallel.checks.weight_shapes import SeenWeights
from commlib.tensor_parallel.lengths import Length
from commlib.tensor_parallel.recording import StepRecording
from commlib.tensor_parallel.styles import PerRank, Style
from commlib.tensor_parallel.trace import ModelTrace
from commlib_torch._graph_breaks import suspend_compile
from commlib_torch._trial_run import copy_arguments, preserve_model
from commlib_torch.tensor import _leaves
from commlib_torch.tensor._arguments import slicings_in
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor._numbers import numbers_in, styles_of_numbers
from commlib_torch.tensor._trace_functions import OpaqueFunctions
from commlib_torch.tensor._trace_layers import LayerCalls
from commlib_torch.tensor._trace_lines import user_line
from commlib_torch.tensor._trace_operations import OperationRecorder
from commlib_torch.tensor._trace_retained import RetainedValues
from commlib_torch.tensor._trace_slices import ArgumentSlices
from commlib_torch.tensor._trace_stack import CallStack
from commlib_torch.tensor._weight_sharing import find_tied


def try_trace(
    model: nn.Module,
    args: Sequence[Any],
    options: Mapping[str, Any],
    styles: Collection[str] = (),
    weights: SeenWeights | None = None,
) -> tuple[ModelTrace, Exception | None]:
    """Run a model once; return its layers and the operations between them in the order of execution.

    args, options: its arguments. styles: styles of layers to record as units. weights: those whose shape queries are
    recorded. Any control flow is supported: the trace has the operations that ran. If the model fails, the trace ends
    at the failing step and has the error. It runs with gradients if the caller computes some, because the model may
    depend on that, and also without if it seems to store values, because a graph may be what holds them. All state is
    restored: see `preserve_model`. A sharded model runs its collectives.
    """
    trace, error = _attempted(model, args, options, styles, weights)
    if trace.retained and torch.is_grad_enabled():
        with torch.no_grad():
            without = _attempted(model, args, options, styles, weights)[0]
        if without.way == trace.way:  # otherwise tensors needed only for gradients would seem to be stored
            trace = replace(trace, retained=tuple(value for value in trace.retained if value in without.retained))
    return trace, error


def _attempted(
    model: nn.Module,
    args: Sequence[Any],
    options: Mapping[str, Any],
    styles: Collection[str],
    weights: SeenWeights | None,
) -> tuple[ModelTrace, Exception | None]:
    learns = frozenset(at for at, one in enumerate(tensors_in([*args, *options.values()])) if one.requires_grad)
    recorder = TraceRecorder(model, styles, weights=weights, tries=True)
    with suspend_compile(), preserve_model(model, args, options):
        try:
            return replace(
                recorder.run(copy_arguments(tuple(args)), copy_arguments(dict(options)))[0], learns=learns
            ), None
        except Exception as error:
            return replace(recorder.trace_of(()), learns=learns), error
        finally:
            recorder.forget()


def styles_in(model: nn.Module) -> dict[str, Style]:
    """Return the styles of layers and numbers that are already sharded."""
    given = {name: getattr(module, "style", None) for name, module in model.named_modules()}
    return (
        {name: style for name, style in given.items() if isinstance(style, Style)}
        | styles_of_numbers(model)
        | {name: slicing.style for name, slicing in slicings_in(model).items()}
    )


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model. Raises UsageError unless the batch is a tensor, tuple or dict."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise UsageError(f"expected a tensor, or a tuple or dict of the model's arguments, got {type(batch).__name__}")


class TraceRecorder:
    """Records the steps of a model: its layers, by hooks, and the functions of PyTorch between them.

    whole: run a sharded model as the unsharded one. guide: overrides layer calls. calls: counts calls of the ranks
    among which the model is sharded. ranks: run as this one of so many. keeps: see `layer_values`. differentiates:
    record the gradients from user-defined autograd functions. recomputes: False to run re-entrant checkpoints without
    recomputation, because they support only `backward()`. weights: the weight shapes that the model sees; its queries
    are recorded. tries: run layers with sharded sequences on shards.
    """

    def __init__(
        self,
        model: nn.Module,
        styles: Collection[str] = (),
        *,
        whole: bool | None = None,
        guide: GuidedRun | None = None,
        calls: Callable[[], int] = int,
        ranks: tuple[int, int] | None = None,
        keeps: bool = False,
        differentiates: bool = False,
        recomputes: bool = True,
        weights: SeenWeights | None = None,
        tries: bool = False,
    ) -> None:
        is_unsharded = not styles_in(model)
        self._model, self._calls = model, calls
        self._whole = is_unsharded if whole is None else whole
        named = styles if isinstance(styles, Mapping) else {}
        self._has_numbers = not styles or any(isinstance(style, PerRank) for style in named.values())
        self._stack = stack = CallStack()
        self._recording = recording = StepRecording(
            _shape_of, _TensorSources(model).source, is_discrete=_is_discrete, line=user_line
        )
        self._retained = RetainedValues(recording)
        self._functions = OpaqueFunctions(
            recording, stack, tries=is_unsharded, differentiates=differentiates, recomputes=recomputes
        )
        self._slices = ArgumentSlices(recording, stack, model, styles, whole=self._whole, ranks=ranks)
        self._layers = LayerCalls(
            recording, stack, self._retained, self._slices, styles, guide=guide, calls=calls, keeps=keeps, tries=tries
        )
        self._operations = OperationRecorder(recording, stack, self._retained, self._functions, weights or {})
        self.tensors = recording.tensors
        """All values, by number."""
        self.layer_values = self._layers.values
        """Inputs and outputs of layers, by value number: copies, because a model may overwrite them."""
        self._moves = False

    def run(self, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[ModelTrace, Any]:
        """Run the model with its current arguments; return the trace and the model's result."""
        for tensor in tensors_in([*args, *options.values()]):
            self._recording.add("", "given", (), (tensor,), text="an argument")
        first = self._calls()
        with (
            self._stack.run(),
            self._layers.watch(self._model),
            self._functions.watch(),
            self._slices.watch(),
            self._operations.watch_parameters(),
            self._measuring(),
            self._operations,
        ):
            result = self._model(*args, **options)
        self._moves |= self._calls() - first > self._layers.inside
        self._stack.inputs = []
        return self.trace_of(result, self._retained.find(self._model, args, options, result)), result

    @property
    def communicates(self) -> bool:
        """Whether ranks communicated outside of layers."""
        return self._moves or self._functions.communicates

    @property
    def hides(self) -> bool:
        """Whether a layer with a style ran inside an operation that cannot be traced."""
        return self._stack.hides

    def forget(self) -> None:
        """Drop all values and their graphs, which would keep the shapes of weights."""
        self.tensors.clear()
        self.layer_values.clear()
        self._stack.inputs.clear()
        self._retained.clear()

    def trace_of(self, result: Any, retained: Collection[int] = ()) -> ModelTrace:
        """Return the trace so far. retained: values that something other than the model's results holds."""
        return self._recording.trace(tensors_in(result), find_tied(self._model), whole=self._whole, retained=retained)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Give module attributes that a plan may change numbers that remember their origin, within the context."""
        numbers = numbers_in(self._model) if self._has_numbers else {}
        values = {name: number.value for name, number in numbers.items()}
        for name, length in self._recording.attribute_lengths(values).items():
            numbers[name].put(length)
        try:
            yield
        finally:
            for name, number in numbers.items():
                if number.name in vars(number.module) and type(number.value) is Length:
                    number.put(values[name])


class _TensorSources:
    """The sources of tensors that no step makes: the weights of a model by their layers, and its constants."""

    def __init__(self, model: nn.Module) -> None:
        self._weights, self._constants = dict[int, str](), set[int]()
        for name, module in model.named_modules():
            for weight in module.parameters(recurse=False):
                if _leaves.is_leaf(module) or id(weight) not in self._weights:  # another model may use it as a layer
                    self._weights[id(weight)] = name
            self._constants |= {id(tensor) for tensor in (*module.buffers(recurse=False), *vars(module).values())}

    def source(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return the kind of the step that a tensor comes from, and its layer; None if unknown."""
        if id(tensor) in self._weights:
            return "weight", self._weights[id(tensor)]
        return ("constant", "") if id(tensor) in self._constants else None


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _is_discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
