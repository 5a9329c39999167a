"""DistributedOptimizer with op=Adasum: each rank steps by itself, and the steps are combined."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.compress.casts import Compressors
from commlib.data_parallel.report import Reporting, Statistics, StepClock, StepReport, all_reduce_bytes
from commlib.errors import UsageError
from commlib.horovod.wrapping import PlainPickling
from commlib_torch.clip import clip_grad_norm_
from commlib_torch.named_verbs._named_operations import ProcessSets, Reduction, start_allreduce


class AdasumMixin(PlainPickling, Reporting):
    """Let each rank step by itself, and combine the steps. A mixin of optimizers that are wrapped with op=Adasum.

    Gradients stay local. `step()` runs the plain optimizer, then moves every parameter from its old value by the Adasum
    of the ranks' moves: their sum if they are orthogonal, their mean if they are parallel.
    """

    _managed: list[tuple[str, Tensor]]
    _compression: Compressors
    _process_set: ProcessSets
    _starts: list[tuple[str, Tensor, Tensor]]
    """Names, parameters and their values before the step."""
    _statistics: Statistics
    _clock: StepClock
    _report: StepReport | None
    _hooks: list[Any]

    def _start_adasum(
        self, named: Sequence[tuple[str, Tensor]], compression: Compressors, process_set: ProcessSets
    ) -> None:
        self._managed, self._compression, self._process_set = list(named), compression, process_set
        self._starts, self._statistics, self._clock, self._report = [], Statistics(), StepClock(), None
        optimizer: Any = self
        self._hooks = [optimizer.register_step_post_hook(_combine)]
        if core.process_set_of(process_set).included() is not False:  # another rank steps by itself
            self._hooks.append(optimizer.register_step_pre_hook(_remember))

    def synchronize(self) -> None:
        """Do nothing: steps are reduced, gradients are not."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise UsageError: without the reduction in `step()`, ranks would diverge."""
        raise UsageError("skip_synchronize: with op=Adasum, step() does the reduction and cannot skip it")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients accumulate on this rank, and every `step()` combines."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank only, as always with op=Adasum; `step()` combines within it, too."""
        return nullcontext()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this rank's gradients to a 2-norm of at most `max_norm`; return the norm before scaling."""
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        return clip_grad_norm_([parameter for group in groups for parameter in group["params"]], max_norm)

    def close(self) -> None:
        """Stop combining: this rank steps by itself from now on. Not collective."""
        for hook in self._hooks:
            hook.remove()

    @property
    def reducer(self) -> Any:
        """Raise UsageError: steps are combined, and no gradients are reduced."""
        raise UsageError("reducer: with op=Adasum, steps are combined and no gradients are reduced, so there is none")

    @property
    def report(self) -> StepReport | None:
        """Costs of communication in the last step; None before the first step."""
        return self._report

    @property
    def statistics(self) -> Statistics:
        """Totals of the combined steps so far, and their cost."""
        return self._statistics

    @property
    def compression_choice(self) -> str:
        """The compression of steps: the one of the argument."""
        wire = getattr(self._compression, "wire_name", type(self._compression).__name__)
        return f"{wire or 'none'}: as requested"

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
    statistics = optimizer._statistics
    if starts:
        with statistics.exposing():
            _combine_steps(optimizer, starts, statistics)
    optimizer._report = optimizer._clock.step(statistics)


def _combine_steps(optimizer: Any, starts: Sequence[tuple[str, Tensor, Tensor]], statistics: Statistics) -> None:
    packed = [optimizer._compression.compress(parameter.detach() - start) for _, parameter, start in starts]
    nbytes, size = sum(tensor.nbytes for tensor, _ in packed), core.process_set_of(optimizer._process_set).size() or 1
    statistics.nbytes += nbytes
    statistics.reductions += 1
    statistics.count(all_reduce_bytes(size, nbytes), all_reduce_bytes(size, sum(start.nbytes for *_, start in starts)))
    name = f"steps of {starts[0][0]} and {len(starts) - 1} more"
    how = Reduction(core.Adasum, name, process_set=optimizer._process_set)
    moves = start_allreduce([tensor for tensor, _ in packed], how, in_place=True, blocking=True).wait()
    for (_, parameter, start), move, (_, ctx) in zip(starts, moves, packed, strict=True):
        parameter.copy_(start + optimizer._compression.decompress(move, ctx))
