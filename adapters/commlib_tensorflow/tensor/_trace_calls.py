"""CallLog: the calls in a model's graph that are recorded as one step each, and the operations that they have made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from commlib_tensorflow.tensor._trace_lines import user_line


@dataclass(slots=True)
class GraphCall:
    """The operations of a graph that one call has made: from `first` up to, but not including, `last`."""

    name: str
    layer: Any
    inputs: list[Any]
    first: int
    leaf: bool
    last: int = -1
    place: str = ""
    fields: Mapping[str, Any] | None = None
    text: str = "a function"
    arguments: Any = ((), {})
    results: list[Any] = field(default_factory=list)


class CallLog:
    """The calls of a run, in order of their beginning. graph: that of the run, once it has begun."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.calls: list[GraphCall] = []
        self.depth = 0
        """The number of running calls within which nothing else is recorded."""

    @property
    def count(self) -> int:
        """The number of operations in the graph."""
        return len(self.graph.get_operations())

    @property
    def is_recording(self) -> bool:
        """Whether calls are recorded now: not within another one, and not in other graphs."""
        return not self.depth and tf.compat.v1.get_default_graph() is self.graph

    def end(self, call: GraphCall, results: list[Any]) -> None:
        """Add a call that has ended."""
        call.last, call.results = self.count, results
        self.calls.append(call)

    def note(self, name: str, inputs: list[Any], fields: Mapping[str, Any], text: str) -> None:
        """Record a step that makes no operation."""
        call = GraphCall(name, None, inputs, self.count, True, place=user_line(), fields=fields, text=text)
        self.end(call, [])
