"""Tracing: run a model once on an example, and return its operations as a `ModelTrace`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _FunctionBase
from torch._functorch import apis, eager_transforms
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.checkpoint import CheckpointFunction

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import equations
from commlib.tensor_parallel.checks.guided_run import GuidedRun, is_guided
from commlib.tensor_parallel.checks.weight_shapes import SeenWeights, WeightShape
from commlib.tensor_parallel.equations import Equation
from commlib.tensor_parallel.lengths import Length
from commlib.tensor_parallel.recording import StepRecording, replace_attribute, running_line, runs_within
from commlib.tensor_parallel.styles import PerRank, Slice, Style
from commlib.tensor_parallel.trace import ModelTrace, TraceStep
from commlib_torch._graph_breaks import suspend_compile
from commlib_torch._trial_run import copy_arguments, preserve_model
from commlib_torch.tensor import _arguments, _leaves, moves
from commlib_torch.tensor._arguments import SliceHook, slicings_in
from commlib_torch.tensor._guided_calls import GuidedCall, replace_tensors
from commlib_torch.tensor._held_tensors import find_held
from commlib_torch.tensor._numbers import numbers_in, styles_of_numbers
from commlib_torch.tensor._operations import ASKING, NUMBERS, FunctionCall, describe_call
from commlib_torch.tensor._shard_trial import try_on_shards
from commlib_torch.tensor._trial import gradients, try_function
from commlib_torch.tensor._weight_sharing import find_tied

_RUNNING: ContextVar[Any] = ContextVar("the recorder that runs a model", default=None)
"""The innermost recorder: one trace may run within another."""

SHAPES = frozenset(("shape", "size", "numel", "nelement", "stride", "nbytes"))
"""Attributes that give a tensor's size or layout."""

