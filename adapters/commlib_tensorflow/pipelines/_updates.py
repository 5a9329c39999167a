"""Updates: let a Keras optimizer update this rank's part of a model as it would update the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.norm import sum_of_squares
from commlib.optim.clipping import clip_factor, norm_of_powers, power_over_axes
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow._keras_reduction import DistributedMixin
from commlib_tensorflow._local_gradients import places_of
from commlib_tensorflow._shards import shard_of, take_counted
from commlib_tensorflow.pipelines._replicas import Gradients, note, reduce_over_replicas


def check_optimizer(optimizer: Any, *, ranks: int, flushes: bool) -> None:
    """Refuse settings that an optimizer of a part of a model cannot support. The UsageError suggests a remedy."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "pipeline: a LossScaleOptimizer, which compile() wraps around every optimizer of a mixed_float16 model, "
            "adapts the loss scale to this rank's gradients alone: use mixed_bfloat16, or give the optimizer a fixed "
            "loss_scale_factor and compile(auto_scale_loss=False)"
        )
    within = getattr(optimizer, "_inner_optimizers", ())
    if ranks > 1 and any(getattr(one, "global_clipnorm", None) for one in within):
        raise UsageError(
            f"pipeline: a {type(optimizer).__name__} contains an optimizer with global_clipnorm, which would see only "
            "this rank's gradients: use clipnorm or clipvalue, or clip_grad_norm of the pipeline"
        )
    if ranks > 1 and getattr(optimizer, "global_clipnorm", None):
        why = ""
        if not flushes:
            why = "this schedule updates stages at different times: use clipnorm or clipvalue"
        elif optimizer.gradient_accumulation_steps:
            why = "gradient_accumulation_steps delays clipping: use more microbatches instead"
        if why:
            raise UsageError(f"pipeline: global_clipnorm needs the gradients of all stages, and {why}")


class Updates:
    """Updates of variables by a Keras optimizer, in a function that TensorFlow compiles, as `fit` does.

    The first update is not compiled, because the optimizer creates its variables in it; nor is a reducing optimizer,
    which needs the host.
    """

    def __init__(self, optimizer: Any, *, eager: bool) -> None:
        self._optimizer = optimizer
        self._compiles = not eager and not isinstance(optimizer, DistributedMixin)
        self._functions: dict[tuple[int, ...], Any] = {}

    def __call__(self, variables: Sequence[Any], gradients: Gradients, norm: Callable[[Gradients], float]) -> None:
        """Update variables. norm: returns the norm over all stages; it is called if the optimizer clips by it."""
        optimizer = self._optimizer
        limit = getattr(optimizer, "global_clipnorm", None)
        if limit:
            limit *= scale_of(optimizer)  # Keras unscales before it clips
            gradients = reduce_over_replicas(optimizer, variables, gradients)
            gradients = scale_gradients(gradients, clip_factor(norm(gradients), limit, infinite_is_nan=True))
        if all(gradient is None for gradient in gradients):
            return
        if not limit:
            self._apply(variables, gradients)
            return
        note(optimizer, gradients)
        before, optimizer.global_clipnorm = optimizer.global_clipnorm, None
        try:
            self._apply(variables, gradients)
        finally:
            optimizer.global_clipnorm = before

    def _apply(self, variables: Sequence[Any], gradients: Gradients) -> None:
        optimizer = self._optimizer
        if not (self._compiles and optimizer.built):
            optimizer.apply(list(gradients), list(variables))
            return
        key = tuple(map(id, variables))
        if key not in self._functions:
            own = list(variables)
            self._functions[key] = tf.function(lambda gradients: optimizer.apply(gradients, own), autograph=False)
        self._functions[key](list(gradients))


def scale_of(optimizer: Any) -> float:
    """Return the factor of an optimizer's losses, by which it divides gradients."""
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


