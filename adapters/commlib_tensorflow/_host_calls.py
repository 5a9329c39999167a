"""Host calls: call a host function on tensors, at once in eager mode, as one node in a graph.

A node is one `tf.numpy_function` for any number of inputs and outputs: a call costs about 30 us, each further tensor 8
us. For GPU tensors it is one `tf.py_function`, which gets them on the GPU (see `_on_device`).

The node is stateful, so a traced function runs its nodes in the order in which they were made, the same on every rank.
Where nothing orders them, as in graphs of TensorFlow 1, nodes keep no thread while they wait: see `_aside`.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.dtypes import numpy_dtype
from commlib.errors import CommlibError, UsageError
from commlib_tensorflow._bridge import Array, to_array, to_tensor
from commlib_tensorflow._graph_errors import graph_errors as graph_errors
from commlib_tensorflow._host_thread_node import call_on_host_thread
from commlib_tensorflow._node_order import keep_order
from commlib_tensorflow.errors import as_tensorflows

try:
    from tensorflow.python.eager.forwardprop_util import pack_tangents as _pack_tangents
    from tensorflow.python.eager.record import could_possibly_record as _some_tape_records
    from tensorflow.python.eager.record import should_record_backprop as _are_watched
    from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes as _gradient_types
except ImportError:  # they are not public

    def _pack_tangents(tensors: Any) -> Any:
        return (), ()

    def _gradient_types(tensors: Any) -> int:
        return 0

    def _some_tape_records() -> bool:
        return True

    def _are_watched(tensors: Any) -> bool:
        return any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors)


NODES = "commlib"
"""Name scope of this package's nodes that call the host."""
_NUMBERS = "_commlib_numbers"
"""Graph attribute that counts the operations of layers, by name."""

Host = Callable[..., Sequence[Array]]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def no_autograph(function: FunctionT) -> FunctionT:
    """Decorate a function that AutoGraph must not rewrite when a user's traced function calls it.

    It raises the errors of `commlib_tensorflow.errors`.
    """

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except CommlibError as error:
            same = as_tensorflows(error)
            raise same from same.__cause__

    # Tracebacks name the function.
    own: Any = guarded
    own.__code__ = own.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    return cast(FunctionT, tf.autograph.experimental.do_not_convert(guarded))


class Spec(NamedTuple):
    """Description of one output: its dtype, and its shape as far as it is known during tracing."""

    dtype: Any
    shape: Any

    @classmethod
    def like(cls, tensor: Any) -> Spec:
        """Return the dtype and shape of a tensor."""
        return cls(tensor.dtype, tensor.shape)

    @classmethod
    def rows_of(cls, tensor: Any) -> Spec:
        """Return the dtype and shape of a tensor, with an unknown number of rows."""
        return cls(tensor.dtype, _any_rows(tensor.shape))


def call(host: Host, inputs: Sequence[Any], outputs: Sequence[Spec]) -> list[Any]:
    """Call `host` on `inputs`, which it gets as read-only arrays, and return its results as tensors.

    `host` returns one new array for each of `outputs`, at least one, and TensorFlow may adopt them. Errors of `host`
    are raised here. In a graph TensorFlow raises them when the graph runs, with the same class and text: see
    `_graph_errors`.
    """
    if tf.executing_eagerly():
        return [to_tensor(array) for array in host(*map(to_array, inputs))]
    return _make_node(tf.numpy_function if is_ordered() else call_on_host_thread, host, inputs, outputs)


def call_on_device_of(
    where: str, host: Callable[..., Sequence[Any]], inputs: Sequence[Any], outputs: Sequence[Spec], what: str = ""
) -> list[Any]:
    """Call `host` on eager tensors, which a node gets on TensorFlow's device `where`, and return its results.

    Otherwise like `call`, for graphs that order their nodes; with `what`, for errors, like `call_in_order`. No gradient
    flows through.
    """
    if tf.executing_eagerly():
        return list(host(*inputs))

    def node(*arguments: Any) -> list[Any]:
        with tf.device(where):
            results: list[Any] = tf.py_function(*arguments)
        return [tf.stop_gradient(result) for result in results]

    make = functools.partial(_make_node, node, host, inputs, outputs, of=lambda tensor: tensor)
    return _make_chained_node(what, make) if what and not is_ordered() else make()


