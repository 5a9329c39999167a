"""Distributed optimizers of Keras 2 (tf_keras) and of TensorFlow 1.

Keras 2 has a method that combines gradients of several devices, and its LossScaleOptimizer calls it before it checks
for infinities, so ranks agree without further work. Optimizers of TensorFlow 1 have no such method; their gradients are
reduced when they are computed, as in `minimize`.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib_tensorflow._checkpoint_files import watch_checkpoints
from commlib_tensorflow._keras_reduction import (
    DistributedKeras,
    DistributedMixin,
    KerasGradients,
    Wrapper,
    become,
    check_momentum,
    gradients_of,
)


class DistributedKeras2(DistributedKeras):
    """Optimizer of Keras 2 that refuses to be copied or pickled: its communicator belongs to this process."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UsageError."""
        raise UsageError(
            "a distributed optimizer of Keras 2 cannot be copied or pickled: make another one by "
            "type(optimizer).from_config(optimizer.get_config())"
        )


class AggregateHook(DistributedKeras2):
    """Reduces in `aggregate_gradients`, which new optimizers of Keras 2 call in each `apply_gradients`."""

    _commlib_passes: GradientPasses | None

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of gradients and variables: reduced, except within a LossScaleOptimizer, which unscales."""
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            return gradients_of(loss, var_list, tape)
        return super().compute_gradients(loss, var_list, tape)

    def minimize(self, loss: Any, var_list: Any, tape: Any = None) -> None:
        """Make a step as Keras does: gradients are reduced when they are applied."""
        self.apply_gradients(gradients_of(loss, var_list, tape))

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradients and variables."""
        check_momentum(self, self._commlib.reducer.options.compression)
        if self._commlib_passes is not None and getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            raise UsageError(
                "backward_passes_per_step does not work with the LossScaleOptimizer of Keras 2, which decides in each "
                "pass whether to update: use Keras 3, or leave it at 1"
            )
        return _reduce_pairs(self._commlib, grads_and_vars)

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Update variables with reduced gradients, in every k-th pass, as Keras does."""
        if self._commlib_passes is None:
            return super().apply_gradients(  # type: ignore[misc]
                grads_and_vars, name=name, skip_gradients_aggregation=skip_gradients_aggregation, **kwargs
            )
        self_: Any = self
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        with tf.init_scope():  # a branch cannot create variables
            self_.build([variable for _, variable in pairs])
        apply_gradients = super().apply_gradients  # type: ignore[misc]

        def step(gradients: list[Any]) -> Any:
            pairs_ = zip(gradients, [variable for _, variable in pairs], strict=True)
            apply_gradients(pairs_, name, skip_gradients_aggregation=skip_gradients_aggregation, **kwargs)
            return tf.identity(self_.iterations)

        def no_step() -> Any:
            return tf.identity(self_.iterations.assign_add(1))  # Keras 3 and Horovod count the same way

        self._commlib_passes.add(pairs, step, no_step)
        return self_.iterations


class LegacyAggregateHook(DistributedKeras2):
    """Reduces in `_aggregate_gradients`, which `tf_keras.optimizers.legacy` and others of that kind call."""

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        return _reduce_pairs(self._commlib, grads_and_vars)


class ComputeHook(Wrapper):
    """Reduces in `compute_gradients`: `tf.compat.v1.train.Optimizer`."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradients and variables."""
        return _reduce_pairs(self._commlib, super().compute_gradients(*args, **kwargs))  # type: ignore[misc]


class GradientPasses:
    """Sums of the gradients of `count` passes before a step."""

    def __init__(self, count: int, *, average: bool) -> None:
        self._count, self._average = count, average
        self._sums: dict[Any, tf.Variable] = {}
        self._passes: tf.Variable | None = None

    @property
    def under_way(self) -> bool:
        """Whether gradients were added since the last step."""
        return self._passes is not None and int(self._passes) % self._count != 0

    def give_up(self) -> None:
        """Discard the sums since the last step: the next pass is a first one."""
        if self._passes is not None:
            self._passes.assign(0)
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))

    def add(self, pairs: list[tuple[Any, Any]], step: Any, no_step: Any) -> None:
        """Add gradients; call `step` with the sums after the last pass, otherwise `no_step`."""
        with tf.init_scope():
            if self._passes is None:
                self._passes = tf.Variable(0, dtype=tf.int64, trainable=False)
            for _, variable in pairs:
                if variable.ref() not in self._sums:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    self._sums[variable.ref()] = tf.Variable(zeros, trainable=False)
        sums = [self._sums[variable.ref()] for _, variable in pairs]
        for total, (gradient, _) in zip(sums, pairs, strict=True):
            total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        passes = self._passes.assign_add(1)

        def last() -> Any:
            divisor = self._count if self._average else 1
            result = step([total.read_value() / tf.cast(divisor, total.dtype) for total in sums])
            for total in sums:
                total.assign(tf.zeros_like(total))
            return result

        tf.cond(passes % self._count == 0, last, no_step)


def distribute(optimizer: Any, reduction: KerasGradients, backward_passes_per_step: int, *, average: bool) -> None:
    """Make an optimizer of Keras 2 or TensorFlow 1, or the one within a LossScaleOptimizer, reduce its gradients."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, DistributedMixin):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    mixin = hook_of(inner)
    if backward_passes_per_step > 1 and mixin is not AggregateHook:
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step} is for optimizers of Keras 3 and for those of "
            f"tf_keras.optimizers, not for {type(inner).__module__}.{type(inner).__name__}"
        )

    def prepare(one: Any) -> None:
        passes = GradientPasses(backward_passes_per_step, average=average) if backward_passes_per_step > 1 else None
        object.__setattr__(one, "_commlib_passes", passes)

    become(inner, mixin, reduction, prepare)
    if (legacy := sys.modules.get("tf_keras")) is not None:
        watch_checkpoints(legacy.callbacks.ModelCheckpoint)


def hook_of(optimizer: Any) -> type[DistributedMixin]:
    """Return the class that makes this optimizer reduce."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return ComputeHook
    return AggregateHook if hasattr(optimizer, "aggregate_gradients") else LegacyAggregateHook


def _reduce_pairs(reduction: KerasGradients, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = list(grads_and_vars)
    if reduction.are_reduced([gradient for gradient, _ in pairs]):
        return pairs
    variables = [variable for _, variable in pairs]
    return list(zip(reduction.reduce([gradient for gradient, _ in pairs], variables), variables, strict=True))
