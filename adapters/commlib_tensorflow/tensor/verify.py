"""verify: run a divided model and the undivided one on the same batch, and name the first layer that differs."""

from __future__ import annotations

from typing import Any

from commlib.tensor_parallel.checks.runs import WHOLE, compare_runs, outputs_of
from commlib_tensorflow.tensor._runs import ran
from commlib_tensorflow.tensor.moves import On, axis_of
from commlib_tensorflow.tensor.names import layers_of
from commlib_tensorflow.tensor.tracing import styles_in


def verify(model: Any, reference: Any, axis: On, batch: Any, *, tolerance: float | None = None) -> None:
    """Compare one forward and backward of a divided model with those of the undivided one.

    batch: what both are called with, whole and the same on every rank. They run as in evaluation; what is compared, in
    this order, are the results of all layers and of the operations between them, the gradients of the inputs and those
    of the weights, for a loss that is a fixed weighted sum of the outputs. The models' layers are named alike: those of
    the reference are told by their order. tolerance: relative to the largest element; by default 1e-9 in float64, 1e-4
    in float32, 5e-2 in bfloat16.

    Collective over the axis. Raises UsageError on all ranks: the first that differs, by how much, on which ranks. The
    models' variables stay as they are.
    """
    on, layers = axis_of(axis), layers_of(model)
    styles = styles_in(layers)
    theirs = dict(zip(layers, layers_of(reference).values(), strict=True))
    paths = [variable.path for variable in model.trainable_variables]
    whole = ran(reference, theirs, batch, styles, WHOLE, paths)
    own = ran(model, layers, batch, styles, outputs_of(whole, styles, on))
    compare_runs(on, whole, own, styles, tolerance)
