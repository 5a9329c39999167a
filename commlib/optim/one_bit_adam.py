"""1-bit Adam: send one bit per parameter, after the magnitudes of gradients are known.

    steps 1 to freeze_step    gradients are averaged in float32; ordinary Adam
    afterwards                the second moment is frozen; every rank updates the first moment with its own
                              gradient, and the moments are averaged as signs, with error feedback on both sides

Signs of gradients cannot drive Adam, because its second moment is not linear in them. With that moment frozen, only the
momentum remains, which is linear. Source: Tang et al.: 1-bit Adam (ICML 2021).

Two details differ from the paper, which does not modify the moments:

- moments are corrected for their initial zeros. The first phase is exactly Adam, and steps do not jump at the change:
  the second moment keeps the correction of the step that froze it;
- a second moment that is small by chance at the freeze would divide all later steps, and training would diverge even
  without compression. A frozen moment is therefore at least a share of its parameter's mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlib.dtypes import Array
from commlib.kernels.host import moments as kernels
from commlib.optim.one_bit_moments import Hyperparameters, Moments


class OneBitAdam:
    """The update of 1-bit Adam. All ranks get bit-identical parameters."""

    layers: tuple[()] = ()
    """Adam's state per parameter consists of the moments only."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments

    def step(self, values: Sequence[Array], hypers: Sequence[Hyperparameters], *, skip: bool = False) -> bool:
        """Update `values`, the parameters (float32, 1-D, in the order of `moments.parameters`). Collective.

        Parameters without a gradient on any rank do not change. With `skip`, nothing changes on any rank if a gradient
        is not finite on some rank; then this returns False.
        """
        moments = self.moments
        moments.check(values)
        frozen = moments.frozen
        if frozen:
            for parameter, value, hyper in zip(moments.parameters, values, hypers, strict=True):
                decay = 0.0 if hyper.decoupled else hyper.weight_decay
                kernels.blend(parameter.gradient, parameter.first, value, decay, hyper.beta1, 1.0)
        if not moments.average(check=skip) and skip:
            return False
        step = moments.steps + 1
        frozen_at = min(step, moments.freeze_step)
        for parameter, value, hyper, used in zip(moments.parameters, values, hypers, moments.used, strict=True):
            if not used:
                continue
            first, second, gradient = parameter.first, parameter.second, parameter.gradient
            decay = 0.0 if hyper.decoupled else hyper.weight_decay
            if frozen:
                first[...] = gradient
            else:
                kernels.accumulate(gradient, first, second, value, decay, hyper.beta1, hyper.beta2)
            corrections = 1 - hyper.beta1**step, 1 - hyper.beta2**frozen_at
            shrink = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
            kernels.advance(value, first, second, shrink, hyper.lr, *corrections, hyper.eps)
        moments.count_step()
        return True
