"""1-bit LAMB: send one bit per parameter, for training with large batches.

LAMB scales Adam's step for each layer by |parameter| / |step|. This coefficient would change quickly with a frozen
second moment and moments sent as signs. So the coefficients are averaged while gradients travel in full precision.
Afterwards they change only by a factor: the ratio of the steps with an unfrozen second moment to the actual steps. The
unfrozen moment follows a gradient that every rank reconstructs from the averaged first moment. Sources: You et al.:
LAMB (ICLR 2020); Li et al.: 1-bit LAMB (2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host import moments as kernels
from commlib.kernels.host.orthonormal import dot
from commlib.optim.one_bit_moments import Hyperparameters, Moments, ParameterMoments


@dataclass(frozen=True, slots=True)
class CoefficientLimits:
    """Limits of the layers' coefficients. Raises UsageError for empty ranges.

    `max_coeff`, `min_coeff`: limits before the freeze; `coeff_beta`: decay of their moving average. `factor_max`,
    `factor_min`: limits of the factor after the freeze. It changes by a share of at most `factor_threshold` per step.
    """

    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.min_coeff <= self.max_coeff and 0 < self.factor_min <= self.factor_max):
            raise UsageError(
                f"OneBitLAMB: expected 0 < min <= max, got coefficients from {self.min_coeff} to {self.max_coeff} and "
                f"factors from {self.factor_min} to {self.factor_max}"
            )
        if not 0 <= self.coeff_beta < 1 or not 0 < self.factor_threshold < 1:
            raise UsageError(
                f"OneBitLAMB: coeff_beta and factor_threshold must be between 0 and 1, got {self.coeff_beta} and "
                f"{self.factor_threshold}"
            )


class LayerState:
    """LAMB's state of one parameter, in addition to its moments."""

    def __init__(self, count: int) -> None:
        self.fresh: Array = np.zeros(count, np.float32)
        """The second moment as it would be without the freeze."""
        self.average = 0.0
        """Weighted sum of coefficients, with weights that add up to `weight`."""
        self.weight = 0.0
        self.factor = 1.0
        self.scale = 1.0
        """Factor of the first moment during communication, which brings all layers to about the same magnitude."""

    @property
    def coefficient(self) -> float:
        """The averaged coefficient; 1 if there was none, because the parameter or its steps were zero."""
        return self.average / self.weight if self.weight else 1.0

    def scalars(self) -> dict[str, float]:
        """Return the state without the array."""
        return {name: getattr(self, name) for name in ("average", "weight", "factor", "scale")}

    def load(self, scalars: Mapping[str, float]) -> None:
        """Load what `scalars` returned."""
        for name, value in scalars.items():
            setattr(self, name, float(value))


class OneBitLAMB:
    """The update of 1-bit LAMB. All ranks get bit-identical parameters."""

    def __init__(self, moments: Moments, limits: CoefficientLimits) -> None:
        self.moments, self.limits = moments, limits
        self.layers = [LayerState(len(parameter.first)) for parameter in moments.parameters]

    def step(self, values: Sequence[Array], hypers: Sequence[Hyperparameters], *, skip: bool = False) -> bool:
        """Update `values` as `OneBitAdam.step` does. Weights decay as in LAMB, regardless of `decoupled`."""
        moments = self.moments
        moments.check(values)
        frozen = moments.frozen
        everything = list(zip(moments.parameters, values, hypers, self.layers, strict=True))
        if frozen:
            for parameter, value, hyper, layer in everything:
                kernels.blend(parameter.gradient, parameter.first, value, 0.0, hyper.beta1, layer.scale)
        if not moments.average(check=skip) and skip:
            return False
        for (parameter, value, hyper, layer), used in zip(everything, moments.used, strict=True):
            if used and frozen:
                self._step_frozen(parameter, value, hyper, layer)
            elif used:
                self._step_unfrozen(parameter, value, hyper, layer)
        moments.count_step()
        if moments.steps == moments.freeze_step:
            self._freeze()
        return True

    def _step_unfrozen(
        self, parameter: ParameterMoments, value: Array, hyper: Hyperparameters, layer: LayerState
    ) -> None:
        limits, out, step = self.limits, parameter.gradient, self.moments.steps + 1
        kernels.accumulate(out, parameter.first, parameter.second, value, 0.0, hyper.beta1, hyper.beta2)
        corrections = 1 - hyper.beta1**step, 1 - hyper.beta2**step
        kernels.directions(out, parameter.first, parameter.second, *corrections, hyper.eps)
        kernels.add(out, hyper.weight_decay, value)
        value_norm, out_norm = sqrt(dot(value, value)), sqrt(dot(out, out))
        coefficient = 1.0
        if value_norm > 0 and out_norm > 0:
            coefficient = min(max(value_norm / out_norm, limits.min_coeff), limits.max_coeff)
            layer.average = limits.coeff_beta * layer.average + (1 - limits.coeff_beta) * coefficient
            layer.weight = limits.coeff_beta * layer.weight + (1 - limits.coeff_beta)
        kernels.add(value, -hyper.lr * coefficient, out)

    def _step_frozen(
        self, parameter: ParameterMoments, value: Array, hyper: Hyperparameters, layer: LayerState
    ) -> None:
        out, step, frozen_at = parameter.gradient, self.moments.steps + 1, self.moments.freeze_step
        np.divide(out, np.float32(layer.scale), out=out)
        kernels.follow(layer.fresh, out, parameter.first, hyper.beta1, hyper.beta2)
        parameter.first[...] = out
        correct_first = 1 - hyper.beta1**step
        correct_second, correct_fresh = 1 - hyper.beta2**frozen_at, 1 - hyper.beta2**step
        kernels.directions(out, parameter.first, parameter.second, correct_first, correct_second, hyper.eps)
        factor = kernels.largest_ratio(parameter.second, layer.fresh, correct_second, correct_fresh, hyper.eps)
        if hyper.weight_decay:
            alone = sqrt(dot(out, out))
            kernels.add(out, hyper.weight_decay, value)
            whole = sqrt(dot(out, out))
            share = min(1.0, alone / whole) if whole > 0 else 1.0
            factor = factor * share + (1 - share)
        layer.factor = self._limit_factor(factor, layer.factor)
        kernels.add(value, -hyper.lr * layer.coefficient * layer.factor, out)

    def _limit_factor(self, factor: float, last: float) -> float:
        limits = self.limits
        factor = min(max(factor, limits.factor_min), limits.factor_max)
        return min(max(factor, last * (1 - limits.factor_threshold)), last * (1 + limits.factor_threshold))

    def _freeze(self) -> None:
        """Set up the frozen phase after the last step in full precision."""
        sizes = []
        for parameter, layer in zip(self.moments.parameters, self.layers, strict=True):
            layer.fresh[...] = parameter.second
            count = max(1, np.count_nonzero(parameter.second))
            sizes.append(sqrt(dot(parameter.first, parameter.first) / count))
        nonempty = [size for size in sizes if size > 0]
        for layer, size in zip(self.layers, sizes, strict=True):
            layer.scale = sum(nonempty) / len(nonempty) / size if size > 0 else 1.0
