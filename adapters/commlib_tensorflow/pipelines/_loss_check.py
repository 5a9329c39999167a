"""Loss check: compare the losses of microbatches with the loss of several of them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from commlib.pipeline.losses import MicrobatchWeights
from commlib.pipeline.rows import WHOLE, each
from commlib_tensorflow.pipelines._losses import CompiledLoss
from commlib_tensorflow.pipelines._model_outputs import ModelOutputs
from commlib_tensorflow.pipelines._stages import Batch


def fault_in(batch: Batch, loss: CompiledLoss, model_outputs: ModelOutputs, where: Any) -> str:
    """Return an error text if the losses of microbatches disagree with the loss of some of them together; or "".

    where: the rows of targets.
    """
    numbers = sorted(batch.outputs)
    if len(numbers) < 2 or batch.weights is None or numbers[0] not in batch.losses:
        return ""
    try:
        again = float(_loss_of(batch, numbers[:1], loss, model_outputs, where))
        whole = float(_loss_of(batch, numbers, loss, model_outputs, where))
    except Exception:  # a loss that fails for several microbatches cannot be compared
        return ""
    weights = MicrobatchWeights(tuple(batch.weights.terms[number] for number in numbers), batch.weights.is_sum)
    losses = [batch.losses.get(number, tf.zeros((), tf.float64)) for number in numbers]
    return loss.weights.fault(again, whole, losses, weights)


def _loss_of(batch: Batch, numbers: Sequence[int], loss: CompiledLoss, model_outputs: ModelOutputs, where: Any) -> Any:
    """Return the loss of some microbatches as one."""
    outputs, masks = model_outputs.join(batch, numbers)
    for output, mask in zip(outputs, masks, strict=True):
        if mask is not None:
            output._keras_mask = mask  # Keras looks for the mask in this attribute
    target = _concatenate([batch.targets[n] for n in numbers], where)
    weight = _concatenate([batch.sample_weights[n] for n in numbers], 0)
    return loss.function(target, outputs, weight)


def _concatenate(values: Sequence[Any], where: Any) -> Any:
    """Concatenate nested tensors of several microbatches."""

    def one(place: Any, *leaves: Any) -> Any:
        return (
            leaves[0] if leaves[0] is None or not len(leaves[0].shape) or place == WHOLE else tf.concat(leaves, place)
        )

    return each(one, where, *values)
