"""One way to call a function of the host on tensors: at once if TensorFlow runs eagerly, else as one node of the graph.

A node is one `tf.numpy_function`, however many tensors go in and out: a call costs about 30 us, a further tensor 8 us.
For tensors of a GPU it is one `tf.py_function`, which has them where they are (see `_on_device`).
It is stateful, so a traced function runs its nodes in the order in which they were made, the same on every rank. Where
nothing orders them, as in graphs of TensorFlow 1, nodes keep no thread while they wait: see `_aside`.
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
from commlib_tensorflow._aside import call_aside
from commlib_tensorflow._bridge import Array, to_array, to_tensor
from commlib_tensorflow._graph_errors import graph_errors as graph_errors
from commlib_tensorflow._order import keep_order
from commlib_tensorflow.errors import as_tensorflows

try:
    from tensorflow.python.eager.record import could_possibly_record as _some_tape_records
except ImportError:  # it is not public

    def _some_tape_records() -> bool:
        return True


NODES = "commlib"
"""The name scope of nodes that call the host for this package."""
_NUMBERS = "_commlib_numbers"
"""Where a graph counts the operations of layers in it, by their names."""

Host = Callable[..., Sequence[Array]]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def no_autograph(function: FunctionT) -> FunctionT:
    """Decorate a function that AutoGraph must not rewrite when a user's traced function calls it.

    What it raises is one of `commlib_tensorflow.errors`.
    """

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except CommlibError as error:
            same = as_tensorflows(error)
            raise same from same.__cause__

    return cast(FunctionT, tf.autograph.experimental.do_not_convert(guarded))


class Spec(NamedTuple):
    """Describe one output: its dtype, and its shape as far as that is known when a function is traced."""

    dtype: Any
    shape: Any

    @classmethod
    def like(cls, tensor: Any) -> Spec:
        """Return the dtype and shape of a tensor."""
        return cls(tensor.dtype, tensor.shape)

    @classmethod
    def rows_of(cls, tensor: Any) -> Spec:
        """Return the dtype and shape of a tensor with another number of rows."""
        return cls(tensor.dtype, _any_rows(tensor.shape))


def call(host: Host, inputs: Sequence[Any], outputs: Sequence[Spec]) -> list[Any]:
    """Return, as tensors, what `host` makes of `inputs`, which it gets as arrays that it must not change.

    `host` returns one new array for each of `outputs`, at least one, which TensorFlow may adopt. What it raises is
    raised here; in a graph when that runs, by TensorFlow, as an error of the same kind and text: see `_graph_errors`.
    """
    if tf.executing_eagerly():
        return [to_tensor(array) for array in host(*map(to_array, inputs))]
    return _made(tf.numpy_function if ordered() else call_aside, host, inputs, outputs)


def call_there(
    where: str, host: Callable[..., Sequence[Any]], inputs: Sequence[Any], outputs: Sequence[Spec], what: str = ""
) -> list[Any]:
    """Return what `host` makes of eager tensors: of `inputs`, which a node has on TensorFlow's device `where`.

    As `call` otherwise, in a graph that orders its nodes; with `what`, for errors, as `call_in_order`. No gradient
    flows through.
    """
    if tf.executing_eagerly():
        return list(host(*inputs))

    def node(*arguments: Any) -> list[Any]:
        with tf.device(where):
            results: list[Any] = tf.py_function(*arguments)
        return [tf.stop_gradient(result) for result in results]

    make = functools.partial(_made, node, host, inputs, outputs, of=lambda tensor: tensor)
    return _chained(what, make) if what and not ordered() else make()


def _made(
    make_node: Callable[..., Any],
    host: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    outputs: Sequence[Spec],
    of: Callable[[Any], Any] = np.asarray,  # TensorFlow gives a scalar of numpy for a tensor without dimensions
) -> list[Any]:
    _refuse_xla()
    keep_order()

    def guarded(*given: Any) -> list[Any]:
        _running.node = True
        try:
            return list(host(*map(of, given)))
        except CommlibError as error:
            graph_errors.note(error)
            raise
        finally:
            _running.node = False

    with tf.name_scope(NODES):
        results = make_node(guarded, list(inputs), [spec.dtype for spec in outputs])
    for result, spec in zip(results, outputs, strict=True):
        result.set_shape(spec.shape)
    return list(results)


class _Running(threading.local):
    node = False
    """Whether this thread runs a node of a graph."""


_running = _Running()
_COPIED = 1 << 20
"""Bytes: for smaller results of a node TensorFlow is quicker to copy them than to adopt their memory (10 us more)."""


def result_empty(shape: Sequence[int], dtype: Any) -> Array:
    """Return memory for a result that a host function returns: aligned where TensorFlow had better adopt it."""
    kind = numpy_dtype(dtype)
    if _running.node and math.prod(shape) * kind.itemsize < _COPIED:
        return np.empty(shape, kind)
    return core.empty(shape, kind)


def call_in_order(what: str, host: Host, inputs: Sequence[Any], outputs: Sequence[Spec]) -> list[Any]:
    """Return what `call` does, of a host function that waits for other ranks in the order in which nodes are made.

    Where TensorFlow does not order nodes, in what it makes of a traced function to have its gradients outside of it,
    each of these waits for the one before. Raises UsageError in other graphs that order nothing. what: for errors.
    """
    if ordered():
        return call(host, inputs, outputs)
    return _chained(what, lambda: _made(tf.numpy_function, host, inputs, outputs))


def _chained(what: str, make: Callable[[], list[Any]]) -> list[Any]:
    """Make a node that waits for the one before. Raises UsageError: see `call_in_order`."""
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "outer_graph") or hasattr(graph.outer_graph, "outer_graph") or not _is_eager_outside():
        raise UsageError(
            f"{what}: nothing orders the nodes of this graph, and ranks may run them in different orders: use a "
            "tf.function, and take gradients within the outermost one or outside of all"
        )
    with tf.control_dependencies(getattr(graph, _LAST, [])):
        results = make()
    setattr(graph, _LAST, [results[0].op])
    return results


_LAST = "_commlib_last"


def _is_eager_outside() -> bool:
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def ordered() -> bool:
    """Return whether nodes run in the order in which they are made, as they do eagerly and in traced functions.

    In graphs of TensorFlow 1 they do not, nor in what TensorFlow makes of a traced function to have its gradients
    outside of it. A traced function within such a graph may run beside another one. Keras' scratch graphs, in which it
    looks at shapes, never run.
    """
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):  # a function
        if not getattr(graph, "_add_control_dependencies", True):
            return str(graph.name).startswith("scratch_graph")
        graph = graph.outer_graph
    return _is_eager_outside()


def records() -> bool:
    """Return whether gradients may be asked for of what is computed now; that alone costs 0.2 ms to make possible."""
    return not tf.executing_eagerly() or bool(_some_tape_records())


def operation_name(verb: str, name: str | None, tensor: Any = None, *, ignore_name_scope: bool = False) -> str | None:
    """Return the name under which an operation meets those of the other ranks.

    A name that the user gave is taken as it is in eager mode, else within the name scope unless that is to be ignored.
    Without one, None in eager mode (the core counts), and in a graph what Horovod makes of the verb and the tensor's
    name, such as "HorovodAllreduce_x_0": fixed when the function is traced.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if name is None:
        source = re.sub("[^a-zA-Z0-9_]", "_", tensor.name) if tensor is not None else ""
        return str(graph.unique_name(f"Horovod{verb}_{source}" if source else f"Horovod{verb}"))
    scope = "" if ignore_name_scope else graph.get_name_scope()
    return f"{scope}/{name}" if scope else name


