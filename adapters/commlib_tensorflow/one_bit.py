"""1-bit Adam and 1-bit LAMB: optimizers that average over the ranks themselves, with one bit for each weight.

The algorithms are in `commlib.optim`. Here they are optimizers of Keras 3: the moments are Keras variables, so they are
saved, loaded and broadcast like those of any optimizer. A step is one host function, which gets all variables and
gradients, and returns the new variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from numbers import Real
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.buffers.pool import Pool
from commlib.errors import UsageError
from commlib.horovod.mesh_sets import process_set_over
from commlib.optim.one_bit_lamb import CoefficientLimits
from commlib.optim.one_bit_moments import Hyperparameters, check_hyper
from commlib.optim.one_bit_optimizer import OneBitOptimizer, OneBitSettings
from commlib.ranks import Ranks
from commlib.sharding.shards import check_same_shard
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._host_calls import Spec, call, no_autograph
from commlib_tensorflow._keras3 import _replace_in_keras
from commlib_tensorflow._keras_reduction import DistributedMixin, KerasGradients
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow._variables import path_of


def _register(kind: type) -> type:
    register: Callable[[type], type] = keras.saving.register_keras_serializable("commlib")
    return register(kind)


class OneBit(DistributedMixin, keras.optimizers.Optimizer):  # type: ignore[misc]
    """Optimizer that averages over the ranks itself. Subclasses define the update.

    As a `DistributedMixin` optimizer it is not compiled by XLA, agrees on steps under loss scaling, and cannot be
    distributed again.
    """

    def __init__(
        self,
        learning_rate: Any,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        settings: OneBitSettings,
        ranks: Ranks | None,
        **kwargs: Any,
    ) -> None:
        rate = float(learning_rate) if isinstance(learning_rate, Real) else 0.0  # a schedule has no single value
        check_hyper(settings.kind, Hyperparameters(rate, beta_1, beta_2, epsilon, kwargs.get("weight_decay") or 0.0))
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.freeze_step = settings.freeze_step
        self.compress_within_node, self.variance_floor = settings.compress_within_node, settings.variance_floor
        process_set = core.global_process_set if ranks is None else process_set_over(ranks, settings.kind)
        reduction = KerasGradients(
            self.name,
            groups=None,
            undo_division=1,
            scale_local_gradients=True,
            local_layers=(),
            process_set=process_set,
        )
        # Bypasses Keras, which tracks attributes.
        for name, value in (
            ("_commlib", reduction),
            ("_process_set", core.process_set_of(process_set)),
            ("_core", OneBitOptimizer(settings)),
            ("_pool", Pool()),
        ):
            object.__setattr__(self, name, value)
        _replace_in_keras()

    def register_local_var(self, variable: Any) -> None:
        """Raise UsageError: all gradients travel together here."""
        raise UsageError(f"{type(self).__name__} reduces all gradients: none can stay on one rank")

    def build(self, variables: Any) -> None:
        """Create the state variables. Raises UsageError for variables that are not float32."""
        if self.built:
            return
        super().build(variables)
        is_lamb = self._core.settings.limits is not None
        check_same_shard(
            self._core.settings.kind,
            ((path_of(variable), shard_of(variable)) for variable in variables),
            self._process_set.ranks or (),
            local=True,
        )
        for variable in variables:
            self._core.settings.check_dtype(variable.dtype, path_of(variable))
        kinds = ("momentum", "velocity", "fresh_velocity") if is_lamb else ("momentum", "velocity")
        self._memory = [
            self.add_variable_from_reference(variable, name=kind) for kind in kinds for variable in variables
        ]
        if is_lamb:
            layers = self.add_variable((len(variables), 4), "zeros", "float32", name="layers")
            layers.assign([[0.0, 0.0, 1.0, 1.0]] * len(variables))
            self._memory.append(layers)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Raise UsageError: variables are updated together."""
        raise UsageError(f"{type(self).__name__} updates all variables together: call apply()")

    @no_autograph
    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        # Keras calls this once for each update, after it has accumulated and clipped.
        given = {
            self._get_variable_index(variable): tf.convert_to_tensor(gradient)
            for gradient, variable in zip(grads, trainable_variables, strict=True)
        }
        state = [*self._trainable_variables, *self._memory]
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

    def _step(self, step: int, rate: float, gradients: dict[int, Array], arrays: Sequence[Array]) -> list[Array]:
        """Take a step on the host; return the new variables and state."""
        optimizer, count = self._core, len(self._trainable_variables)
        if not optimizer.is_started:
            sizes = [array.size for array in arrays[:count]]
            optimizer.start(self._process_set.communicator(optimizer.settings.kind), sizes)
        optimizer.read(arrays[count:])
        optimizer.seek(step)
        places = optimizer.gradients
        for number, gradient in gradients.items():
            places[number][...] = gradient.reshape(-1)
        results = [self._pool.empty(array.shape, np.float32) for array in arrays]
        for result, array in zip(results[:count], arrays, strict=False):
            result[...] = array
        hyper = Hyperparameters(rate, self.beta_1, self.beta_2, self.epsilon)
        used = [number in gradients for number in range(count)]
        optimizer.step([result.reshape(-1) for result in results[:count]], [hyper] * count, used)
        optimizer.write(results[count:])
        return results

    def get_config(self) -> dict[str, Any]:
        """Return the settings, except the ranks and the scheme, which belong to this run."""
        names = ("beta_1", "beta_2", "epsilon", "freeze_step", "compress_within_node", "variance_floor")
        limits = self._core.settings.limits
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own, **({} if limits is None else asdict(limits))}


