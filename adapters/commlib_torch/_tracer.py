"""Tracer: the operations of a module by torch.fx, and values that a trace would fix permanently."""

from __future__ import annotations

import builtins
import dis
import gc
import operator
import os
import random
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from commlib.tensor_parallel.recording import replace_attribute
from commlib_torch._attribute_reads import AttributeReads
from commlib_torch._copies import force_mode, preserve_random_state
from commlib_torch._guards import Guards
from commlib_torch._signature import PREFIX, ForwardCall
from commlib_torch._snapshot import Snapshot

WITHIN, GRADIENTS = "within", "gradients"
"""Metadata of a node: the path of the module whose forward made it, and whether gradients were enabled."""

ITERATED = "iterates over"
"""Prefix of faults about a forward that iterates over an argument."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An operation that a trace cannot represent. path: of the module whose forward does it."""

    path: str
    why: str


@dataclass(slots=True)
class ModuleTrace:
    """The operations of a module's call.

    constants: tensors that forward creates, by their names in the graph. events: the nodes, and between them the path
    of a module at the begin of its forward, "" at the end. leaves: paths of opaque modules that torch.fx would have
    traced. readings: attribute values that forwards read. in_attributes: the names of constants that belong to the
    model, such as those in a list of it, and that outlive a call.
    """

    graph: fx.Graph
    constants: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    events: list[fx.Node | str] = field(default_factory=list)
    readings: Guards = field(default_factory=Guards)
    in_attributes: frozenset[str] = frozenset()


def trace_module(
    model: nn.Module, call: ForwardCall, whole: Mapping[type, str], leaves: Collection[str] = (), *, training: bool
) -> ModuleTrace:
    """Trace a module in one mode. call: its arguments, with placeholders.

    whole: classes that are not traced inside. leaves: names of submodules that are not traced inside.

    The module is restored afterwards: its attributes, lists and dictionaries, modes, and random states.
    """
    tracer = _Tracer(model, call, whole, leaves)
    trace = ModuleTrace(fx.Graph())
    with (
        force_mode(list(model.modules()), training=training),
        preserve_random_state(),
        torch.enable_grad(),
        ExitStack() as stack,
    ):
        stack.enter_context(tracer.watching(model))
        try:
            trace.graph = tracer.trace(model)
        except StoppedError:
            assert tracer.faults
        except Exception as error:
            where = tracer.raised_in if tracer.raised_in is not None else ""
            tracer.faults = [Fault(where, f"cannot be traced ({_line(error)}{_user_line(error)})")]
        else:
            tracer.faults += tracer.caught()
    trace.constants, trace.faults, trace.leaves = tracer.constants, tracer.faults, tracer.leaves
    trace.events, trace.readings, trace.in_attributes = tracer.events, tracer.readings, frozenset(tracer.in_attributes)
    if not trace.faults:
        trace.faults += tracer.escaped()
    return trace