TRANSFORMS = (
    (apis, "vmap_impl"), (eager_transforms, "grad_impl"), (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_vjp_with_argnums"), (eager_transforms, "_jvp_with_argnums"),
)  # fmt: skip
"""Function transforms, which use tensors of their own inside, and the modules that refer to them."""

_TORCH = tuple(f"{folder}/" for folder in torch.__path__)
_OURS = tuple(f"{folder}/" for folder in (*commlib.__path__, Path(__file__).parents[1]))


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


def tensors_in(value: Any, known: dict[int, tuple[Any, list[Tensor]]] | None = None) -> list[Tensor]:
    """Return the tensors in nested sequences, mappings and objects with fields, in order.

    known: the visited objects. An object that contains itself, such as a tree node with a reference to its parent, is
    visited once.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        parts = value
    elif fields := getattr(value, "__dataclass_fields__", ()):
        parts = [getattr(value, name) for name in fields]
    else:
        return []
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = value, []
        known[id(value)] = value, [tensor for part in parts for tensor in tensors_in(part, known)]
    return known[id(value)][1]


class TraceRecorder(TorchFunctionMode):
    """Intercepts each function of PyTorch and, by hooks, each layer. tensors: all values, by number.

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
        super().__init__()
        self._model, self._styles = model, styles
        self._differentiates, self._recomputes = differentiates, recomputes
        self._whole = not styles_in(model) if whole is None else whole
        self._guided = None if guide is None else GuidedCall(guide)
        self._calls, self._inside, self._moves, self._keeps = calls, 0, False, keeps
        self.hides = False
        """A layer with a style ran inside an operation that cannot be traced."""
        self.layer_values: dict[int, Tensor] = {}
        """Inputs and outputs of layers, by value number: copies, because a model may overwrite them."""
        self._tries_layers = tries
        self._shown, self._shape_requests = weights or {}, set[tuple[str, str]]()
        self._weights, self._constants = dict[int, str](), set[int]()
        for name, module in model.named_modules():
            for weight in module.parameters(recurse=False):
                if _leaves.is_leaf(module) or id(weight) not in self._weights:  # another model may use it as a layer
                    self._weights[id(weight)] = name
            self._constants |= {id(tensor) for tensor in (*module.buffers(recurse=False), *vars(module).values())}
        self._within: list[str] = []
        self._leaves: list[str] = []
        """The running leaves, outermost first."""
        named = styles if isinstance(styles, Mapping) else {}
        self._tries = not styles_in(model)
        """User-defined autograd functions are tried on shards: in a sharded model they may call other ranks."""
        self._tried: dict[tuple[Any, torch.Size, str], Equation | None] = {}
        self._has_numbers = not styles or any(isinstance(style, PerRank) for style in named.values())
        divided = slicings_in(model)
        self._slicings = {id(slicing): name for name, slicing in divided.items()}
        slices = {name: style for name, style in named.items() if isinstance(style, Slice)}
        self._sliced = {name: style for name, style in slices.items() if name not in divided}
        """Arguments that the model does not shard itself."""
        self._ranks = ranks
        self._looks_inside = False
        self._inner: list[Tensor] = []
        """Tensors made inside leaves with a user-defined forward, which are not traced."""
        self._calls_of_inner: list[tuple[list[int], str, str]] = []
        """For each of these: the input values of its leaf, the operation, and the line."""
        self._cuts = 0
        """The number of no-grad contexts that the model has entered."""
        self._written: dict[int, set[int]] = {}
        """Values written into the memory of others, by value."""
        self._inputs: list[Tensor] = []
        """Values used in operations that cannot be traced."""
        self._recording = StepRecording(
            lambda tensor: tuple(tensor.shape), self._source, is_discrete=_is_discrete, line=_line
        )
        self.tensors = self._recording.tensors

    def run(self, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[ModelTrace, Any]:
        """Run the model with its current arguments; return the trace and the model's result."""
        for tensor in tensors_in([*args, *options.values()]):
            self._recording.add("", "given", (), (tensor,), text="an argument")
        first = self._calls()
        outer = _RUNNING.set(self)
        try:
            with self._watching(), self._unseen(), self._measuring(), self._cutting(), self:
                result = self._model(*args, **options)
        finally:
            _RUNNING.reset(outer)
        self._moves |= self._calls() - first > self._inside
        return self.trace_of(result, self._find_held(args, options, result)), result

    @property
    def _listens(self) -> bool:
        """Whether to record operations; a nested trace's are not recorded."""
        return _RUNNING.get() is self

    @property
    def communicates(self) -> bool:
        """Whether ranks communicated outside of layers."""
        return self._moves

    def forget(self) -> None:
        """Drop all values and their graphs, which would keep the shapes of weights."""
        self.tensors.clear()
        self.layer_values.clear()
        self._inputs.clear()
        self._inner.clear()
        self._calls_of_inner.clear()

    def trace_of(self, result: Any, retained: Collection[int] = ()) -> ModelTrace:
        """Return the trace so far. retained: values that something other than the model's results holds."""
        return self._recording.trace(tensors_in(result), find_tied(self._model), whole=self._whole, retained=retained)

    def _find_held(self, args: Any, options: Any, result: Any) -> set[int]:
        """Return the values that are still referenced after the call, including those written into memory."""
        self._inputs = []
        values = {id(tensor): self._values(tensor) for tensor in self.tensors}
        returned = set(map(id, tensors_in(result)))
        wanted = {key for key, is_wanted in values.items() if is_wanted and key not in returned}
        roots = (vars(self._model), args, options, result)
        outside = {id(one) for one in self.tensors if self._recording.is_from_outside(one)}
        held = find_held(self.tensors, wanted, outside, roots)
        return {value for key in held for value in values[key]} | self._held_inside(roots)

    def _held_inside(self, roots: Any) -> set[int]:
        """Return the values made inside leaves that are still referenced; they are recorded only now."""
        held = find_held(self._inner, set(map(id, self._inner)), set(), roots)
        for at in [at for at, one in enumerate(self._inner) if id(one) in held]:
            numbers, text, place = self._calls_of_inner[at]
            inputs = [self.tensors[number] for number in numbers]
            self._recording.add("", "unknown", inputs, [self._inner[at]], text=f"what {text} makes", place=place)
        return {self._recording.number(one) for one in self._inner if id(one) in held}

    def _values(self, tensor: Tensor) -> set[int]:
        """Return the values in a tensor's memory: the tensor, and those written into it."""
        own = set() if self._recording.is_from_outside(tensor) else {self._recording.number(tensor)}
        if self._written:
            own |= self._written.get(_storage(tensor), set())
        return self._recording.produced.intersection(own)

    @contextmanager
    def _cutting(self) -> Iterator[None]:
        """Detect where the model disables gradients, within the context: without gradients nothing else shows it."""

        def counting(function: Any, change: int) -> Any:
            def called(*args: Any) -> Any:
                if self._listens:
                    self._cuts += change
                    self._recording.detaches = self._cuts > 0
                return function(*args)

            return called

        with ExitStack() as stack:
            for kind in (torch.no_grad, torch.inference_mode):
                for name, change in (("__enter__", 1), ("__exit__", -1)):
                    stack.enter_context(replace_attribute(kind, name, counting(getattr(kind, name), change)))
            yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Put hooks on all layers, within the context."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                before, after = self._hooks(name, module)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                last = module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True)
                stack.callback(last.remove)  # prepended, so that effects of user hooks on a layer's result are seen
            yield

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Treat autograd functions, transforms and redistributions as opaque, within the context.

        The result of a user's function has an unknown origin: it may communicate. It is intercepted below its `apply`,
        of which a model may have stored a reference.
        """
        with ExitStack() as stack:
            opaque: Any = classmethod(self._opaque(_apply, "unseen"))
            stack.enter_context(replace_attribute(_SingleLevelFunction, "apply", opaque))
            stack.enter_context(replace_attribute(nn.Parameter, "__new__", self._detached(nn.Parameter.__new__)))
            stack.enter_context(replace_attribute(_arguments, "part_of", self._sliced_part))
            stack.enter_context(
                replace_attribute(moves, "redistribute", self._opaque(moves.redistribute, "unseen", moves=True))
            )
            for owner, transform in TRANSFORMS:
                stack.enter_context(
                    replace_attribute(owner, transform, self._opaque(getattr(owner, transform), "unknown"))
                )
            yield

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Give module attributes that a plan may change numbers that remember their origin, within the context."""
        numbers = numbers_in(self._model) if self._has_numbers else {}
        values = {name: number.value for name, number in numbers.items()}
        self._recording.numbers |= values
        for name, number in numbers.items():
            number.put(Length.of(values[name], _source(name), self._recording.used))
        try:
            yield
        finally:
            for name, number in numbers.items():
                if number.name in vars(number.module) and type(number.value) is Length:
                    number.put(values[name])

    def _measured(self, tensor: Tensor) -> torch.Size:
        """Return a tensor's shape as numbers that remember their origin."""
        number, used = self._recording.number_of(tensor), self._recording.used
        lengths = tensor.shape
        if number is None:
            return lengths
        return torch.Size([Length.of(length, (number, dim), used) for dim, length in enumerate(lengths)])

    def _opaque(self, function: Any, kind: str, *, moves: bool = False) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            if not self._listens:
                return function(*args, **options)
            package = str(getattr(args[0] if args else None, "__module__", "")).partition(".")[0]
            if package == "torch" and kind == "unseen" and not moves:  # such as one that recomputes in backward
                if args[0] is not CheckpointFunction:
                    return function(*args, **options)
                if not self._recomputes:
                    return args[1](*args[3:])
                self._cuts -= 1  # it computes all gradients later
                try:
                    return function(*args, **options)
                finally:
                    self._cuts += 1
            own, outermost = moves or package.startswith("commlib"), not self._leaves
            self._leaves.append("")
            try:
                result = function(*args, **options)
            finally:
                self._leaves.pop()
            if outermost:
                inputs_seen, self._inputs = [*tensors_in([args, options]), *self._inputs], []
                known = {id(tensor): tensor for tensor in inputs_seen if self._recording.has_number(tensor)}
                inputs, what = () if own else known.values(), getattr(args[0] if args else None, "__name__", "")
                text = f"{what or 'a function'} in {self._place_in_model()}"
                self._moves |= bool(own)
                alone = len(known) == 1 and not own and kind == "unseen" and self._tries
                equation = self._trial(function, args, result) if alone else None
                results = tensors_in(result)
                self._recording.add("", kind, inputs, results, text=text, place=_line(), equation=equation)
                if self._differentiates and kind == "unseen" and known and not (own or self.hides):
                    self._note_gradients(partial(function, args[0]), args[1:], text)
            return result

        return called

    def _detached(self, function: Any) -> Any:
        """Wrap the function that makes a parameter from a tensor: it is recorded as a call of `detach`."""

        def called(kind: Any, *args: Any, **options: Any) -> Any:
            result, given = function(kind, *args, **options), tensors_in([args, options])
            if given and self._listens and not self._leaves:
                self._note("detach", (given[0],), {}, [result])
                self._recording.detach(result)
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
            with self._alone():
                self._tried[key] = try_function(lambda x: function(*args[:at], x, *args[at + 1 :]), args[at], result)
        return self._tried[key]

    def _note_gradients(self, function: Any, args: Any, text: str) -> None:
        """Record the gradients from a function with a user-defined backward: they are compared like values."""
        tensors = [one for one in args if isinstance(one, Tensor) and self._recording.has_number(one)]
        tensors = [one for one in tensors if one.is_floating_point() or one.is_complex()]
        if not tensors or not all(isinstance(one, Tensor) or _is_plain(one) for one in args):
            return
        with self._alone():
            derivatives = gradients(function, args, tensors)
        for one, gradient in zip(tensors, derivatives, strict=True):
            self._recording.add("", "gradient", [one], [gradient], text=f"the gradient of {text}", place=_line())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Stop recording within the context, for trial calls."""
        self._leaves.append("")
        try:
            yield
        finally:
            self._leaves.pop()
            self._inputs = []

    def _place_in_model(self) -> str:
        return next((name for name in reversed(self._within) if name), "the model")

    def _hooks(self, name: str, module: nn.Module) -> tuple[Any, Any]:
        leaf = name in self._styles or _leaves.is_leaf(module)
        first, keeps = 0, leaf and _leaves.has_own_forward(module)

        def before(module: nn.Module, args: Any, options: Any) -> Any:
            nonlocal first
            if not self._listens:
                return None
            self._within.append(name)
            if not leaf:
                return self._arguments(name, module, args, options)
            self._leaves.append(name)
            if len(self._leaves) > 1:
                self.hides |= self._leaves[0] == "" and name in self._styles
                return None
            first = self._calls()
            entered = self._enter(name, module, args, options)
            self._looks_inside = keeps
            return entered

        def after(module: nn.Module, args: Any, options: Any, result: Any) -> Any:
            """Record the call of a leaf. A failed call has no result."""
            if not self._listens:
                return None
            self._within.pop()
            inputs = tensors_in([args, options])
            self._looks_inside &= len(self._leaves) > 1  # the following operations are this package's
            if not leaf or len(self._leaves) > 1:
                del self._leaves[len(self._leaves) - leaf :]
                return None
            changed = None if self._guided is None else self._guided.result(tensors_in(result))
            result = result if changed is None else replace_tensors(result, changed)
            fields = _leaves.describe_leaf(module, inputs[0]) if inputs else {}  # this query is not the model's
            own = self._calls() - first if fields.get("kind") == "unknown" else 0  # made by the user's code
            if self._tries_layers and fields.get("kind") == "unknown" and isinstance(self._styles, Mapping):
                inner = len(self._inner)
                fields |= try_on_shards(self._styles.get(name), module, args, options)
                del self._inner[inner:]
            outputs = tensors_in(result)
            saved = (
                [one.detach().clone() for one in outputs] if self._keeps and fields and _is_guided(name, fields) else []
            )
            self._leaves.pop()
            self._inside += self._calls() - first - own
            if not inputs:
                return None
            text = type(module).__name__
            self._recording.add(name, inputs=inputs, outputs=outputs, text=text, place=_line(), **fields)
            self._note_inside(f"{text} in {name}", inputs)
            self.layer_values |= dict(zip(map(self._recording.number, outputs), saved, strict=False))
            return None if changed is None else result

        return before, after

    def _note_inside(self, text: str, inputs: list[Tensor]) -> None:
        """Record the leaf call that made a tensor inside, except its inputs and outputs."""
        known = len(self._calls_of_inner)
        self._inner[known:] = [one for one in self._inner[known:] if not self._recording.has_number(one)]
        if more := len(self._inner) - known:
            self._calls_of_inner += [(list(map(self._recording.number, inputs)), text, _line())] * more

    def _arguments(self, name: str, module: nn.Module, args: Any, options: Any) -> Any:
        """Record arguments that a plan may slice, and slice them if this run is one rank's."""
        if self._leaves or (self._styles and not self._sliced):
            return None
        change: dict[str, Any] = {}
        for argument, tensor in _arguments.tensor_arguments(module, args, options).items():
            path = f"{name}.{argument}" if name else argument
            if path in self._sliced or (not self._styles and self._is_fixed(tensor)):
                change[argument] = partial(self._slice, path, self._sliced.get(path), self._ranks)
        return _arguments.replace_arguments(module, args, options, change) if change else None

    def _is_fixed(self, tensor: Tensor) -> bool:
        number = self._recording.number_of(tensor)
        learned = number is None or number in self._recording.learned
        return not learned and tensor.dim() > 2 and tensor.is_floating_point()

    def _slice(self, path: str, style: Slice | None, ranks: tuple[int, int] | None, tensor: Tensor) -> Tensor:
        """Return this rank's slice of an argument, or all of it, as a separate value."""
        if self._leaves:
            return tensor if style is None or ranks is None else _arguments.own_part(tensor, style, *ranks, path)
        self._leaves.append("")
        try:
            if style is None or ranks is None:
                part = tensor.view_as(tensor)
            else:
                part = _arguments.own_part(tensor, style, *ranks, path)
                part = part.view_as(part)
        finally:
            self._leaves.pop()
            self._inputs = []
        self._recording.add(path, "slice", [tensor], [part], text="an argument", place=_line())
        return part

    def _sliced_part(self, tensor: Tensor, slicing: SliceHook) -> Tensor:
        path, ranks = self._slicings[id(slicing)], (slicing.axis.rank, slicing.axis.size)
        return self._slice(path, None if self._whole else slicing.style, ranks, tensor)

    def _enter(self, name: str, module: nn.Module, args: Any, options: Any) -> Any:
        """Save the inputs of a layer; return the inputs for its call."""
        tensors = tensors_in([args, options])
        if not tensors or not _is_guided(name, _leaves.describe_leaf(module, tensors[0])):
            return None
        numbers = [self._recording.number(tensor) for tensor in tensors]
        if self._keeps:
            for number, tensor in zip(numbers, tensors, strict=True):
                self.layer_values.setdefault(number, tensor.detach().clone())
        if self._guided is None or (given := self._guided.inputs(name, tensors)) is None:
            return None
        for tensor, number in zip(tensors, numbers, strict=True):
            self._recording.add_alias(given[id(tensor)], number)
        return replace_tensors((args, options), given)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not self._listens:
            return func(*args, **options)
        given = tensors_in([args, options])
        versions = [_version(tensor) for tensor in given]
        try:
            result = func(*args, **options)
        except Exception:
            if not self._leaves:
                self._note(_name(func), args, options, [])
            raise
        if self._leaves:
            self._inputs += tensors_in([args, options]) if self._leaves == [""] else ()
            self._inner += tensors_in(result) if self._looks_inside else ()
            return result
        name = _name(func)
        if name in SHAPES and (seen := self._shown.get(id(args[0]))) is not None:
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
                self._written.setdefault(_storage(tensor), set()).add(self._recording.number(tensor))
            if self._differentiates and _is_custom(func):
                self._note_gradients(partial(func, **options), args, f"{name} in {self._place_in_model()}")
        elif name in NUMBERS and given and not runs_within(_OURS, (*_TORCH, __file__)):
            text = f"{NUMBERS[name]} in {self._place_in_model()}"
            dim = 0 if name == "len" else -1
            self._recording.add("", "number", given, (), text=text, place=_line(), dim=dim)
        return iter(result) if name == "iter" else result

    def _note_shape_request(self, seen: WeightShape, func: Any, name: str, result: Any, args: Any, options: Any) -> Any:
        """Record a query of a sharded weight's shape outside of its layer; return the shape that the model sees."""
        if runs_within(_OURS, (*_TORCH, __file__)):  # a sharded layer that reads its own weights
            return result
        if (request := (seen.layer, _line())) not in self._shape_requests:
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
        text = f"{name} in {self._place_in_model()}"
        self._recording.add("", outputs=outputs, text=text, place=_line(), **fields)

    def _note_gate(self, called: FunctionCall) -> None:
        """Record a gated unit: the halves of a fused dimension, and their product."""
        dim = called.argument(1, "dim", -1)
        halves = called.inputs[0].chunk(2, dim)
        text, place = f"{called.name} in {self._place_in_model()}", _line()
        self._recording.add("", "split", called.inputs, halves, text=text, place=place, dim=dim)
        terms = equations.pointwise(*(tuple(one.shape) for one in halves))
        self._recording.add("", "equation", halves, called.outputs, text=text, place=place, equation=terms)

    def _source(self, tensor: Tensor) -> tuple[str, str] | None:
        if id(tensor) in self._weights:
            return "weight", self._weights[id(tensor)]
        return ("constant", "") if id(tensor) in self._constants else None


def _apply(function: Any, *args: Any) -> Any:
    """Return the last step of `apply` of an autograd function class."""
    return vars(_FunctionBase)["apply"].__get__(None, function)(*args)


def _version(tensor: Tensor) -> int:
    """Return a tensor's version counter, if it has one."""
    return -1 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    """Return an identity of a tensor's memory; 0 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # for example a sparse tensor
        return 0


def _is_custom(func: Any) -> bool:
    """Return whether a function is an operator of another library, with a possible custom backward."""
    full = str(getattr(func, "_qualified_op_name", "") or getattr(func, "namespace", ""))
    return full.partition("::")[0] not in ("", "aten", "prims", "prim", "quantized")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _source(name: str) -> tuple[str, str]:
    path, _, own = name.rpartition(".")
    return path, own


def _is_guided(layer: str, fields: Mapping[str, Any]) -> bool:
    """Return whether a guide overrides a call of a leaf with these fields."""
    return is_guided(TraceStep(layer, inputs=(), outputs=(), **fields))


def _is_discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _line() -> str:
    return running_line((*_TORCH, *_OURS))


def _name(func: Any) -> str:
    """Return a function's base name without marks of methods, properties and in-place forms: "add" for `__iadd__`."""
    if getattr(func, "__name__", "") == "__get__":
        return str(getattr(func.__self__, "__name__", ""))
    full = resolve_name(func) or getattr(func, "__name__", "")
    return str(full).removesuffix(".default").rpartition(".")[2].strip("_")