def norm_over(comm: Communicator, gradients: Sequence[tuple[Any, tf.Tensor | None]], norm_type: float = 2.0) -> float:
    """Return the norm of the gradients of all ranks, given with their variables. Collective.

    norm_type: as `commlib.optim.clipping.check_norm_type` takes it. Gradients of a sharded variable count as one
    unsharded gradient.
    """
    shards = [shard_of(variable) for variable, _ in gradients]
    powers = (
        (
            None if shard is None else shard.axis.comm,
            0.0 if gradient is None else _power(_flat(take_counted(gradient, shard)), norm_type),
        )
        for shard, (_, gradient) in zip(shards, gradients, strict=True)
    )
    return norm_of_powers(comm.all_gather_object(power_over_axes(powers, norm_type)), norm_type)


def _power(values: Any, norm_type: float) -> float:
    """Return the sum of the powers of values' magnitudes; for the inf norm, the largest magnitude."""
    if norm_type == 2:
        return sum_of_squares(values)
    sizes = np.abs(values.astype(np.float64))
    return float(sizes.max(initial=0.0)) if norm_type == math.inf else float((sizes**norm_type).sum())


def _flat(gradient: tf.Tensor) -> Array:
    return to_array(gradient).reshape(-1)


def scale_gradients(gradients: Gradients, factor: float) -> list[tf.Tensor | None]:
    """Return gradients times a number."""
    if factor == 1:
        return list(gradients)
    return [None if g is None else g * tf.constant(factor, g.dtype) for g in gradients]


# The state of an optimizer, by variable rather than by rank


def state_of(optimizer: Any) -> tuple[dict[str, Array], dict[str, list[Array | None]]]:
    """Return an optimizer's variables: single ones for all weights, and lists with one for each weight."""
    singles, lists = _state_variables(optimizer)
    values = {
        name: [None if v is None else to_array(tf.convert_to_tensor(v.value)) for v in own]
        for name, own in lists.items()
    }
    return {name: to_array(tf.convert_to_tensor(variable.value)) for name, variable in singles.items()}, values


def put_state(optimizer: Any, singles: dict[str, Array], lists: dict[str, dict[int, Array | None]]) -> None:
    """Load the state of other ranks into a built optimizer. lists: by the index of the weight."""
    own_singles, own_lists = _state_variables(optimizer)
    for name, variable in own_singles.items():
        if name in singles:
            variable.assign(singles[name])
    for name, variables in own_lists.items():
        for place, variable in enumerate(variables):
            value = lists.get(name, {}).get(place)
            if variable is not None and value is not None:
                variable.assign(value)


def local_state_of(optimizer: Any) -> list[Any]:
    """Return a Keras 3 optimizer's state of variables, such as experts, that are not the same on all ranks."""
    weights = list(getattr(optimizer, "_trainable_variables", None) or ())
    places = places_of(weights)
    if not places:
        return []
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    slots = [variables[place] for variables in lists_of(plain).values() for place in places]
    return [variable for variable in slots if variable is not None]


def singles_of(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that are variables for all weights."""
    return _state_variables(optimizer)[0]


def lists_of(optimizer: Any) -> dict[str, list[Any]]:
    """Return the attributes of an optimizer that are lists with a variable, or None, for each weight."""
    return _state_variables(optimizer)[1]


def _state_variables(optimizer: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return an optimizer's attributes that are variables, and those that are lists with one for each weight.

    Lists of the weights themselves, which some optimizers keep, are excluded.
    """
    if optimizer is None or not optimizer.built:
        return {}, {}
    count, weights = len(optimizer._trainable_variables), set(map(id, optimizer._trainable_variables))
    singles = {name: value for name, value in vars(optimizer).items() if isinstance(value, keras.Variable)}
    lists: dict[str, list[Any]] = {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, list) or len(value) != count:
            continue
        own = [one if isinstance(one, keras.Variable) and id(one) not in weights else None for one in value]
        if any(one is not None for one in own):
            lists[name] = own
    return singles, lists