class StoppedError(Exception):
    """Ends a trace that has found an operation it must not run."""


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True
    """Without it, operations of a forward on a buffer would run once, during the trace."""

    def __init__(self, model: nn.Module, call: ForwardCall, whole: Mapping[type, str], leaves: Collection[str]) -> None:
        super().__init__()
        self._call, self._whole, self._leaf_names = call, whole, leaves
        self._within = [""]
        self._making_arguments = 0
        self._proxies: list[tuple[weakref.ref[fx.Proxy], str, str]] = []
        self._autocast = _autocast()
        self._random = _random_state()
        self.faults: list[Fault] = []
        self.raised_in: str | None = None
        self.constants: dict[str, Any] = {}
        self.leaves: list[str] = []
        self.events: list[fx.Node | str] = []
        self.readings = Guards()
        self.in_attributes: list[str] = []
        self._attributes: dict[str, fx.Proxy] = {}
        self._errors: list[tuple[str, Exception]] = []

    # Interface of torch.fx

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Return the function to call and its arguments: placeholders for free values, constants for the others."""
        args, options = self._call.arguments(lambda name: self.create_proxy("placeholder", name, (), {}))
        forward = self.root.forward  # a forward set on the module object, if there is one
        self._reads.note_globals(self.root)
        return (lambda: forward(*args, **options)), []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keep opaque: torch's layers, sharded layers, and modules that torch.fx cannot trace correctly."""
        is_leaf = super().is_leaf_module(m, module_qualified_name) or isinstance(m, torch.jit.ScriptModule)
        if is_leaf or type(m).__module__.startswith("commlib_torch."):
            return True
        if (
            module_qualified_name in self._leaf_names
            or type(m) in self._whole
            or hooks_of(m)
            or has_state_of_its_own(m)
        ):
            self.leaves.append(module_qualified_name)
            return True
        return False

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Record the nesting of modules."""
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self._look_at_random_numbers()
        self._reads.note_globals(m)
        self._within.append(path)
        self.events.append(path)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.raised_in is None:
                self.raised_in = path
            raise
        self._look_at_random_numbers()
        self._within.pop()
        self.events.append("")
        return result

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        """Record the origin of a node, and its modes."""
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if kind != "placeholder":
            self.events.append(node)
        node.meta[WITHIN] = self._within[-1]
        node.meta[GRADIENTS] = torch.is_grad_enabled()
        if _autocast() != self._autocast:
            self._fault("changes autocast or inference mode")
        if kind == "output":
            self._look_at_random_numbers()
        return node

    def create_arg(self, a: Any) -> Any:
        """Record the constants that the graph needs."""
        self._making_arguments += 1
        try:
            return self._rebuild_container(a) if _is_own_container(type(a)) else super().create_arg(a)
        finally:
            self._making_arguments -= 1

    def _rebuild_container(self, value: Any) -> fx.Node:
        """Build a container of a user's class in the graph: torch.fx would make it a plain one."""
        if is_dataclass(value) and not isinstance(value, type):  # such as the outputs of Hugging Face's models
            given = {one.name: self.create_arg(getattr(value, one.name)) for one in fields(value) if one.init}
            return self.create_node("call_function", type(value), (), given)
        plain = dict(value) if isinstance(value, dict) else list(value)
        return self.create_node("call_function", type(value), (self.create_arg(plain),), {})

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Record all proxies, to find those that outlive the call."""
        traced = _Proxy(node, self)
        self._proxies.append((weakref.ref(traced), self._within[-1], node.name))
        return traced

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Record a truth test of a value by a forward."""
        with self.noting():
            return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Record an iteration over a value by a forward."""
        with self.noting():
            if obj.node.op == "placeholder":
                name = str(obj.node.target).removeprefix(PREFIX)
                raise fx.proxy.TraceError(f"{ITERATED} {name}, and the number of its values is unknown in a trace")
            return super().iter(obj)

    def keys(self, obj: fx.Proxy) -> Any:
        """Record the use of a value as a dictionary by a forward."""
        with self.noting():
            return super().keys(obj)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record an error raised by a value of the trace: a forward may catch it and continue differently."""
        try:
            yield
        except Exception as error:
            self._errors.append((self._within[-1], error))
            raise

    def caught(self) -> list[Fault]:
        """Return a fault if a forward has caught an error of a completed trace."""
        return [
            Fault(path, f"catches the error of a trace ({_line(error)}{_user_line(error)})")
            for path, error in self._errors[:1]
        ]

    # Operations that a trace cannot represent

    def _fault(self, why: str, path: str | None = None) -> None:
        fault = Fault(self._within[-1] if path is None else path, why)
        if fault not in self.faults:
            self.faults.append(fault)

    def record_type_test(self) -> None:
        """Record a type test of a value by a forward."""
        self._fault("tests the type of a value (isinstance), which is not a tensor in a trace")

    def _look_at_random_numbers(self) -> None:
        state = _random_state()
        if state != self._random:
            self._random = state
            self._fault("draws random numbers that do not depend on its inputs, and which a trace would make constant")

    def escaped(self) -> list[Fault]:
        """Return a fault if a value outlives the trace, for example in a list outside of the model."""
        for generation in (None, 1, 2):  # most are dead or young; a full collection takes long
            if generation is not None:
                gc.collect(generation)
            if all(ref() is None for ref, *_ in self._proxies):
                return []
        alive = [(path, name) for ref, path, name in self._proxies if ref() is not None]
        for ref, *_ in self._proxies:
            _remove_value(ref)
        return [Fault(path, f"stores a value ({name}) where only this call would put it") for path, name in alive[:1]]

    def _stop(self, why: str) -> None:
        self._fault(why)
        raise StoppedError

    def _shown(self, name: str, value: Tensor) -> Any:
        """Return forward's value for a tensor attribute: operations on it become part of the graph."""
        if name not in self._attributes:
            self._attributes[name] = self.create_proxy("get_attr", name, (), {})
        return self._attributes[name]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record a forward's reads, assignments and changes, and undo the changes at the end."""
        paths = {module: path for path, module in reversed(list(model.named_modules()))}
        title = type(model).__name__
        snapshot = Snapshot(paths)
        self._reads = AttributeReads(paths, title, self.readings, shown=self._shown, refuse=self._stop)
        done: list[tuple[nn.Module, str, bool, Any]] = []
        set_attribute = nn.Module.__setattr__

        def setting(module: nn.Module, name: str, value: Any) -> None:
            if module not in paths:  # a new one
                set_attribute(module, name, value)
                return
            if self._making_arguments:
                self.constants[name] = value
            elif name in module._buffers and isinstance(value, fx.Proxy):
                buffer = f"{paths[module]}.{name}".removeprefix(".")
                if not _is_in_place_on(value.node, buffer):
                    self._fault(f"assigns to the buffer {name!r}", paths[module])
                return
            else:
                self._fault(f"sets self.{name}, which tracing would do only once", paths[module])
                if name in module._buffers or name in module._parameters or name in module._modules:
                    return
            done.append((module, name, name in vars(module), vars(module).get(name)))
            set_attribute(module, name, value)

        called = {type(module) for module in paths if type(module).__call__ is not nn.Module.__call__}
        with ExitStack() as stack:
            for kind in called:
                stack.enter_context(replace_attribute(kind, "__call__", self._call_opaque))
            stack.enter_context(replace_attribute(nn.Module, "__setattr__", setting))
            stack.enter_context(replace_attribute(builtins, "len", self._len(len)))
            stack.enter_context(self._reads.watching())
            stack.enter_context(replace_attribute(torch.autocast, "__enter__", self._changing_autocast()))
            for name in _AUTOCAST:
                stack.enter_context(replace_attribute(torch, name, self._wrap_query(getattr(torch, name))))
            for name in _MAKERS:
                stack.enter_context(replace_attribute(torch, name, self._wrap_maker(getattr(torch, name))))
            try:
                yield
            finally:
                for module, name, existed, before in reversed(done):
                    if existed:
                        vars(module)[name] = before
                    else:
                        vars(module).pop(name, None)
                self._attributes.clear()
                self.in_attributes = [name for name, value in self.constants.items() if snapshot.has_visited(value)]
                for path, title in snapshot.restore():
                    self._fault(f"changes {title}, which tracing would do only once", path)

    def _wrap_maker(self, function: Any) -> Any:
        """Wrap a function that creates tensors: with traced arguments it becomes an operation."""

        @wraps(function)
        def make(*args: Any, **options: Any) -> Any:
            given = pytree.tree_leaves((args, options))
            if any(issubclass(type(one), fx.Proxy) for one in given):
                return self.create_proxy("call_function", function, args, options)
            return function(*args, **options)

        return make

    def _changing_autocast(self) -> Any:
        enter: Any = torch.autocast.__enter__

        @wraps(enter)
        def change(context: Any) -> Any:
            self._fault("changes autocast or inference mode")
            return enter(context)

        return change

    def _wrap_query(self, function: Any) -> Any:
        """Wrap a query of autocast's state, which is fixed in a trace. Torch's own code may query it."""

        @wraps(function)
        def ask(*args: Any) -> Any:
            if not str(sys._getframe(1).f_globals.get("__name__")).startswith(("torch.", "commlib_torch.")):
                self._fault(f"calls torch.{function.__name__}, whose result may differ in another batch")
            return function(*args)

        return ask

    def _len(self, function: Any) -> Any:
        def length(value: Any) -> Any:
            of_trace = issubclass(type(value), fx.Proxy)
            return self.create_proxy("call_function", function, (value,), {}) if of_trace else function(value)

        return length

    @property
    def _call_opaque(self) -> Any:
        """Make modules with a custom `__call__` opaque."""

        def call(module: nn.Module, *args: Any, **options: Any) -> Any:
            return self.create_proxy("call_module", self.path_of_module(module), args, options)

        return call


