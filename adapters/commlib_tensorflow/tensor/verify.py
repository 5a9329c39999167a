"""verify: run a sharded model and the unsharded one on the same batch, and report the first layer that differs."""

from __future__ import annotations

from typing import Any

from commlib.sharding.axis import AxisRanks
from commlib.tensor_parallel.checks.trace_run import WHOLE, compare_runs, outputs_of
from commlib_tensorflow.tensor._runs import run_model
from commlib_tensorflow.tensor.moves import axis_of
from commlib_tensorflow.tensor.names import layers_of
from commlib_tensorflow.tensor.tracing import styles_in


def verify(model: Any, reference: Any, ranks: AxisRanks, batch: Any, *, tolerance: float | None = None) -> None:
    """Compare one forward and backward of a sharded model with those of the unsharded one.

    Collective over the axis. The models' variables do not change.

    They run in evaluation mode. Compared are, in this order, the results of all layers and of the operations between
    them, the gradients of the inputs and those of the weights, for a loss that is a fixed weighted sum of the outputs.
    Layers of the two models are matched by order.

    Args:
        model: The sharded model.
        reference: The unsharded model.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        batch: The arguments of both, unsharded and the same on every rank.
        tolerance: Relative to the largest element; by default 1e-9 in float64, 1e-4 in float32, 5e-2 in bfloat16.

    Raises:
        UsageError: On all ranks, with the first difference, its size and its ranks.
    """
    on, layers = axis_of(ranks, "verify"), layers_of(model)
    styles = styles_in(layers)
    theirs = dict(zip(layers, layers_of(reference).values(), strict=True))
    paths = [variable.path for variable in model.trainable_variables]
    whole = run_model(reference, theirs, batch, styles, WHOLE, paths)
    own = run_model(model, layers, batch, styles, outputs_of(whole, styles, on))
    compare_runs(on, whole, own, styles, tolerance)
