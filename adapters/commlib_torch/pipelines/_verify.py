"""Verify: compare a cut model with the whole one before anything is trained, on copies."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.communicator import Communicator
from commlib.comparison.agreement import together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.pipeline.whole import Run, compare_with_whole
from commlib_torch._bridge import host_array
from commlib_torch._copies import copy_of, in_mode_of_all, same_random_numbers
from commlib_torch.expert.losses import keepers_in
from commlib_torch.pipelines._batches import arguments
from commlib_torch.pipelines._losses import total_of
from commlib_torch.pipelines._parts import Cut
from commlib_torch.pipelines._shared_objects import SharedObjects
from commlib_torch.pipelines._whole import (
    called,
    cut_run,
    first_names,
    named_modules,
    named_values,
    tolerance_of,
    whole_run,
)


class Steps(Protocol):
    """A pipeline, as far as it is needed here."""

    @property
    def parts(self) -> list[nn.Module]: ...

    def step(self, x: Any, y: Any) -> Tensor: ...

    def named_parameters(self, *, remove_duplicate: bool) -> Any: ...

    def close(self) -> None: ...


class Alone:
    """A group of this rank."""

    rank, size = 0, 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return what it was given."""
        return [value]


def check_with_example(
    comm: Communicator, model: Any, cut: Cut, example: Any, *, shared: SharedObjects, spreads: bool
) -> None:
    """Compare stages with the whole model on an example, on rank 0, in training and in evaluation mode.

    Raises UsageError on all ranks if anything differs. Where a mode cannot run with the example, as batch norm cannot
    train on one row, nothing is said of it. Collective.
    """

    def check() -> None:
        if comm.rank == 0:
            errors = [_checked(model, cut, example, shared, spreads, training) for training in (True, False)]
            failed = [error for error in errors if error is not None]
            if len(failed) == 2:
                warnings.warn(
                    "pipeline: the cut model is not compared with the whole one, which does not run on a copy with "
                    f"example=: {type(failed[0]).__name__}: {failed[0]}",
                    stacklevel=5,
                )

    together(comm, check)


def _checked(
    model: Any, cut: Cut, example: Any, shared: SharedObjects, spreads: bool, training: bool
) -> Exception | None:
    """Return why the whole model cannot run, if it cannot."""
    call = arguments(example)
    try:
        whole = whole_run(model, call, spreads=spreads, training=training)
    except Exception as error:
        return error
    own = _run_of_cut(model, cut, call, shared, training)
    how = _how(training)
    compare_with_whole(Alone(), whole, own, when=how, tolerance=tolerance_of(model), every=False, hint=shared.hint)
    return None


def _run_of_cut(model: Any, cut: Cut, call: Any, shared: SharedObjects, training: bool) -> Run:
    parts = shared.copies(cut.parts) if shared.exist else copy_of(list(cut.parts))
    try:
        return cut_run(parts, cut.values, first_names(model), call, training=training)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"pipeline: the cut model fails {_how(training)}, and the whole one does not: {said}{shared.hint}"
        ) from error


def _how(training: bool) -> str:
    return "in training" if training else "in evaluation"


def verify_cut(
    comm: Communicator,
    model: Any,
    cut: Cut,
    batch: Any,
    *,
    loss: Any,
    updates: bool,
    make: Callable[[Cut, Any], Steps],
    shared: SharedObjects,
    spreads: bool,
) -> None:
    """Compare stages with the whole model on a batch: one after another in both modes, then in a step in evaluation.

    batch: the arguments of a pipeline's step, the same on all ranks. updates: the schedule updates weights, so that a
    step has no gradients to compare. make: a pipeline of stages with a loss. Raises UsageError on all ranks if anything
    differs. Collective.
    """
    x, y = given(batch)
    call, tolerance = arguments(x), tolerance_of(model)
    check_agreement(comm, "verify", _lines(batch, model))
    for training in (True, False):
        whole = together(comm, partial(whole_run, model, call, spreads=spreads, training=training))
        own = together(comm, partial(_run_of_cut, model, cut, call, shared, training))
        compare_with_whole(comm, whole, own, when=_how(training), tolerance=tolerance, every=False, hint=shared.hint)
    has_own_losses = any(keepers_in(part) for part in cut.parts)  # of microbatches, which are not that of the batch
    if loss is None or updates or has_own_losses:
        return
    expected = together(comm, lambda: _step_alone(model, call, y, loss, spreads))
    pipe = make(Cut(tuple(copy_of(list(cut.parts))), cut.values, cut.counts), _copy_of_loss(loss))
    try:
        everything = [module for part in pipe.parts for module in part.modules()]
        with in_mode_of_all(everything, training=False), same_random_numbers():
            value = pipe.step(x, y)
        gradients = {
            name: None if weight.grad is None else host_array(weight.grad)
            for name, weight in pipe.named_parameters(remove_duplicate=False)
        }
    finally:
        pipe.close()
    stages = {name: stage for stage, part in enumerate(cut.parts) for name, _ in part.named_parameters()}
    own = Run({"the loss": _number(value)}, gradients, stages=stages)
    compare_with_whole(comm, expected, own, when="in a step in evaluation mode", tolerance=tolerance)


def _step_alone(model: Any, call: Any, y: Any, loss: Any, spreads: bool) -> Run:
    """Run forward and backward as one process does, on a copy."""
    copied, own_loss = copy_of(model), _copy_of_loss(loss)
    modules = [copied] if isinstance(copied, nn.Module) else []
    everything = [*modules, *named_modules(copied).values()]
    fresh = pytree.tree_map_only(Tensor, torch.clone, call)
    with in_mode_of_all(everything, training=False), same_random_numbers(), torch.enable_grad():
        output = called(copied, fresh, spreads=spreads)
        value = total_of(own_loss(output) if y is None else own_loss(output, y))
        value.backward()
    gradients = {
        name: None if weight.grad is None else host_array(weight.grad)
        for name, weight in named_values(copied, "named_parameters")
    }
    return Run({"the loss": _number(value)}, gradients)


def _number(loss: Tensor) -> Any:
    return host_array(loss.detach().double().reshape(()))


def _copy_of_loss(loss: Any) -> Any:
    return copy_of(loss) if isinstance(loss, nn.Module) else loss


def given(batch: Any) -> tuple[Any, Any]:
    """Return x and y of a batch as `verify=` takes it. Raises UsageError."""
    if not isinstance(batch, tuple):
        return batch, None
    if len(batch) > 2 or not batch:
        raise UsageError(
            f"pipeline: verify= has {len(batch)} values; give the arguments of step: (x, y), where x is a tuple if the "
            "model has several"
        )
    return batch if len(batch) == 2 else (batch[0], None)


def _lines(batch: Any, model: Any) -> list[str]:
    """Return what must be alike on all ranks: the batch, and what the model begins with."""
    leaves = pytree.tree_leaves(batch)
    values = [_digest(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    begins = [*named_values(model, "named_parameters"), *named_values(model, "named_buffers")]
    lines = [f"verify: a value of the batch: {value}" for value in values]
    return lines + [f"verify: {name}: {_digest(tensor)}" for name, tensor in begins]


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(host_array(tensor.detach().contiguous()).tobytes()).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest[:16]}"
