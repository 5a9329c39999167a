"""Mode tracer: build one graph of a module that is right in training and evaluation, for all free values of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import fx, nn

from commlib.errors import UsageError
from commlib_torch._guards import Guards
from commlib_torch._signature import PREFIX, ForwardCall
from commlib_torch._tracer import ITERATED, WITHIN, Fault, ModuleTrace, hooks_of, is_same_constant, trace_module
from commlib_torch.pipelines._functionalization import changes_of_attributes
from commlib_torch.pipelines._operations import choose_by_mode

ANYWHERE = "anywhere"
"""Marks nodes that depend on no value: each stage that uses one computes it."""


@dataclass(frozen=True, slots=True)
class JoinedGraph:
    """A graph of a module for both modes. whole: the classes kept in one stage, and why."""

    graph: fx.Graph
    constants: dict[str, Any]
    call: ForwardCall
    whole: dict[type, str]
    readings: Guards


class ModeTracer:
    """Trace a module repeatedly, until its operations in training and in evaluation form one graph.

    Operations that a trace cannot represent (see `commlib_torch._tracer.Fault`) are part of some module's forward. If
    it is a submodule, its class is made opaque: it is called without a trace, in each mode and as often as in one
    process. The root module cannot be opaque: it is refused by name. leaves: names of submodules that are always
    opaque.
    """

    def __init__(self, model: nn.Module, leaves: Collection[str] = ()) -> None:
        self._model, self._title, self._leaves = model, type(model).__name__, leaves
        self._whole: dict[type, str] = {}
        self._example: Any = None

    def settled(self, example: Any) -> JoinedGraph:
        """Return the graph. Raises UsageError for a module that has none."""
        model = self._model
        if type(model).__call__ is not nn.Module.__call__:
            raise self._refused("has a custom __call__, which no stage would call: put it into forward")
        if hooks := hooks_of(model):
            name = getattr(hooks[0], "__name__", type(hooks[0]).__name__)
            raise self._refused(f"has a hook ({name}), which no stage would call: put it on a submodule")
        self._example = example
        call = ForwardCall.of(model, example)
        while True:
            trace, faults = self._trace_both_modes(call)
            if not faults:
                free, faults = self._find_free(call, keeps_open=example is not None)
            if not faults:
                break
            self._leave_whole(faults)
        if free:
            call = call.with_free(free)
            trace, faults = self._trace_both_modes(call)
            assert not faults, faults
        return JoinedGraph(trace.graph, trace.constants, call, dict(self._whole), trace.readings)

    def _trace_both_modes(self, call: ForwardCall) -> tuple[ModuleTrace, list[Fault]]:
        """Trace in training and in evaluation, and defer decisions that depend on the mode to the call."""
        first, second = (self._traced(call, training=mode) for mode in (True, False))
        if faults := first.faults or second.faults:
            return first, faults
        first.readings.add(second.readings)
        for trace in (first, second):
            own = trace.constants.keys() - trace.in_attributes
            for node, name in changes_of_attributes(trace.graph, self._model, own):
                what = "a tensor in an attribute" if name in trace.in_attributes else f"the tensor {name}"
                return first, [Fault(node.meta[WITHIN], f"changes {what} in place, which is not a buffer")]
        if _join_graphs(first, self._traced(call, training=True), _refuse_join) is not None:
            raise self._refused(
                "behaves differently in each call, and not because of its modules' state: it uses a global value, the "
                f"time, or an object of a library: {_ADVICE}"
            )

        def decide(node: fx.Node, one: Any, other: Any) -> Any:
            if _has_nodes(one) or _has_nodes(other):
                raise _MismatchError
            where = f"{node.meta[WITHIN]}.training".removeprefix(".")
            with first.graph.inserting_before(node):
                flag = first.graph.get_attr(where)
                choice = first.graph.call_function(choose_by_mode, (flag, one, other))
            choice.meta[ANYWHERE] = True
            return choice

        path = _join_graphs(first, second, decide)
        return first, [] if path is None else [Fault(path, "behaves differently in training and in evaluation")]

    def _traced(self, call: ForwardCall, *, training: bool) -> ModuleTrace:
        return trace_module(self._model, call, self._whole, self._leaves, training=training)

    def _find_free(self, call: ForwardCall, *, keeps_open: bool) -> tuple[list[str], list[Fault]]:
        """Return the free values of a call that are not tensors: the graph does not depend on them.

        keeps_open: if False, a submodule that depends on the presence of a value (None) is a fault.
        """
        values = {
            name: value
            for name, value in call.leaves()
            if value is None or (isinstance(value, int | float | complex) and not isinstance(value, bool))
        }
        if not values:
            return [], []
        known = [self._traced(call, training=mode) for mode in (True, False)]
        if not self._depends(known, call, values):
            return list(values), []
        free, faults = [], []
        for name, value in values.items():
            if keeps_open and name not in call.passed:
                continue
            fault = self._depends(known, call, {name: value})
            if fault is None:
                free.append(name)
            elif fault.path and value is None and not keeps_open:
                faults.append(Fault(fault.path, f"depends on the presence of {name}"))
        if len(free) > 1 and self._depends(known, call, {name: values[name] for name in free}):
            free = free[:1]
        return free, faults

    def _depends(self, known: list[ModuleTrace], call: ForwardCall, values: dict[str, Any]) -> Fault | None:
        """Return the place where forward depends on some values. known: the traces with known values."""
        unknown = call.with_free(values)

        def join(node: fx.Node, one: Any, other: Any) -> Any:
            if isinstance(other, fx.Node) and other.op == "placeholder":
                name = str(other.target).removeprefix(PREFIX)
                if name in values and is_same_constant(one, values[name]):
                    return one
            raise _MismatchError

        for trace, mode in zip(known, (True, False), strict=True):
            other = self._traced(unknown, training=mode)
            if other.faults:
                return other.faults[0]
            path = _join_graphs(trace, other, join)
            if path is not None:
                return Fault(path, "depends on a value")
        return None

    def _leave_whole(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            kind = type(self._model.get_submodule(fault.path))
            if not fault.path or kind in self._whole:
                is_about_x = self._example is None and ITERATED in fault.why
                raise self._refused(f"{fault.why}: {'pass example=, an x; or ' if is_about_x else ''}{_ADVICE}")
        for fault in faults:
            self._whole.setdefault(type(self._model.get_submodule(fault.path)), fault.why)

    def _refused(self, why: str) -> UsageError:
        return UsageError(f"pipeline: {type(self._model).__name__} {why}")


_ADVICE = (
    "do that in the forward of a submodule, which is then called without a trace; or pass the layers as a list or an "
    "nn.Sequential"
)


class _MismatchError(Exception):
    """Two graphs differ."""


def _join_graphs(first: ModuleTrace, second: ModuleTrace, join: Callable[[fx.Node, Any, Any], Any]) -> str | None:
    """Replace differing arguments in the nodes of one trace by `join` of both traces' arguments.

    join: takes a node and two different arguments, which may be nodes of their graphs. Raises _ApartError. Returns the
    path of the module in which the traces diverge, None if they do not.
    """
    twins = {one.target: one for one in first.graph.nodes if one.op == "placeholder"}
    twin = {other: twins.get(other.target) for other in second.graph.nodes if other.op == "placeholder"}
    if any(not is_same_constant(one, second.constants.get(name)) for name, one in first.constants.items()):
        return ""
    within = [""]
    for event, other_event in zip_longest(first.events, second.events):
        if event is None or other_event is None:
            return within[-1]
        if isinstance(event, str) or isinstance(other_event, str):  # begin or end of a module
            if event != other_event:
                return within[-1]
            if event:
                within.append(str(event))
            else:
                within.pop()
            continue
        node, other = event, other_event
        if (node.op, node.target) != (other.op, other.target):
            return within[-1]
        twin[other] = node
        try:
            args, options = (
                _merge(a, b, partial(_merged_leaf, node, twin, join))
                for a, b in ((node.args, other.args), (node.kwargs, other.kwargs))
            )
        except _MismatchError:
            return within[-1]
        node.args, node.kwargs = args, options
    return None


def _refuse_join(node: fx.Node, one: Any, other: Any) -> Any:
    raise _MismatchError


def _merged_leaf(
    node: fx.Node, twin: dict[fx.Node, Any], join: Callable[[fx.Node, Any, Any], Any], one: Any, other: Any
) -> Any:
    if isinstance(one, fx.Node) and isinstance(other, fx.Node) and twin.get(other) is one:
        return one
    if not _has_nodes(one) and not _has_nodes(other) and is_same_constant(one, other):
        return one
    return join(node, one, other)


def _merge(one: Any, other: Any, leaf: Callable[[Any, Any], Any]) -> Any:
    if type(one) is type(other):
        if isinstance(one, tuple | list) and len(one) == len(other) and not hasattr(one, "_fields"):
            return type(one)(_merge(a, b, leaf) for a, b in zip(one, other, strict=True))
        if isinstance(one, dict) and list(one) == list(other):
            return {key: _merge(one[key], other[key], leaf) for key in one}
        if isinstance(one, slice):
            return slice(*(_merge(getattr(one, n), getattr(other, n), leaf) for n in ("start", "stop", "step")))
    return leaf(one, other)


def _has_nodes(value: Any) -> bool:
    nodes: list[fx.Node] = []
    fx.map_arg(value, lambda node: nodes.append(node) or node)  # type: ignore[func-returns-value]
    return bool(nodes)
