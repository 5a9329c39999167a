"""ModelOutputs: join the outputs of microbatches, and return them in the structure of the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.pipeline.pipe import Pipe
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow.pipelines._batches import join_microbatches
from commlib_tensorflow.pipelines._stages import Batch


class ModelOutputs:
    """The outputs of a model. masked: whether each has a mask. where: the row dimension of each, see `Rows`."""

    def __init__(self, graph: Any, masked: Sequence[bool], where: Any) -> None:
        self._graph, self.masked, self._where = graph, masked, where

    @property
    def places(self) -> list[Any]:
        """The row dimension of each output."""
        where = self._where
        if isinstance(where, dict):
            where = {key: where.get(key, 0) for key in self._graph.output}
        dims = keras.tree.flatten(where) if isinstance(where, dict | list | tuple) else [where] * len(self.masked)
        if len(dims) != len(self.masked):
            raise UsageError(f"pipeline: rows={self._where} does not match the {len(self.masked)} outputs")
        return dims

    def join(
        self, batch: Batch, numbers: Sequence[int] | None = None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
        """Return the concatenated outputs of some microbatches, or of all, and their masks."""
        parts = [batch.outputs[number] for number in (sorted(batch.outputs) if numbers is None else numbers)]
        rows = [batch.rows[number] for number in (sorted(batch.outputs) if numbers is None else numbers)]
        count, places = len(self.masked), self.places
        every = [*places, *(place for place, is_masked in zip(places, self.masked, strict=True) if is_masked)]
        whole = [
            join_microbatches(own, rows, place) for own, place in zip(zip(*parts, strict=True), every, strict=True)
        ]
        masks = iter(whole[count:])
        return whole[:count], [next(masks) if is_masked else None for is_masked in self.masked]

    def share(self, pipe: Pipe, outputs: list[tf.Tensor] | None) -> list[tf.Tensor]:
        """Return the last stage's outputs on every rank. Collective."""
        comm, last = pipe.comm, pipe.last
        arrays = [] if outputs is None else [to_array(output) for output in outputs]
        specs = comm.broadcast_object([(array.shape, array.dtype) for array in arrays], last)
        if comm.rank != last:
            arrays = [np.empty(shape, dtype) for shape, dtype in specs]
        for array in arrays:
            comm.broadcast(array, last)
        return outputs if outputs is not None else [to_tensor(array) for array in arrays]

    def nest(self, outputs: Sequence[Any]) -> Any:
        """Return outputs with the nesting of the model's: a single tensor if there is only one."""
        nested = keras.tree.pack_sequence_as(self._graph.output, list(outputs))
        return nested[0] if isinstance(nested, list | tuple) and len(nested) == 1 else nested
