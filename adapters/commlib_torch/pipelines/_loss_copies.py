"""LossCopies: call a loss on copies of its arguments, without side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.errors import UsageError
from commlib.pipeline.isolate import isolate
from commlib.pipeline.losses import REMEDY, MicrobatchWeights, weights_of
from commlib.pipeline.rows import Rows
from commlib_torch.pipelines._batch_losses import Losses
from commlib_torch.pipelines._batches import join_microbatches, take_rows
from commlib_torch.pipelines._loss_calls import Count, LossCall, LossCalls, as_numbers


@dataclass(frozen=True, slots=True)
class LossCopies:
    """Calls a loss on copies: of itself, except its parameters, and of its arguments; random states are restored."""

    loss: Any
    rows: Rows

    def losses(self, *batches: tuple[Any, Any]) -> list[dict[str, float]]:
        """Return the loss of each batch without side effects: on a copy, with restored random states."""
        loss: Any = isolate(self.loss, parameters_of(self.loss))
        results = []
        with torch.no_grad(), same_random_numbers(batches[0]):
            for output, target in batches:
                results.append(
                    _numbers(loss(copy_values(output)) if target is None else loss(copy_values(output), target))
                )
        return results

    def losses_together(self, losses: Losses, numbers: list[int]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the loss of the first of some microbatches, and that of all of them as one."""
        rows, own_targets = [losses.rows[number] for number in numbers], [losses.targets[n] for n in numbers]
        outputs = join_microbatches([losses.outputs[number] for number in numbers], rows, self.rows.output)
        targets = join_microbatches(own_targets, rows, self.rows.y, what="y") if own_targets[0] is not None else None
        again, whole = self.losses((losses.outputs[numbers[0]], own_targets[0]), (outputs, targets))
        return again, whole

    def weights(self, losses: Losses, microbatch: int, output: Any, count: Count) -> MicrobatchWeights:
        """Return the weights of losses that change their targets, each called on a copy.

        output, count: of one microbatch, and the terms of its loss. Raises UsageError if undecided.
        """
        losses_of_copies = {microbatch: count}
        for number, rows in enumerate(losses.rows):
            if rows and number not in losses_of_copies:
                losses_of_copies[number] = self._count(losses, number, output, losses.rows[microbatch])
        values = dict(zip(losses_of_copies, as_numbers(list(losses_of_copies.values())), strict=True))
        return weights_of([values.get(n, 0.0) for n in range(len(losses.rows))], losses.rows)

    def _count(self, losses: Losses, number: int, output: Any, rows_of_output: int) -> Count:
        """Return the number of terms of a microbatch's loss in advance. Raises UsageError if it is undecided."""
        rows = losses.rows[number]
        try:
            if rows > rows_of_output:
                raise UsageError("it has more rows than the first microbatch")
            given = copy_values(
                output if rows == rows_of_output else take_rows(output, slice(0, rows), self.rows.output)
            )
            with LossCalls() as calls:
                self._call(given, losses.targets[number])
            call: LossCall
            (call,) = calls.recorded
            if call.count is None:
                raise UsageError("its terms are not known")
            return call.count
        except Exception as error:
            raise UsageError(
                f"pipeline: the loss changes its target in place, and the number of terms of microbatch {number} "
                f"cannot be determined in advance ({error}): change targets before you pass them to step, or {REMEDY}"
            ) from error

    def _call(self, output: Any, target: Any) -> Any:
        """Call the loss on an output, which must be a copy, and on a copy of its target."""
        loss: Any = isolate(self.loss, parameters_of(self.loss))
        with torch.no_grad(), same_random_numbers(output):
            return loss(output) if target is None else loss(output, copy_values(target))


def same_random_numbers(values: Any) -> Any:
    """Return a context that restores the random states at its end."""
    devices = {leaf.device for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_cuda}
    return torch.random.fork_rng(devices=list(devices))


def copy_values(value: Any) -> Any:
    """Return copies of the tensors in a value, without gradients."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _numbers(loss: Any) -> dict[str, float]:
    """Return the summands in a function's result, or the single loss."""
    loss = loss[0] if isinstance(loss, tuple) else loss
    return {name: float(one) for name, one in (loss.items() if isinstance(loss, Mapping) else [("", loss)])}


def parameters_of(loss: Any) -> dict[int, Any]:
    """Return the objects that copies of a loss share with it: parameters, which a forward does not change."""
    referenced = [loss, *(cell.cell_contents for cell in getattr(loss, "__closure__", None) or () if _is_filled(cell))]
    modules = [value for value in referenced if isinstance(value, nn.Module)]
    return {id(parameter): parameter for module in modules for parameter in module.parameters()}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
