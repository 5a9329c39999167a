"""DistributedOptimizer with op=Adasum: each rank steps by itself, and the steps are combined."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.compress.casts import Compressors
from commlib.errors import UsageError
from commlib.horovod.wrapping import PlainPickling
from commlib_torch.named_verbs._named_operations import ProcessSets, Reduction, start_allreduce


class AdasumMixin(PlainPickling):
    """Let each rank step by itself, and combine the steps. A mixin of optimizers that are wrapped with op=Adasum.

    Gradients stay local. `step()` runs the plain optimizer, then moves every parameter from its old value by the Adasum
    of the ranks' moves: their sum if they are orthogonal, their mean if they are parallel.
    """

    _managed: list[tuple[str, Tensor]]
    _compression: Compressors
    _process_set: ProcessSets
    _starts: list[tuple[str, Tensor, Tensor]]
    """Names, parameters and their values before the step."""

    def _start_adasum(
        self, named: Sequence[tuple[str, Tensor]], compression: Compressors, process_set: ProcessSets
    ) -> None:
        self._managed, self._compression, self._process_set = list(named), compression, process_set
        self._starts = []
        if core.process_set_of(process_set).included() is False:
            return  # this rank steps by itself
        optimizer: Any = self
        optimizer.register_step_pre_hook(_remember)
        optimizer.register_step_post_hook(_combine)

    def synchronize(self) -> None:
        """Do nothing: steps are reduced, gradients are not."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise UsageError: without the reduction in `step()`, ranks would diverge."""
        raise UsageError("skip_synchronize: with op=Adasum, step() does the reduction and cannot skip it")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients accumulate on this rank, and every `step()` combines."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does. Call it on all ranks."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_managed" in self.__dict__:
            known = {id(parameter) for _, parameter in self._managed}
            groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
            for position, parameter in enumerate(groups[-1]["params"]):
                if id(parameter) not in known:
                    self._managed.append((f"group {len(groups) - 1}, parameter {position}", parameter))


def _remember(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Unfrozen parameters move like the others; frozen ones, which may be integers, do not.
    optimizer._starts = [(name, p, p.detach().clone()) for name, p in optimizer._managed if p.requires_grad]


@torch.no_grad()
def _combine(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    starts, optimizer._starts = optimizer._starts, []
    if not starts:
        return
    packed = [optimizer._compression.compress(parameter.detach() - start) for _, parameter, start in starts]
    name = f"steps of {starts[0][0]} and {len(starts) - 1} more"
    how = Reduction(core.Adasum, name, process_set=optimizer._process_set)
    moves = start_allreduce([tensor for tensor, _ in packed], how, in_place=True, blocking=True).wait()
    for (_, parameter, start), move, (_, ctx) in zip(starts, moves, packed, strict=True):
        parameter.copy_(start + optimizer._compression.decompress(move, ctx))
