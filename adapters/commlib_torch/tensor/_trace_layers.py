"""LayerCalls: record each call of a leaf, a layer without traced operations inside, as one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from commlib.tensor_parallel.checks.guided_run import GuidedRun, is_guided
from commlib.tensor_parallel.recording import StepRecording
from commlib.tensor_parallel.trace import TraceStep
from commlib_torch.tensor import _leaves
from commlib_torch.tensor._guided_calls import GuidedCall, replace_tensors
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor._shard_trial import try_on_shards
from commlib_torch.tensor._trace_retained import RetainedValues
from commlib_torch.tensor._trace_slices import ArgumentSlices
from commlib_torch.tensor._trace_stack import CallStack


class _Layer(NamedTuple):
    """A module of the model. is_own: its forward is user-defined."""

    name: str
    is_leaf: bool
    is_own: bool


class LayerCalls:
    """Records the calls of a model's layers by hooks. tries: run layers with sharded sequences on shards.

    guide, calls, keeps: as for `TraceRecorder`.
    """

    def __init__(
        self,
        recording: StepRecording,
        stack: CallStack,
        retained: RetainedValues,
        slices: ArgumentSlices,
        styles: Collection[str],
        *,
        guide: GuidedRun | None,
        calls: Callable[[], int],
        keeps: bool,
        tries: bool,
    ) -> None:
        self._recording, self._stack, self._retained, self._slices = recording, stack, retained, slices
        self._styles, self._calls, self._keeps, self._tries = styles, calls, keeps, tries
        self._guided = None if guide is None else GuidedCall(guide)
        self._first = 0
        """The number of calls of the ranks before the running leaf."""
        self.inside = 0
        """The number of calls of the ranks that leaves have made, but not those of a user's code in them."""
        self.values: dict[int, Tensor] = {}
        """Inputs and outputs of leaves, by value number: copies, because a model may overwrite them."""

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Put hooks on all layers, within the context."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                is_leaf = name in self._styles or _leaves.is_leaf(module)
                layer = _Layer(name, is_leaf, is_leaf and _leaves.has_own_forward(module))
                before, after = partial(self._before, layer), partial(self._after, layer)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                last = module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True)
                stack.callback(last.remove)  # prepended, so that effects of user hooks on a layer's result are seen
            yield

    def _before(self, layer: _Layer, module: nn.Module, args: Any, options: Any) -> Any:
        if not self._stack.is_running:
            return None
        self._stack.modules.append(layer.name)
        if not layer.is_leaf:
            return self._slices.apply(layer.name, module, args, options)
        units = self._stack.units
        units.append(layer.name)
        if len(units) > 1:
            self._stack.hides |= units[0] == "" and layer.name in self._styles
            return None
        self._first = self._calls()
        entered = self._begin(layer.name, module, args, options)
        self._retained.looks_inside = layer.is_own
        return entered

    def _after(self, layer: _Layer, module: nn.Module, args: Any, options: Any, result: Any) -> Any:
        """Record the call of a leaf. A failed call has no result."""
        if not self._stack.is_running:
            return None
        self._stack.modules.pop()
        units = self._stack.units
        self._retained.looks_inside &= len(units) > 1  # the following operations are this package's
        if not layer.is_leaf or len(units) > 1:
            del units[len(units) - layer.is_leaf :]
            return None
        inputs = tensors_in([args, options])
        changed = None if self._guided is None else self._guided.result(tensors_in(result))
        result = result if changed is None else replace_tensors(result, changed)
        fields = _leaves.describe_leaf(module, inputs[0]) if inputs else {}  # this query is not the model's
        own = self._calls() - self._first if fields.get("kind") == "unknown" else 0  # made by the user's code
        if self._tries and fields.get("kind") == "unknown" and isinstance(self._styles, Mapping):
            fields |= try_on_shards(self._styles.get(layer.name), module, args, options)
        outputs = tensors_in(result)
        saves = self._keeps and fields and _is_guided(layer.name, fields)
        saved = [one.detach().clone() for one in outputs] if saves else []
        units.pop()
        self.inside += self._calls() - self._first - own
        if not inputs:
            return None
        text, line = type(module).__name__, self._recording.line()
        self._recording.add(layer.name, inputs=inputs, outputs=outputs, text=text, place=line, **fields)
        self._retained.note_call(f"{text} in {layer.name}", inputs)
        self.values |= dict(zip(map(self._recording.number, outputs), saved, strict=False))
        return None if changed is None else result

    def _begin(self, name: str, module: nn.Module, args: Any, options: Any) -> Any:
        """Save the inputs of a layer; return the inputs for its call."""
        tensors = tensors_in([args, options])
        if not tensors or not _is_guided(name, _leaves.describe_leaf(module, tensors[0])):
            return None
        numbers = [self._recording.number(tensor) for tensor in tensors]
        if self._keeps:
            for number, tensor in zip(numbers, tensors, strict=True):
                self.values.setdefault(number, tensor.detach().clone())
        if self._guided is None or (given := self._guided.inputs(name, tensors)) is None:
            return None
        for tensor, number in zip(tensors, numbers, strict=True):
            self._recording.add_alias(given[id(tensor)], number)
        return replace_tensors((args, options), given)


def _is_guided(layer: str, fields: Mapping[str, Any]) -> bool:
    """Return whether a guide overrides a call of a leaf with these fields."""
    return is_guided(TraceStep(layer, inputs=(), outputs=(), **fields))
