"""First comparison: compare the first batch of a traced model with the whole model, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import nn

from commlib.pipeline.pipe import Pipe
from commlib_torch.pipelines._first_batch import FirstBatch
from commlib_torch.pipelines._parts import SplitModel
from commlib_torch.pipelines._shared_objects import SharedObjects
from commlib_torch.pipelines._units import is_container


class FirstComparison:
    """The pending comparison of a batch with the whole model. The same on all ranks.

    model: a module or a list of layers, kept until the comparison on the rank of the first stage. shared: objects that
    stages on several ranks share. warns: if nothing could be compared.
    """

    def __init__(
        self, pipe: Pipe, model: Any, pieces: SplitModel, own: Sequence[int], *, shared: SharedObjects, warns: bool
    ) -> None:
        self._pipe, self._shared, self._warns = pipe, shared, warns
        self._first_batch: FirstBatch | None = None
        if pipe.comm.rank == pipe.first:
            whole = nn.ModuleList(model) if isinstance(model, list | tuple) else model
            self._first_batch = _RankFirstBatch(whole, pieces, list(own), shared)

    def compare(self, inputs: Sequence[Any], rows: Sequence[int]) -> bool:
        """Return whether a comparison took place. Raises UsageError on all ranks for a difference. Collective.

        inputs: of each microbatch, with its rows, on the rank of the first stage.
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
        """After a batch has run, warn if nothing could be compared."""
        if self._first_batch is not None and self._warns:
            self._first_batch.warn()


class _RankFirstBatch(FirstBatch):
    """A first batch on copies of stages that share only the objects that they share on their ranks."""

    def __init__(self, model: nn.Module, cut: SplitModel, own: list[int], shared: SharedObjects) -> None:
        super().__init__(model, cut, own, spreads=is_container(model) and isinstance(model, nn.ModuleList))
        self._shared = shared

    def _copies(self, models: list[nn.Module]) -> list[nn.Module]:
        is_cut = len(models) == len(self._cut.parts) and all(map(is_, models, self._cut.parts))
        return self._shared.copies(models) if is_cut and self._shared.exist else super()._copies(models)
