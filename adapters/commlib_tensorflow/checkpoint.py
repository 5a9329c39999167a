"""Checkpoints of Keras models, optimizers and your own variables: all ranks save, and a job resumes bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import checkpoint as core
from commlib.checkpoint import generators
from commlib.checkpoint.checkpoint import CheckpointPart
from commlib.checkpoint.packed_state import PackedTensor
from commlib.errors import UsageError
from commlib.horovod.pytree import map_leaves
from commlib.ranks import Ranks
from commlib_tensorflow._keras_optimizers import build, variables_of
from commlib_tensorflow._keras_reduction import DistributedMixin
from commlib_tensorflow.expert.rebalance import owners_of, put_owners

__all__ = ["Checkpoint"]

RANDOM = "random"


class Checkpoint(core.Checkpoint):
    """Save and resume models and variables in a folder that all ranks see.

    The compression state of a distributed optimizer is saved, too, and so are the states of the random generators of
    Python, numpy and Keras' layers. So if training is interrupted between two steps and resumed on as many ranks, it
    computes the same bits; the input data must continue at the saved step.

    State that is equal on all ranks is written once; state that differs is written by each rank. `save(step)` and
    `resume()` are collective. On another number of ranks a job resumes only the state that was equal on all ranks.

        checkpoint = ct.Checkpoint("run", model=model)
        start = checkpoint.resume()

    Args:
        folder: A folder that all ranks see.
        keep: The number of checkpoints to keep.
        ranks: The ranks that save together; a mesh means all its ranks; None: all.
        **values: What is saved, by name: built models of Keras 3 or tf_keras (with their compiled optimizer),
            optimizers, variables, and lists of variables.

    Raises:
        UsageError: For other values.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, ranks: Ranks | None = None, **values: Any
    ) -> None:
        parts: dict[str, CheckpointPart] = {}
        for name, value in values.items():
            if name == RANDOM:
                raise UsageError(f"Checkpoint: '{RANDOM}' is reserved for random states: choose another name")
            parts |= _parts(name, value)
        if parts:
            parts[RANDOM] = CheckpointPart(generators.state, generators.load, is_needed=False)
        super().__init__(folder, parts, keep=keep, ranks=ranks)


def _parts(name: str, value: Any) -> dict[str, CheckpointPart]:
    if isinstance(value, list | tuple):
        return {name: _of_variables(name, lambda: list(value))}
    if hasattr(value, "assign") and not hasattr(value, "apply_gradients"):  # optimizers of Keras 3 have both
        return {name: _of_variables(name, lambda: [value])}
    if hasattr(value, "layers"):

        def weights() -> list[Any]:
            if not build(value):
                raise UsageError(f"checkpoint: {name} is not built yet: call it on a batch, or give it an Input")
            return list(value.variables)

        parts = {name: _of_variables(name, weights)}
        if owners_of(value):
            parts[f"{name}.experts"] = CheckpointPart(lambda: owners_of(value), lambda saved: put_owners(value, saved))
        if getattr(value, "optimizer", None) is not None:
            parts |= _of_optimizer(f"{name}.optimizer", lambda: value.optimizer, weights)
        return parts
    if hasattr(value, "apply_gradients"):
        return _of_optimizer(name, lambda: value, list)
    raise UsageError(
        f"Checkpoint: {name}= is a {type(value).__name__}: expected a model, an optimizer, a variable or a list of them"
    )


def _of_optimizer(name: str, optimizer: Callable[[], Any], ready: Callable[[], list[Any]]) -> dict[str, CheckpointPart]:
    """Return the parts of an optimizer, after a call of `ready()`. The state of compression differs between ranks."""

    def variables() -> list[Any]:
        ready()
        if not getattr(optimizer(), "built", True):
            raise UsageError(
                f"checkpoint: {name} is not built yet: call its build(model.trainable_variables), or save the model "
                "that was compiled with it"
            )
        return variables_of(optimizer())

    def reducing() -> Any:
        result = getattr(optimizer(), "inner_optimizer", optimizer())
        return result if isinstance(result, DistributedMixin) else None

    def state() -> Any:
        return {} if (result := reducing()) is None else result.compression_state()

    def load(saved: Any) -> None:
        if (result := reducing()) is not None and saved:
            arrays = map_leaves(saved, lambda leaf: leaf.array() if isinstance(leaf, PackedTensor) else leaf)
            result.load_compression_state(arrays)

    return {name: _of_variables(name, variables), f"{name}.compression": CheckpointPart(state, load, is_needed=False)}


def _of_variables(name: str, variables: Callable[[], list[Any]]) -> CheckpointPart:
    """Return the part of a list of variables, by index: names may repeat, and may differ in the next run."""

    def state() -> list[PackedTensor]:
        return [PackedTensor.of(np.asarray(tf.convert_to_tensor(variable))) for variable in variables()]

    def load(saved: list[PackedTensor]) -> None:
        own = variables()
        theirs = [(one.dtype, one.shape) for one in saved]
        mine = [(tf.as_dtype(variable.dtype).name, tuple(variable.shape)) for variable in own]
        if theirs != mine:
            raise UsageError(f"{name} was saved with different variables: expected {mine}, got {theirs}")
        for variable, one in zip(own, saved, strict=True):
            variable.assign(one.array())

    return CheckpointPart(state, load)
