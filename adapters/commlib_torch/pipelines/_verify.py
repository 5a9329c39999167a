"""Verification: compare a split model with the whole one before training, on copies."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.arguments import describe_type
from commlib.communicator import Communicator
from commlib.comparison.agreement import run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.group.single_rank import SingleRank
from commlib.pipeline.cut_check import ModelRun, compare_with_original, cut_failure, mode
from commlib_torch._bridge import host_array
from commlib_torch._copies import copy_of, force_mode, preserve_random_state
from commlib_torch.expert.losses import keepers_in
from commlib_torch.pipelines._batches import arguments
from commlib_torch.pipelines._losses import total_of
from commlib_torch.pipelines._parts import SplitModel
from commlib_torch.pipelines._reference_run import (
    call_chain,
    first_names,
    named_modules,
    named_values,
    reference_run,
    staged_run,
    tolerance_of,
)
from commlib_torch.pipelines._shared_objects import SharedObjects

_NO_TENSORS = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, type(None))


class VerifiedPipeline(Protocol):
    """The methods of a pipeline that verification uses."""

    @property
    def parts(self) -> list[nn.Module]: ...

    def step(self, x: Any, y: Any) -> Tensor: ...

    def named_parameters(self, *, remove_duplicate: bool) -> Any: ...

    def close(self) -> None: ...


def check_with_example(
    comm: Communicator, model: Any, cut: SplitModel, example: Any, *, shared: SharedObjects, spreads: bool
) -> None:
    """Compare stages with the whole model on an example, on rank 0, in training and in evaluation mode.

    Raises UsageError on all ranks if anything differs. A mode that cannot run with the example, such as batch norm in
    training on one row, is skipped silently. Collective.
    """

    def check() -> None:
        if comm.rank == 0:
            errors = [_run_comparison(model, cut, example, shared, spreads, training) for training in (True, False)]
            failed = [error for error in errors if error is not None]
            if len(failed) == 2:
                warnings.warn(
                    "pipeline: the split model is not compared with the whole model, of which a copy does not run with "
                    f"example=: {type(failed[0]).__name__}: {failed[0]}",
                    stacklevel=5,
                )

    run_together(comm, check)


def _run_comparison(
    model: Any, cut: SplitModel, example: Any, shared: SharedObjects, spreads: bool, training: bool
) -> Exception | None:
    """Return why the whole model cannot run; None if it runs."""
    call = arguments(example)
    try:
        whole = reference_run(model, call, spreads=spreads, training=training)
    except Exception as error:
        return error
    own = _run_of_cut(model, cut, call, shared, training)
    compare_with_original(
        SingleRank(), whole, own, when=mode(training), tolerance=tolerance_of(model), every=False, hint=shared.hint
    )
    return None


def _run_of_cut(model: Any, cut: SplitModel, call: Any, shared: SharedObjects, training: bool) -> ModelRun:
    parts = shared.copies(cut.parts) if shared.exist else copy_of(list(cut.parts))
    try:
        return staged_run(parts, cut.values, first_names(model), call, training=training)
    except Exception as error:
        raise UsageError(f"{cut_failure(training, error)}{shared.hint}") from error


def verify_cut(
    comm: Communicator,
    model: Any,
    cut: SplitModel,
    batch: Any,
    *,
    loss: Any,
    updates: bool,
    make: Callable[[SplitModel, Any], VerifiedPipeline],
    shared: SharedObjects,
    spreads: bool,
) -> None:
    """Compare stages with the whole model on a batch: sequentially in both modes, then in a step in evaluation mode.

    batch: the arguments of a pipeline's step, the same on all ranks. updates: the schedule updates weights, so a step
    has no gradients to compare. make: makes a pipeline from stages and a loss. Raises UsageError on all ranks if
    anything differs. Collective.
    """
    x, y = unpack_batch(batch)
    call, tolerance = arguments(x), tolerance_of(model)
    check_agreement(comm, "verify", _describe_batch(batch, model))
    for training in (True, False):
        whole = run_together(comm, partial(reference_run, model, call, spreads=spreads, training=training))
        own = run_together(comm, partial(_run_of_cut, model, cut, call, shared, training))
        compare_with_original(comm, whole, own, when=mode(training), tolerance=tolerance, every=False, hint=shared.hint)
    has_own_losses = any(keepers_in(part) for part in cut.parts)  # buffers follow microbatches, not the batch
    if loss is None or updates or has_own_losses:
        return
    expected = run_together(comm, lambda: _step_in_one_process(model, call, y, loss, spreads))
    pipe = make(SplitModel(tuple(copy_of(list(cut.parts))), cut.values, cut.counts), _copy_of_loss(loss))
    try:
        everything = [module for part in pipe.parts for module in part.modules()]
        with force_mode(everything, training=False), preserve_random_state():
            value = pipe.step(x, y)
        gradients = {
            name: None if weight.grad is None else host_array(weight.grad)
            for name, weight in pipe.named_parameters(remove_duplicate=False)
        }
    finally:
        pipe.close()
    stages = {name: stage for stage, part in enumerate(cut.parts) for name, _ in part.named_parameters()}
    own = ModelRun({"the loss": _number(value)}, gradients, stages=stages)
    compare_with_original(comm, expected, own, when="in a step in evaluation mode", tolerance=tolerance)


def _step_in_one_process(model: Any, call: Any, y: Any, loss: Any, spreads: bool) -> ModelRun:
    """Run forward and backward in one process, on a copy."""
    copied, own_loss = copy_of(model), _copy_of_loss(loss)
    modules = [copied] if isinstance(copied, nn.Module) else []
    everything = [*modules, *named_modules(copied).values()]
    fresh = pytree.tree_map_only(Tensor, torch.clone, call)
    with force_mode(everything, training=False), preserve_random_state(), torch.enable_grad():
        output = call_chain(copied, fresh, spreads=spreads)
        value = total_of(_loss_of(own_loss, output, y))
        value.backward()
    gradients = {
        name: None if weight.grad is None else host_array(weight.grad)
        for name, weight in named_values(copied, "named_parameters")
    }
    return ModelRun({"the loss": _number(value)}, gradients)


def _loss_of(loss: Any, output: Any, y: Any) -> Any:
    """Return the loss of an output. Raises UsageError if a target is missing."""
    if y is not None:
        return loss(output, y)
    try:
        return loss(output)
    except TypeError as error:
        raise UsageError(
            f"pipeline: verify= has no target, and the loss cannot be called without one ({error}): pass "
            "verify=(x, y), the arguments of step"
        ) from error


def _number(loss: Tensor) -> Any:
    return host_array(loss.detach().double().reshape(()))


def _copy_of_loss(loss: Any) -> Any:
    return copy_of(loss) if isinstance(loss, nn.Module) else loss


def unpack_batch(batch: Any) -> tuple[Any, Any]:
    """Return x and y of the batch given as `verify=`. Raises UsageError."""
    check_tensors("verify=", batch, "the arguments of step: (x, y)")
    if not isinstance(batch, tuple):
        return batch, None
    if len(batch) > 2 or not batch:
        raise UsageError(
            f"pipeline: verify= has {len(batch)} values; pass the arguments of step: (x, y), where x is a tuple if "
            "the model has several"
        )
    return batch if len(batch) == 2 else (batch[0], None)


def check_tensors(argument: str, batch: Any, expected: str) -> None:
    """Raise UsageError for a batch of numbers, texts or numpy arrays only, with which no model runs."""
    leaves = pytree.tree_leaves(batch)
    if all(isinstance(leaf, _NO_TENSORS) for leaf in leaves):
        raise UsageError(f"pipeline: {argument} has no tensor, expected {expected}, got {describe_type(batch)}")


def _describe_batch(batch: Any, model: Any) -> list[str]:
    """Return descriptions of the batch and the initial state of the model, which all ranks must agree on."""
    leaves = pytree.tree_leaves(batch)
    values = [_digest(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    begins = [*named_values(model, "named_parameters"), *named_values(model, "named_buffers")]
    lines = [f"verify: a value of the batch: {value}" for value in values]
    return lines + [f"verify: {name}: {_digest(tensor)}" for name, tensor in begins]


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(host_array(tensor.detach().contiguous()).tobytes()).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest[:16]}"