def layer_name(verb: str) -> str | None:
    """Return the name under which an operation of a layer meets those of the other ranks; None in eager mode.

    By the layers around it, without the numbers in their names, which Keras counts on each rank for itself, and by the
    number of such operations before it in the function that is being traced.
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
    """Return a name for the operation that is the gradient of the one called `name`."""
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
    """Raise UsageError within `tf.vectorized_map`, for what is to have a gradient, and would lose it in silence."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    scopes = str(graph.get_name_scope()).split("/")
    if any(scope.startswith("loop_body") for scope in scopes) and not str(graph.name).startswith("scratch_graph"):
        raise UsageError(
            "a collective operation was called in tf.vectorized_map (which TimeDistributed uses for a sequence of any "
            "length), where it would have no gradient: use tf.map_fn, or tell the length"
        )


def _refuse_xla() -> None:
    """Raise UsageError if the graph being traced is to be compiled by XLA, which cannot call functions of the host."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = getattr(graph, "_control_flow_context", None)
        while context is not None:
            if type(context).__name__ == "XLAControlFlowContext":
                raise UsageError(
                    "a collective operation was called in a function that XLA compiles (jit_compile=True), where no "
                    "function of the host can run: pass jit_compile=False to tf.function or to compile(), or compile "
                    "only the functions for forward and backward and call collectives outside of them"
                )
            context = getattr(context, "outer_context", None)
        graph = getattr(graph, "outer_graph", None)
