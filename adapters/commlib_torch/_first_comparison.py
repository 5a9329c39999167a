"""First comparison: hold the first batch of a traced model against the whole one, on all ranks, until one has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from commlib.pipeline.pipe import Pipe
from commlib_torch._first_batch import FirstBatch
from commlib_torch._parts import Cut


class FirstComparison:
    """Whether a batch is still to be compared with what the whole model makes of it. The same on all ranks.

    model: kept until then, where the first stage is.
    """

    def __init__(self, pipe: Pipe, model: nn.Module, pieces: Cut, own: Sequence[int]) -> None:
        self._pipe = pipe
        self._first_batch = FirstBatch(model, pieces, list(own)) if pipe.comm.rank == pipe.first else None

    def compare(self, inputs: Sequence[Any], rows: Sequence[int]) -> bool:
        """Return whether there was anything to compare. Raises UsageError on all ranks for a difference. Collective.

        inputs: of each microbatch, of so many rows, where the first stage is.
        """
        fault = ""
        call = next((one for one, count in zip(inputs, rows, strict=False) if count), None)
        if self._first_batch is not None and call is not None:
            fault = self._first_batch.fault(call)
        has_any, fault = self._pipe.comm.all_gather_object((call is not None, fault))[self._pipe.first]
        if fault:
            self._pipe.refuse(fault)
        return bool(has_any)

    def end(self) -> None:
        """Warn, once a batch has run, if nothing could be compared."""
        if self._first_batch is not None:
            self._first_batch.warn()