class _Proxy(fx.Proxy):
    """A traced value that supports `+=` and `[...] =` in place, like a tensor, and records type tests."""

    @property
    def __class__(self) -> type:
        """Return the class, and record a type test by a forward: a tensor would have another class."""
        frame = sys._getframe(1)
        asker = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if asker not in _OWN_CALLERS or frame.f_code.co_name == "is_tensor":
            self.tracer.record_type_test()  # type: ignore[attr-defined]
        return _Proxy

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("a traced value has only one class")

    def __bool__(self) -> bool:
        if _is_asserted(sys._getframe(1)):
            self.tracer.create_proxy("call_function", check, (self,), {})
            return True
        return self.tracer.to_bool(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def check(condition: Any) -> None:
    """Raise AssertionError as the `assert` of a forward does."""
    assert condition, "an assert in a forward that was split"


def _is_asserted(frame: FrameType) -> bool:
    """Return whether a frame is in an `assert` that tests a value."""
    steps = [one for one in dis.get_instructions(frame.f_code) if one.opname != "CACHE"]
    at = next((number for number, one in enumerate(steps) if one.offset == frame.f_lasti), None)
    if at is None:
        return False
    at += steps[at].opname == "TO_BOOL"
    step, raises = steps[at], [one.offset for one in steps if one.opname == "LOAD_ASSERTION_ERROR"]
    if "POP_JUMP" not in step.opname:
        return False
    if step.opname.endswith("IF_TRUE"):
        return at + 1 < len(steps) and steps[at + 1].offset in raises
    return step.opname.endswith("IF_FALSE") and step.argval in raises


def _number(name: str) -> Any:
    def method(self: _Proxy) -> Any:
        with self.tracer.noting():  # type: ignore[attr-defined]
            raise fx.proxy.TraceError(f"{name}() of a value that is unknown before it is computed")

    return method


for _name in ("int", "float", "complex", "round", "floor", "ceil", "trunc", "array", "len"):
    setattr(_Proxy, f"__{_name}__", _number(_name))

_OWN_CALLERS = frozenset({"torch", "commlib_torch", "abc", "copy", "dataclasses", "functools", "inspect", "typing"})
"""Packages that may query types while tracing."""


def _in_place(name: str) -> Any:
    out_of_place, in_place = getattr(operator, f"__{name}__"), getattr(operator, f"__i{name}__")

    def method(self: _Proxy, other: Any) -> Any:
        function = out_of_place if _is_number(self.node) else in_place
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split():  # noqa: SIM905
    setattr(_Proxy, f"__i{_name}__", _in_place(_name))

_NUMBERS = frozenset({"size", "dim", "numel", "item", "tolist", "stride", "nelement", "ndimension", "element_size"})
_NUMBER_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "itemsize", "nbytes"})