@_register
class OneBitAdam(OneBit):
    """Adam whose gradients travel uncompressed for `freeze_step` steps, and then with one bit each.

    Use it on its own, not in a DistributedOptimizer: it averages over `ranks`. In the first phase it is Adam on
    averaged gradients. Then the second moment is frozen, so the learning rate's warm-up and the unstable start of
    training should be over. A few tiny second moments could make training diverge, hence `variance_floor`.

    A weight without a gradient before the freeze is not trained afterwards. Keras clips first, on each rank separately,
    and decays weights as AdamW does. The accumulated compression error is not saved. Source: Tang et al.: 1-bit Adam
    (ICML 2021).

    On a group within one node nothing is compressed, unless `compress_within_node`: memory is faster.

    Args:
        learning_rate: The learning rate, or a schedule.
        beta_1: The decay of the first moment.
        beta_2: The decay of the second moment.
        epsilon: Added to the root of the second moment.
        freeze_step: The number of steps before the second moment is frozen: 15 to 25 % of all steps.
        ranks: The ranks to average over; None: all.
        compress_within_node: Whether gradients are compressed within a node, too.
        variance_floor: The least root of a frozen second moment, as a share of the typical one of its parameter; 0: the
            paper's algorithm.
        scheme: The compression scheme of the first moment; None: `AllToAll(Sign())`.
        name: The name of the optimizer.
        **kwargs: Arguments of `keras.optimizers.Optimizer`.

    Examples:
        model.compile(ct.OneBitAdam(1e-3, freeze_step=1000), "mse")
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        freeze_step: int,
        ranks: Ranks | None = None,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Any = None,
        name: str = "one_bit_adam",
        **kwargs: Any,
    ) -> None:
        kind = type(self).__name__
        settings = OneBitSettings(kind, freeze_step, compress_within_node, variance_floor, scheme)
        super().__init__(learning_rate, beta_1, beta_2, epsilon, settings, ranks, name=name, **kwargs)


@_register
class OneBitLAMB(OneBit):
    """LAMB whose gradients travel uncompressed for `freeze_step` steps, and then with one bit each.

    Like `OneBitAdam` in all but the update, which scales each layer's step by the size of its weights. These
    coefficients are averaged while gradients travel uncompressed, and adapted later: see `commlib.optim.one_bit_lamb`.
    Source: Li et al.: 1-bit LAMB (2021).

    Args:
        learning_rate: The learning rate, or a schedule.
        beta_1: The decay of the first moment.
        beta_2: The decay of the second moment.
        epsilon: Added to the root of the second moment.
        freeze_step: The number of steps before the second moment is frozen: 15 to 25 % of all steps.
        max_coeff: The largest coefficient of a layer's step.
        min_coeff: The smallest coefficient of a layer's step.
        coeff_beta: The decay of the averaged coefficient.
        factor_max: The largest factor of a coefficient after the freeze.
        factor_min: The smallest factor of a coefficient after the freeze.
        factor_threshold: The largest change of a factor in one step, as a share.
        ranks: The ranks to average over; None: all.
        compress_within_node: Whether gradients are compressed within a node, too.
        variance_floor: The least root of a frozen second moment, as a share of the typical one of its parameter; 0: the
            paper's algorithm.
        scheme: The compression scheme of the first moment; None: `AllToAll(Sign())`.
        name: The name of the optimizer.
        **kwargs: Arguments of `keras.optimizers.Optimizer`.

    Examples:
        model.compile(ct.OneBitLAMB(1e-3, freeze_step=1000), "mse")
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        freeze_step: int,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        ranks: Ranks | None = None,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Any = None,
        name: str = "one_bit_lamb",
        **kwargs: Any,
    ) -> None:
        limits = CoefficientLimits(max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold)
        kind = type(self).__name__
        settings = OneBitSettings(kind, freeze_step, compress_within_node, variance_floor, scheme, limits)
        super().__init__(learning_rate, beta_1, beta_2, epsilon, settings, ranks, name=name, **kwargs)
