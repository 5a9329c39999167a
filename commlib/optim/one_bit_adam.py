"""1-bit Adam: send one bit for each parameter, once it is known how large gradients are.

    steps 1 to freeze_step    gradients are averaged in float32; ordinary Adam
    afterwards                the second moment stays what it is; every rank lets the first moment follow its own
                              gradient, and the moments are averaged as signs, with error feedback on both sides

Signs of gradients could not drive Adam: its second moment is not linear in them. With that moment fixed, what is left
is momentum, which is. Source: Tang et al.: 1-bit Adam (ICML 2021).

Two things are not as in the paper, which leaves moments as they are:

- they are corrected for having begun at zero. So the first phase is Adam exactly, and steps do not jump at the change:
  the second moment keeps the correction of the step that froze it;
- a second moment that is small by chance when it is frozen would divide all that comes later, and training would
  diverge, even if nothing were compressed. So none is frozen below a share of what is usual in its parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlib.dtypes import Array
from commlib.kernels.host import moments as kernels
from commlib.optim.one_bit_moments import Hyper, Moments


class OneBitAdam:
    """The update of 1-bit Adam. Every rank gets the same parameters, to the last bit."""

    layers: tuple[()] = ()
    """Adam remembers nothing of a parameter but its moments."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments

    def step(self, values: Sequence[Array], hypers: Sequence[Hyper], *, skip: bool = False) -> bool:
        """Update `values`, the parameters (float32, 1-D, in the order of `moments.parameters`). Collective.

        Parameters without a gradient on any rank stay as they are. With `skip`, nothing changes on any rank if a
        gradient is not finite on some; returns False then.
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