def _is_number(value: Any) -> bool:
    """Return whether a value is a number according to its node, or computed from numbers only."""
    if not isinstance(value, fx.Node):
        return True
    if value.op == "call_method":
        return value.target in _NUMBERS
    if value.op != "call_function":
        return False
    if value.target is getattr:
        return value.args[1] in _NUMBER_ATTRIBUTES or all(map(_is_number, value.all_input_nodes))
    is_plain = value.target in _OF_NUMBERS or getattr(value.target, "__module__", "") in (
        "_operator",
        "math",
    )
    return is_plain and all(map(_is_number, value.all_input_nodes))


_OF_NUMBERS = (len, int, float, bool, torch.finfo, torch.iinfo)


def _is_own_container(kind: type) -> bool:
    is_plain = kind.__module__ in ("builtins", "torch") or kind.__module__.startswith("torch.fx")
    return issubclass(kind, dict | list | tuple) and not is_plain and not hasattr(kind, "_fields")


_AUTOCAST = ("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype")
_MAKERS = (
    "arange", "as_tensor", "empty", "eye", "finfo", "full", "iinfo", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
"""Functions of torch that take only numbers, shapes and dtypes: torch.fx misses those computed from tensors."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that a call of a module runs, except those of this package."""
    all_hooks = [hook for name in _HOOKS if (hooks := getattr(module, name, None)) for hook in hooks.values()]
    return [hook for hook in all_hooks if not _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("commlib_torch.")


def has_state_of_its_own(module: nn.Module) -> bool:
    """Return whether a module customises saving or loading of its state."""
    names = ("get_extra_state", "_save_to_state_dict", "_load_from_state_dict", "state_dict")
    if any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names):
        return True
    hooks = (*module._state_dict_hooks.values(), *module._load_state_dict_pre_hooks.values())
    return not all(_is_ours(getattr(hook, "hook", hook)) for hook in hooks)


def _is_in_place_on(node: fx.Node, buffer: str) -> bool:
    """Return whether a node changes a buffer and returns it, as `self.count += 1` does."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    first = node.args[0] if node.args else None
    is_in_place = name.endswith("_") if node.op == "call_method" else name.startswith("i") and name in _IN_PLACE
    return is_in_place and isinstance(first, fx.Node) and first.op == "get_attr" and first.target == buffer


_IN_PLACE = frozenset((
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift",
    "imatmul", "iconcat",
))  # fmt: skip
"""Names of functions of `operator`."""


def is_operator_in_place(name: str) -> bool:
    """Return whether a function of `operator` changes its first argument if it is mutable."""
    return name in _IN_PLACE


def _remove_value(ref: weakref.ref[fx.Proxy]) -> None:
    """Remove a traced value from the containers that hold it."""
    if (value := ref()) is None:
        return
    for holder in gc.get_referrers(value):
        if isinstance(holder, list | deque):
            others = [one for one in holder if one is not value]
            holder.clear()
            holder.extend(others)
        elif isinstance(holder, set):
            holder.discard(value)
        elif isinstance(holder, dict):
            for key in [key for key, one in holder.items() if one is value]:
                del holder[key]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


def _user_line(error: Exception) -> str:
    """Return the last line of a user's forward in a traceback; "" if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGES)]
    if not own or own[-1].filename.startswith("<"):
        return ""
    return f", in {os.path.basename(own[-1].filename)}, line {own[-1].lineno}: {own[-1].line}"


_PACKAGES = tuple(os.path.join(os.path.dirname(one), "") for one in (torch.__file__, __file__, operator.__file__))
"""Folders of files that are not the user's: torch, this package, Python."""


def _autocast() -> tuple[bool, ...]:
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return (*(torch.is_autocast_enabled(kind) for kind in kinds), torch.is_inference_mode_enabled())


def _random_state() -> tuple[Any, ...]:
    numbers: Any = np.random.get_state(legacy=True)
    return random.getstate(), numbers[1].tobytes(), numbers[2:], torch.get_rng_state().numpy().tobytes()


def is_same_constant(one: Any, other: Any) -> bool:
    """Return whether two constants of graphs are equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return one is other or (both and one.dtype == other.dtype and _are_equal(one, other))
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    except Exception:
        return False


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or (
        one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    )
