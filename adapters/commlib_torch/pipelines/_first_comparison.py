"""First comparison: hold the first batch of a traced model against the whole one, on all ranks, until one has run."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import nn

from commlib.pipeline.pipe import Pipe
from commlib_torch.pipelines._containers import is_container
from commlib_torch.pipelines._first_batch import FirstBatch
from commlib_torch.pipelines._parts import Cut
from commlib_torch.pipelines._shared_objects import SharedObjects


class FirstComparison:
    """Whether a batch is still to be compared with what the whole model makes of it. The same on all ranks.

    model: a module or a list of layers, kept until then where the first stage is. shared: what stages on several ranks
    share. warns: if nothing could be compared.
    """

    def __init__(
        self, pipe: Pipe, model: Any, pieces: Cut, own: Sequence[int], *, shared: SharedObjects, warns: bool
    ) -> None:
        self._pipe, self._shared, self._warns = pipe, shared, warns
        self._first_batch: FirstBatch | None = None
        if pipe.comm.rank == pipe.first:
            whole = nn.ModuleList(model) if isinstance(model, list | tuple) else model
            self._first_batch = _OfRanks(whole, pieces, list(own), shared)

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
            self._pipe.refuse(fault + self._shared.hint)
        return bool(has_any)

    def end(self) -> None:
        """Warn, once a batch has run, if nothing could be compared."""
        if self._first_batch is not None and self._warns:
            self._first_batch.warn()


class _OfRanks(FirstBatch):
    """A first batch that runs copies of stages which share with each other only what they do on their ranks."""

    def __init__(self, model: nn.Module, cut: Cut, own: list[int], shared: SharedObjects) -> None:
        super().__init__(model, cut, own, spreads=is_container(model) and isinstance(model, nn.ModuleList))
        self._shared = shared

    def _copies(self, models: list[nn.Module]) -> list[nn.Module]:
        is_cut = len(models) == len(self._cut.parts) and all(map(is_, models, self._cut.parts))
        return self._shared.copies(models) if is_cut and self._shared.exist else super()._copies(models)
