"""Losses: the weight of each microbatch's loss in the loss of the batch, from the reductions of Keras' losses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.pipeline.losses import (
    REMEDY,
    CheckSchedule,
    MicrobatchWeights,
    Weigher,
    fault_in_sum,
    is_repeatable,
    weights_of,
)
from commlib_tensorflow._bridge import to_array

_MEANS = ("sum_over_batch_size", "mean")
_REDUCTIONS = (*_MEANS, "sum", "mean_with_sample_weight")


class LossWeights:
    """Weights of microbatches' losses, as the user gives them or as the reductions of Keras' losses imply.

    loss: as compile() takes it. outputs: the names of the model's outputs; masked: whether each has a mask, by which
    Keras divides. Raises UsageError for a loss that mixes rows, and for a mean over unmasked elements whose number is
    unknown.

    For losses that are not Keras' own, in some batches the loss of several microbatches together is compared with their
    separate losses: see `CheckSchedule`.
    """

    def __init__(
        self, loss: Any, outputs: Sequence[str], weigher: Weigher, *, microbatches: int, masked: Sequence[bool] = ()
    ) -> None:
        self._outputs, self._weigher, self._microbatches = list(outputs), weigher, microbatches
        self._looks = CheckSchedule()
        self._losses = [_OutputLoss(leaf) for leaf in self._by_output(loss)]
        if microbatches > 1 and not weigher.is_set and (mixing := [leaf for leaf in self._losses if leaf.mixes_rows]):
            raise UsageError(
                f"pipeline: {mixing[0].name} is not a mean over the rows of a batch, so the losses of microbatches do "
                'not add up to it: use microbatches=1, or weigh="rows" to train with the mean of their losses'
            )
        for leaf, name, is_masked in zip(self._losses, self._outputs, masked, strict=False):
            if microbatches > 1 and not weigher.is_set and is_masked and leaf.loss is not None and not leaf.is_sum:
                raise UsageError(
                    f"pipeline: the model's output {name!r} has a mask, so the loss of a microbatch is the mean over "
                    "its unmasked elements: give weigh= to pipeline(), a function of a microbatch's target (and "
                    "inputs) that returns their number, such as lambda target, inputs: (inputs != 0).sum(); or a loss "
                    'of reduction="sum"; or let a layer without a mask come last'
                )

    @property
    def is_set(self) -> bool:
        """Whether the user gives the number of terms in a microbatch's loss."""
        return self._weigher.is_set

    def weights(
        self, rows: Sequence[int], targets: Sequence[Any], sample_weights: Sequence[Any], inputs: Sequence[Any]
    ) -> MicrobatchWeights:
        """Return the weight of each microbatch.

        Raises UsageError if the losses of outputs weigh microbatches differently.
        """
        if self.is_set:
            return self._weigher.weights(rows, targets, inputs, sample_weights)
        if sum(map(bool, rows)) < 2:
            return weights_of(rows, rows)
        weights_by_output: list[MicrobatchWeights] = []
        for place, leaf in enumerate(self._losses):
            if leaf.loss is None:
                continue
            own = [self._of_output(target, place) for target in targets] if leaf.reads_targets else [None] * len(rows)
            weights = [self._of_output(weight, place) for weight in sample_weights] if leaf.reads_weights else own
            terms = [leaf.terms(*given) if given[0] else 0.0 for given in zip(rows, own, weights, strict=True)]
            weights_by_output.append(weights_of(terms, rows, is_sum=leaf.is_sum))
        if any(
            not np.allclose(one.in_batch(), weights_by_output[0].in_batch(), rtol=1e-9, atol=0)
            for one in weights_by_output[1:]
        ):
            raise UsageError(
                "pipeline: the losses of the model's outputs are means over different numbers of terms, so a "
                "microbatch has a different weight in each: give all the same reduction, set microbatches=1, or weigh="
            )
        return weights_by_output[0] if weights_by_output else weights_of(rows, rows)

    def wants_check(self, targets: Sequence[Any], rows: Sequence[int]) -> bool:
        """Count a batch; return whether to keep outputs for a check of the loss of several microbatches together."""
        is_known = not self.is_set and all(leaf.is_known for leaf in self._losses)
        if is_known or not self._weigher.is_checked or sum(map(bool, rows)) < 2:
            return False
        return self._looks.is_due(_kind(targets[0]))

    @property
    def wants_inputs(self) -> bool:
        """Whether the user's function needs the inputs."""
        return self._weigher.wants_inputs

    def fault(self, again: float, whole: float, losses: Sequence[tf.Tensor], weights: MicrobatchWeights) -> str:
        """Return an error text for the losses of some microbatches; "" if they are right, or cannot be checked.

        again: the loss of the first microbatch, recomputed; whole: the loss of all of them together.
        """
        epsilon = float(np.finfo(losses[0].dtype.as_numpy_dtype).eps) if losses[0].dtype != tf.bfloat16 else 2.0**-7
        own = [float(loss) for loss in losses]
        if not is_repeatable(own[0], again, epsilon):
            self._looks.end()
            return ""
        by = "weigh=" if self.is_set else "their rows"
        return fault_in_sum(whole, own, weights, epsilon, by=by)

    def _by_output(self, loss: Any) -> list[Any]:
        if not keras.tree.is_nested(loss):
            return [loss] * len(self._outputs)
        return self._flat(loss)

    def _of_output(self, value: Any, place: int) -> Any:
        flat = self._flat(value)
        if len(flat) == 1 and not keras.tree.is_nested(value):
            return flat[0]  # one value for all outputs
        if len(flat) != len(self._losses):
            raise UsageError(
                f"pipeline: got {len(flat)} targets or sample weights for {len(self._losses)} losses: {REMEDY}"
            )
        return flat[place]

    def _flat(self, value: Any) -> list[Any]:
        if isinstance(value, dict) and set(value) <= set(self._outputs):
            return [value.get(name) for name in self._outputs]
        return list(value) if isinstance(value, list | tuple) else keras.tree.flatten(value)


