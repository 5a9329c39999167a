"""UserQueries: watch the user's code for queries that a graph cannot answer, or answers differently on shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from commlib.tensor_parallel.checks.weight_shapes import SeenWeights, WeightShape
from commlib_tensorflow.tensor._conditions import watch_element_reads
from commlib_tensorflow.tensor._eager_checks import watch_eager_checks
from commlib_tensorflow.tensor._trace_calls import CallLog
from commlib_tensorflow.tensor._trace_lines import PACKAGES, user_line
from commlib_tensorflow.tensor._weights import override_shapes


class UserQueries:
    """Queries of elements of tensors, of shapes of weights, and of eagerness. weights: as for `TraceRecorder`."""

    def __init__(self, log: CallLog, weights: SeenWeights) -> None:
        self._log, self._weights = log, weights
        self.element_place = ""
        """The line where elements of a tensor were requested, which graph tensors do not have."""
        self.eager: list[str] = []
        """Lines that query whether they run eagerly."""

    @contextmanager
    def watch(self, layers: Sequence[Any]) -> Iterator[None]:
        """Note queries within the context. layers: the model's, whose modules may import functions by name."""
        with ExitStack() as stack:
            stack.enter_context(watch_element_reads(self._log.graph, self._note_element_read))
            stack.enter_context(override_shapes(self._weights, self._note_shape_request, PACKAGES))
            stack.enter_context(watch_eager_checks(layers, self.eager.append, PACKAGES))
            yield

    def _note_shape_request(self, seen: WeightShape) -> bool:
        """Record a request for the shape of a sharded weight; return whether it came from outside of its layer."""
        if self._log.depth:
            return False
        place, text = user_line(), "the shape of its weight"
        if not any((one.name, one.place, one.text) == (seen.layer, place, text) for one in self._log.calls):
            self._log.note(seen.layer, [], {"kind": "shape", "inputs": ()}, text)
        return True

    def _note_element_read(self, tensor: Any) -> None:
        """Record a request for elements of a tensor, such as a condition in Python."""
        place = user_line()
        if not self._log.depth and tensor.graph is self._log.graph and place:
            self.element_place = place
            self._log.note("", [tensor], {"kind": "number", "inputs": (tensor,)}, "a number of Python")
