"""What 1-bit Adam and 1-bit LAMB have in common as optimizers of Keras 3.

The moments are variables of Keras, so that they are saved, loaded and broadcast like those of any optimizer. A step is
one function of the host, which gets all variables and gradients, and returns what the variables become.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.errors import UsageError
from commlib.optim.one_bit_adam import Hyper, Moments
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._graph import Spec, call
from commlib_tensorflow._graph import no_autograph as as_written
from commlib_tensorflow._keras3 import _replace_in_keras
from commlib_tensorflow._keras_reduction import Distributed, Reduction
from commlib_tensorflow._pool import Pool


class OneBit(Distributed, keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that averages over the ranks by itself. Subclasses say what the update is.

    Being `Distributed`, it is not compiled by XLA, agrees on steps under loss scaling, and cannot be distributed again.
    """

    _kinds: tuple[str, ...] = ("momentum", "velocity")

    def __init__(
        self,
        learning_rate: Any,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        *,
        freeze_step: int,
        process_set: Any,
        compress_within_node: bool,
        variance_floor: float,
        scheme: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        if freeze_step < 1:
            raise UsageError(f"freeze_step must be at least 1, got {freeze_step}: 15 to 25 % of all steps are usual")
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.freeze_step = freeze_step
        self.compress_within_node, self.variance_floor = compress_within_node, variance_floor
        reduction = Reduction(
            self.name,
            groups=None,
            undo_division=1,
            scale_local_gradients=True,
            local_layers=(),
            process_set=process_set,
        )
        # Past Keras, which keeps track of what it is given.
        for name, value in (
            ("_commlib", reduction),
            ("_process_set", core.process_set_of(process_set)),
            ("_scheme", scheme),
            ("_update", None),
            ("_pool", Pool()),
        ):
            object.__setattr__(self, name, value)
        _replace_in_keras()

    def register_local_var(self, variable: Any) -> None:
        """Raise UsageError: all gradients travel together here."""
        raise UsageError(f"{type(self).__name__} has no gradients that stay on one rank")

    def build(self, variables: Any) -> None:
        """Make the variables for the moments. Raises UsageError for variables that are not float32."""
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            if variable.dtype != "float32":
                raise UsageError(
                    f"{type(self).__name__}: variables must be float32, {variable.path} is {variable.dtype}"
                )
        self._arrays = [
            self.add_variable_from_reference(variable, name=kind) for kind in self._kinds for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Raise UsageError: variables are updated together."""
        raise UsageError(f"{type(self).__name__} updates all variables together: call apply()")

    @as_written
    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        # Keras calls this once for each real update, after it has accumulated and clipped.
        everything = self._trainable_variables
        given = {
            self._get_variable_index(variable): tf.convert_to_tensor(gradient)
            for gradient, variable in zip(grads, trainable_variables, strict=True)
        }
        state = [*everything, *self._states()]
        outputs = [Spec(tf.float32, tf.TensorShape(variable.shape)) for variable in state]
        numbers = sorted(given)

        def host(step: Array, rate: Array, *arrays: Array) -> Sequence[Array]:
            gradients = dict(zip(numbers, arrays, strict=False))
            return self._step(int(step), float(rate), gradients, arrays[len(numbers) :])

        steps, rate = tf.cast(self.iterations, tf.int64), tf.cast(learning_rate, tf.float32)
        values = [variable.value for variable in state]
        results = call(host, [steps, rate, *(given[number] for number in numbers), *values], outputs)
        for variable, result in zip(state, results, strict=True):
            self.assign(variable, result)

    def _states(self) -> list[Any]:
        """Return the variables that hold what the core remembers."""
        return list(self._arrays)

    def _flat(self) -> list[Array]:
        """Return what the core has for `_arrays`."""
        parameters = self._update.moments.parameters
        return [parameter.first for parameter in parameters] + [parameter.second for parameter in parameters]

    def _load(self, states: Sequence[Array]) -> None:
        """Give the core the values of `_states`."""
        for flat, state in zip(self._flat(), states, strict=False):
            flat[...] = state.reshape(-1)

    def _save(self, states: Sequence[Array]) -> None:
        """Write the values of `_states` as the core has them."""
        for flat, state in zip(self._flat(), states, strict=False):
            state[...] = flat.reshape(state.shape)

    def _step(self, step: int, rate: float, gradients: dict[int, Array], arrays: Sequence[Array]) -> list[Array]:
        """Take a step on the host, and return what the variables and the state become."""
        count = len(self._trainable_variables)
        update = self._update or self._start([array.size for array in arrays[:count]])
        moments = update.moments
        results = [self._pool.empty(array.shape, np.float32) for array in arrays]
        for result, array in zip(results[:count], arrays, strict=False):
            result[...] = array
        self._load(arrays[count:])
        if moments.steps != step:
            moments.load(step, {})  # residuals belong to another run
        for number, parameter in enumerate(moments.parameters):
            gradient = gradients.get(number)
            moments.used[number] = gradient is not None
            parameter.gradient[...] = 0 if gradient is None else gradient.reshape(-1)
        hyper = Hyper(rate, self.beta_1, self.beta_2, self.epsilon)
        update.step([result.reshape(-1) for result in results[:count]], [hyper] * count)
        self._save(results[count:])
        return results

    def _start(self, counts: Sequence[int]) -> Any:
        what = type(self).__name__
        moments = Moments(
            self._process_set.communicator(what),
            [(str(number), count) for number, count in enumerate(counts)],
            self.freeze_step,
            scheme=self._scheme,
            floor=self.variance_floor,
            within_node=self.compress_within_node,
            what=what,
        )
        object.__setattr__(self, "_update", self._make_update(moments))
        return self._update

    def _make_update(self, moments: Moments) -> Any:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the settings, but for the ranks and the scheme, which belong to this run."""
        names = ("beta_1", "beta_2", "epsilon", "freeze_step", "compress_within_node", "variance_floor")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