class CompiledLoss(NamedTuple):
    """The loss of compile(): a function of (target, outputs, sample weight), None if there is none; and its weights."""

    function: Any
    weights: LossWeights


class _OutputLoss:
    """The loss of one output."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss = keras.losses.get(loss) if isinstance(loss, str | dict) else loss
        self.reduction = getattr(loss, "reduction", None) or ("none" if hasattr(loss, "reduction") else _MEANS[0])
        self.name = getattr(loss, "__name__", type(loss).__name__)
        if self.reduction not in _REDUCTIONS:
            raise UsageError(
                f"pipeline: the reduction of {self.name} is {self.reduction!r}, expected one of "
                f"{', '.join(map(repr, _REDUCTIONS))}, so that the loss of a microbatch is a number"
            )
        ignored = getattr(loss, "ignore_class", None)
        if ignored is None:
            ignored = getattr(loss, "_fn_kwargs", {}).get("ignore_class")
        self._ignored: int | None = ignored
        function = getattr(loss, "fn", loss)
        axis = getattr(loss, "_fn_kwargs", {}).get("axis", getattr(loss, "axis", None))
        axes = (axis,) if isinstance(axis, int) else axis
        kind = getattr(function, "__name__", "")
        is_keras = str(getattr(function, "__module__", "")).startswith(("keras.", "tf_keras."))
        is_own_class = not type(loss).__module__.startswith(("keras.", "builtins", "tf_keras."))
        self.mixes_rows = is_keras and (kind == "circle" or (kind in ("dice", "tversky") and (not axes or 0 in axes)))
        self.is_known = loss is None or (is_keras and not is_own_class and not self.mixes_rows)
        """Whether it is Keras' own loss with known terms, which needs no check."""

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a sum."""
        return bool(self.reduction == "sum")

    @property
    def reads_weights(self) -> bool:
        """Whether sample weights change the number of terms of the mean."""
        return self.reduction == "mean_with_sample_weight"

    @property
    def reads_targets(self) -> bool:
        """Whether targets change the number of terms of the mean."""
        return self._ignored is not None

    def terms(self, rows: int, target: Any, sample_weight: Any) -> float:
        """Return the number of terms in the loss of a microbatch."""
        counted = None if self._ignored is None else to_array(target) != self._ignored
        if not self.reads_weights or sample_weight is None:
            return float(rows if counted is None else counted.sum())
        weight = to_array(sample_weight).astype(np.float64)
        if counted is None:
            return float(weight.sum())
        weight = weight.reshape(weight.shape + (1,) * (counted.ndim - weight.ndim))
        return float((weight * counted).sum())


def _kind(value: Any) -> Hashable:
    leaves = [leaf for leaf in keras.tree.flatten(value) if leaf is not None]
    return tuple((len(leaf.shape), leaf.dtype) for leaf in leaves)