def _make_node(
    make_node: Callable[..., Any],
    host: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    outputs: Sequence[Spec],
    of: Callable[[Any], Any] = np.asarray,  # TensorFlow passes a numpy scalar for a tensor without dimensions
) -> list[Any]:
    _refuse_xla()
    _refuse_forward_mode(inputs)
    keep_order()

    def call_host(*given: Any) -> list[Any]:
        _running.node = True
        try:
            return list(host(*map(of, given)))
        except CommlibError as error:
            graph_errors.note(error)
            raise
        finally:
            _running.node = False

    with tf.name_scope(NODES):
        results = make_node(call_host, list(inputs), [spec.dtype for spec in outputs])
    for result, spec in zip(results, outputs, strict=True):
        result.set_shape(spec.shape)
    return list(results)


class _NodeState(threading.local):
    node = False
    """Whether this thread runs a node of a graph."""


_running = _NodeState()
_COPIED = 1 << 20
"""Bytes. TensorFlow copies smaller results of a node faster than it adopts their memory (10 us more)."""


def result_empty(shape: Sequence[int], dtype: Any) -> Array:
    """Allocate a host function's result: aligned where adopting the memory is faster for TensorFlow than copying."""
    kind = numpy_dtype(dtype)
    if _running.node and math.prod(shape) * kind.itemsize < _COPIED:
        return np.empty(shape, kind)
    return core.empty(shape, kind)


def call_in_order(what: str, host: Host, inputs: Sequence[Any], outputs: Sequence[Spec]) -> list[Any]:
    """Do the same as `call`, for a host function that waits for other ranks in the order in which nodes are made.

    TensorFlow does not order the nodes of the graph that it derives from a traced function to compute gradients outside
    of it: there each of these nodes waits for the one before. Raises UsageError in other graphs without order. what:
    for errors.
    """
    if is_ordered():
        return call(host, inputs, outputs)
    return _make_chained_node(what, lambda: _make_node(tf.numpy_function, host, inputs, outputs))


def _make_chained_node(what: str, make: Callable[[], list[Any]]) -> list[Any]:
    """Make a node that waits for the one before. Raises UsageError in other graphs: see `call_in_order`."""
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "outer_graph") or hasattr(graph.outer_graph, "outer_graph") or not _is_eager_outside():
        raise UsageError(
            f"{what}: nothing orders the nodes of this graph, so ranks may run them in different orders: use a "
            "tf.function, and compute gradients either inside the outermost one or outside of all of them; for forward "
            "mode (tf.autodiff.ForwardAccumulator), call the function eagerly, or take two tf.GradientTape instead"
        )
    with tf.control_dependencies(getattr(graph, _LAST, [])):
        results = make()
    setattr(graph, _LAST, [results[0].op])
    return results


_LAST = "_commlib_last"


def _is_eager_outside() -> bool:
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def is_ordered() -> bool:
    """Return whether nodes run in the order in which they are made, as they do eagerly and in traced functions.

    Not ordered: graphs of TensorFlow 1, and the graph that TensorFlow derives from a traced function to compute
    gradients outside of it. A traced function within such a graph may run concurrently with another one. Keras' scratch
    graphs, which infer shapes, never run.
    """
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):  # a function
        if not getattr(graph, "_add_control_dependencies", True):
            return str(graph.name).startswith("scratch_graph")
        graph = graph.outer_graph
    return _is_eager_outside()


def is_recording() -> bool:
    """Return whether gradients of the current computation may be requested; supporting that alone costs 0.2 ms."""
    return not tf.executing_eagerly() or bool(_some_tape_records())


def is_recorded(*tensors: Any) -> bool:
    """Return whether a tape or a forward accumulator watches some tensor. A traced function sees only those in it."""
    # Only the second sees accumulators, and the tapes that they make to run backwards.
    every = list(tensors)
    return bool(_are_watched(every) or _gradient_types(every))


def has_tangents(tensors: Sequence[Any]) -> bool:
    """Return whether a `tf.autodiff.ForwardAccumulator` watches one of the tensors."""
    return bool(_pack_tangents(list(tensors))[1])


