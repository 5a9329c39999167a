"""Optimizers of Keras 2 and 3: their variables, learning rate and momentum."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def build(model: Any, optimizer: Any = None) -> bool:
    """Create the variables of an optimizer, by default the model's, if possible; return whether all variables exist."""
    if not model.built:
        return False
    optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    if optimizer is None or getattr(optimizer, "built", False):
        return True
    variables = model.trainable_variables
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:  # tf_keras.optimizers.legacy
        with tf.init_scope():
            optimizer._create_all_weights(variables)
    return True


def variables_of(optimizer: Any) -> list[Any]:
    """Return all state of an optimizer of Keras 2 or 3 that training changes, including the loss scale."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    result = list(variables() if callable(variables) else variables)
    if getattr(optimizer, "dynamic_counter", None) is not None:  # the LossScaleOptimizer of Keras 2
        result += [optimizer.dynamic_counter, optimizer._loss_scale.current_loss_scale]
    return result


def between_passes(optimizer: Any) -> bool:
    """Return whether an optimizer of Keras 2 or 3 has accumulated gradients since its last update."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if (passes := getattr(inner, "_commlib_passes", None)) is not None:  # Keras 2
        return bool(passes.under_way)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    return steps is not None and int(tf.convert_to_tensor(inner._iterations)) % int(steps) != 0


def give_up_passes(optimizer: Any) -> None:
    """Discard the gradients that an optimizer of Keras 2 or 3 has accumulated since its last update."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if (passes := getattr(inner, "_commlib_passes", None)) is not None:  # Keras 2
        passes.give_up()
    elif between_passes(optimizer):
        iterations = tf.convert_to_tensor(inner._iterations)
        inner._iterations.assign(iterations - iterations % int(inner.gradient_accumulation_steps))
        for total in inner._accumulated_gradients:
            total.assign(tf.zeros(total.shape, total.dtype))


def learning_rate_of(optimizer: Any) -> float:
    """Return the learning rate of an optimizer as a number."""
    return float(tf.convert_to_tensor(optimizer.learning_rate))


def momentum_of(optimizer: Any) -> list[Any]:
    """Return the variables that hold momentum in units of the learning rate, as in SGD and RMSprop."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    if not getattr(inner, "momentum", 0) or not kinds & {"SGD", "RMSprop"}:
        return []
    momentums = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None)
    if momentums is not None:
        return list(momentums)
    return [v for v in variables_of(inner) if "momentum" in v.name]  # tf_keras.optimizers.legacy
