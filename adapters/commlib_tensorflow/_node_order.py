"""Node order: nodes that call the host run in the order in which they are made, including those in loops and functions.

TensorFlow chains stateful operations, except those that take variables, which it orders by those variables alone. So in
a communicating model a loop, a branch or a nested function could run before or after the nodes around it, in a
different order on each rank. TensorFlow queries here which resources an operation touches; all of these
operations touch one more resource, the same for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

try:  # neither is public
    from tensorflow.python.eager import context
    from tensorflow.python.framework import auto_control_deps
except ImportError:
    auto_control_deps = None

_CALLS = frozenset(("PyFunc", "EagerPyFunc"))
_KEY = "_commlib_order"


@functools.cache
def keep_order() -> None:
    """Make TensorFlow order everything that contains host calls, in graphs that are finished from now on."""
    if auto_control_deps is not None:
        auto_control_deps.register_acd_resource_resolver(_resolve_resources)


def _resolve_resources(op: Any, reads: Any, writes: Any) -> bool:
    """Add to the resources that an operation reads and writes; return whether anything was added."""
    if not op._is_stateful or not auto_control_deps.op_is_stateful(op):
        return False
    key = getattr(op.graph, _KEY, None)
    if key is not None and key in writes:
        return False
    if not (_calls_host(op) if reads or writes else op._control_flow_context is None):
        return False
    if key is None:
        with op.graph.as_default(), tf.control_dependencies(None):
            key = tf.constant(0)
        setattr(op.graph, _KEY, key)
    writes.add(key)
    return True


def _calls_host(op: Any) -> bool:
    """Return whether a function of an operation, such as the body of a loop, contains host calls."""
    return any(_has_calls(op.graph, name) for name in _functions(op.node_def))


def _has_calls(graph: Any, name: str) -> bool:
    function = graph._get_function(name)
    definition = context.context().get_function_def(name) if function is None else function.cached_definition
    nodes = definition.node_def
    return any(node.op in _CALLS for node in nodes) or any(
        _has_calls(graph, inner) for node in nodes for inner in _functions(node)
    )


def _functions(node: Any) -> Iterator[str]:
    """Yield the names of the functions that a node calls."""
    for value in node.attr.values():
        if value.WhichOneof("value") == "func":
            yield value.func.name
        for one in value.list.func:
            yield one.name