def operation_name(verb: str, name: str | None, tensor: Any = None, *, ignore_name_scope: bool = False) -> str | None:
    """Return the name that matches an operation with those of the other ranks.

    In eager mode a user's name is used unchanged; in a graph it gets the name scope as a prefix, unless that is to be
    ignored. Without a name: None in eager mode (the core counts), and in a graph Horovod's name from the verb and the
    tensor's name, such as "HorovodAllreduce_x_0", fixed when the function is traced.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if name is None:
        # The name of an eager tensor that the function uses is a number, which may differ among ranks.
        named = tensor is not None and not re.fullmatch(r"\d+:0", tensor.name)
        source = re.sub("[^a-zA-Z0-9_]", "_", tensor.name) if named else ""
        return str(graph.unique_name(f"Horovod{verb}_{source}" if source else f"Horovod{verb}"))
    scope = "" if ignore_name_scope else graph.get_name_scope()
    return f"{scope}/{name}" if scope else name


def layer_name(verb: str) -> str | None:
    """Return the name that matches an operation of a layer with those of the other ranks; None in eager mode.

    The name consists of the layers around it, without the numbers in their names, which Keras counts on each rank
    separately, and of the number of such operations before it in the function that is being traced.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    around = re.sub(r"(_\d+)+(?=/|$)", "", graph.get_name_scope())
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    name = f"{around}/Horovod{verb}" if around else f"Horovod{verb}"
    before = getattr(graph, _NUMBERS, ())
    setattr(graph, _NUMBERS, (*before, name))
    return f"{name}_{before.count(name)}"


def gradient_name(name: str | None) -> str | None:
    """Return the name of the gradient of operation `name`."""
    if name is None or tf.executing_eagerly():
        return None if name is None else f"{name}_grad"
    return str(tf.compat.v1.get_default_graph().unique_name(f"{name}_grad"))


def _any_rows(shape: Any) -> Any:
    if shape.rank is None:
        return shape
    if shape.rank == 0:
        raise UsageError("a tensor without dimensions has no rows to gather or scatter: reshape it to [1]")
    return tf.TensorShape([None, *shape[1:]])


def refuse_vectorized() -> None:
    """Raise UsageError within `tf.vectorized_map`, for an operation that would silently lose its gradient."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    scopes = str(graph.get_name_scope()).split("/")
    if any(scope.startswith("loop_body") for scope in scopes) and not str(graph.name).startswith("scratch_graph"):
        raise UsageError(
            "a collective operation was called in tf.vectorized_map (which TimeDistributed uses for sequences of "
            "unknown length, and tape.jacobian for its rows), where it would have no gradient: use tf.map_fn, set the "
            "sequence length, or pass experimental_use_pfor=False to tape.jacobian"
        )


def _refuse_forward_mode(inputs: Sequence[Any]) -> None:
    """Raise UsageError for inputs of a node that a forward accumulator watches: TensorFlow would take them for zeros.

    In a graph, unlike eagerly, TensorFlow has no tangent for the result of a `tf.custom_gradient`.
    """
    if has_tangents(inputs):
        raise UsageError(
            "a collective operation was called in a traced function on a tensor that a tf.autodiff.ForwardAccumulator "
            "watches, where forward mode would lose its derivative: call the function eagerly, take two "
            "tf.GradientTape instead (reverse mode), or pass tf.stop_gradient(tensor)"
        )


def refuse_eager_forward_mode(what: str, inputs: Sequence[Any], way_out: str) -> None:
    """Raise UsageError, eagerly, for inputs of an operation whose derivative forward mode would lose or get wrong."""
    if tf.executing_eagerly() and has_tangents(inputs):
        raise UsageError(
            f"{what}: a tf.autodiff.ForwardAccumulator watches the tensor, and forward mode does not work through this "
            f"operation: {way_out}, take two tf.GradientTape instead (reverse mode), or pass tf.stop_gradient(tensor)"
        )


def _refuse_xla() -> None:
    """Raise UsageError if XLA will compile the graph being traced: XLA cannot call host functions."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = getattr(graph, "_control_flow_context", None)
        while context is not None:
            if type(context).__name__ == "XLAControlFlowContext":
                raise UsageError(
                    "a collective operation was called in a function that XLA compiles (jit_compile=True), where host "
                    "functions cannot run: pass jit_compile=False to tf.function or to compile(), or compile "
                    "only the functions for forward and backward and call collectives outside of them"
                )
            context = getattr(context, "outer_context", None)
        graph = getattr(graph, "outer_graph", None)
