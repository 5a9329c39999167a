"""1-bit Adam and 1-bit LAMB: optimizers that average over the ranks by themselves, in one bit for each weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import keras

from commlib import horovod as core
from commlib.optim.one_bit_adam import Moments
from commlib.optim.one_bit_adam import OneBitAdam as AdamUpdate
from commlib.optim.one_bit_lamb import Limits
from commlib.optim.one_bit_lamb import OneBitLAMB as LAMBUpdate
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._one_bit import OneBit

_SCALARS = ("average", "weight", "factor", "scale")


def _saved(kind: type) -> type:
    register: Callable[[type], type] = keras.saving.register_keras_serializable("commlib")
    return register(kind)


@_saved
class OneBitAdam(OneBit):
    """Adam whose gradients travel in full for `freeze_step` steps, and then as one bit each.

    Use it by itself, not in a DistributedOptimizer: it averages over the ranks of `process_set`. In the first phase it
    is Adam on averaged gradients. Then the second moment stays what it is, so the learning rate's warm-up should be
    over, and training be past its first turbulence: after 15 to 25 % of all steps. No root of it is frozen below
    `variance_floor` times what is usual in its variable, else few of them could make training diverge; 0 is the paper.
    What had no gradient until then is not trained any more. Keras clips before, on each rank by itself, and decays
    weights as AdamW does. `kwargs` are those of `keras.optimizers.Optimizer`. What the signs lost so far is not saved.
    Source: Tang et al.: 1-bit Adam (ICML 2021).

    On a group within one node nothing is compressed, unless `compress_within_node`: memory is faster. `scheme` is how
    the first moment travels, by default `Exchanged(Sign())`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        freeze_step: int,
        process_set: Any = core.global_process_set,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Any = None,
        name: str = "one_bit_adam",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            freeze_step=freeze_step,
            process_set=process_set,
            compress_within_node=compress_within_node,
            variance_floor=variance_floor,
            scheme=scheme,
            name=name,
            **kwargs,
        )

    def _make_update(self, moments: Moments) -> AdamUpdate:
        return AdamUpdate(moments)


@_saved
class OneBitLAMB(OneBit):
    """LAMB whose gradients travel in full for `freeze_step` steps, and then as one bit each.

    The same as `OneBitAdam` in all but the update, which scales each layer's step by how large its weights are. These
    coefficients are averaged while gradients travel in full, and adapted later: see `commlib.optim.one_bit_lamb`
    for `max_coeff`, `min_coeff`, `coeff_beta`, `factor_max`, `factor_min` and `factor_threshold`. Source: Li et al.:
    1-bit LAMB (2021).
    """

    _kinds = ("momentum", "velocity", "fresh_velocity")

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
        process_set: Any = core.global_process_set,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Any = None,
        name: str = "one_bit_lamb",
        **kwargs: Any,
    ) -> None:
        limits = Limits(max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold)
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            freeze_step=freeze_step,
            process_set=process_set,
            compress_within_node=compress_within_node,
            variance_floor=variance_floor,
            scheme=scheme,
            name=name,
            **kwargs,
        )
        object.__setattr__(self, "_limits", limits)

    def build(self, variables: Any) -> None:
        """Make the variables for the moments, and for the coefficients of the layers."""
        if self.built:
            return
        super().build(variables)
        start = [[0.0, 0.0, 1.0, 1.0]] * len(variables)
        self._layers = self.add_variable((len(variables), len(_SCALARS)), "zeros", "float32", name="layers")
        self._layers.assign(start)

    def _make_update(self, moments: Moments) -> LAMBUpdate:
        return LAMBUpdate(moments, self._limits)

    def _states(self) -> list[Any]:
        return [*self._arrays, self._layers]

    def _flat(self) -> list[Array]:
        return [*super()._flat(), *(layer.fresh for layer in self._update.layers)]

    def _load(self, states: Sequence[Array]) -> None:
        super()._load(states)
        for layer, values in zip(self._update.layers, states[-1], strict=True):
            layer.load(dict(zip(_SCALARS, values.tolist(), strict=True)))

    def _save(self, states: Sequence[Array]) -> None:
        super()._save(states)
        for layer, values in zip(self._update.layers, states[-1], strict=True):
            values[:] = [layer.scalars()[name] for name in _SCALARS]

    def get_config(self) -> dict[str, Any]:
        """Return the settings, but for the ranks and the scheme, which belong to this run."""
        return {**super().get_config(), **asdict(self._limits)}
