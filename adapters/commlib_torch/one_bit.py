"""1-bit Adam and 1-bit LAMB: optimizers that average over the ranks by themselves, in one bit for each parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commlib.communicator import Communicator
from commlib.compress.scheme import Scheme
from commlib.dtypes import Array
from commlib.optim.one_bit_adam import Moments
from commlib.optim.one_bit_adam import OneBitAdam as AdamUpdate
from commlib.optim.one_bit_lamb import Layer, Limits
from commlib.optim.one_bit_lamb import OneBitLAMB as LAMBUpdate
from commlib_torch._one_bit import OneBit
from commlib_torch.horovod._start import ProcessSets


class OneBitAdam(OneBit):
    """Adam whose gradients travel in full for `freeze_step` steps, and then as one bit each. Collective.

    Use it by itself, not in a DistributedOptimizer: it averages over the ranks, of `process_set` or `comm` or all. In
    the first phase it is torch's Adam (AdamW with `decoupled_weight_decay`) on averaged gradients. Then the second
    moment stays what it is, so the learning rate's warm-up should be over, and training be past its first turbulence:
    after 15 to 25 % of all steps. No root of it is frozen below `variance_floor` times what is usual in its parameter,
    else few of them could make training diverge; 0 is the paper. What had no gradient until then is not trained any
    more. Gradients that are clipped before are clipped on each rank by itself. Source: Tang et al. 2021.

    On a group within one node nothing is compressed, unless `compress_within_node`: memory is faster. `scheme` is how
    the first moment travels, by default `Exchanged(Sign())`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        decoupled_weight_decay: bool = False,
        process_set: ProcessSets = None,
        comm: Communicator | None = None,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Scheme | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults["decoupled_weight_decay"] = decoupled_weight_decay
        options: dict[str, Any] = {
            "process_set": process_set,
            "comm": comm,
            "compress_within_node": compress_within_node,
            "variance_floor": variance_floor,
            "scheme": scheme,
        }
        super().__init__(params, defaults, freeze_step=freeze_step, **options)

    def _make_update(self, moments: Moments) -> AdamUpdate:
        return AdamUpdate(moments)


class OneBitLAMB(OneBit):
    """LAMB whose gradients travel in full for `freeze_step` steps, and then as one bit each. Collective.

    The same as `OneBitAdam` in all but the update, which scales each layer's step by how large its weights are. These
    coefficients are averaged while gradients travel in full, and adapted later: see `commlib.optim.one_bit_lamb`
    for `max_coeff`, `min_coeff`, `coeff_beta`, `factor_max`, `factor_min` and `factor_threshold`. Weights decay as part
    of the scaled step. Source: Li et al. 2021.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        process_set: ProcessSets = None,
        comm: Communicator | None = None,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Scheme | None = None,
    ) -> None:
        self._limits = Limits(max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options: dict[str, Any] = {
            "process_set": process_set,
            "comm": comm,
            "compress_within_node": compress_within_node,
            "variance_floor": variance_floor,
            "scheme": scheme,
        }
        super().__init__(params, defaults, freeze_step=freeze_step, **options)

    def _make_update(self, moments: Moments) -> LAMBUpdate:
        return LAMBUpdate(moments, self._limits)

    def _arrays(self, number: int) -> dict[str, Array]:
        layer: Layer = self._update.layers[number]
        return {**super()._arrays(number), "exp_avg_sq_fresh": layer.fresh}

    def _adopt(self) -> None:
        super()._adopt()
        layers = self._update.layers
        for layer, scalars in zip(layers, self._loaded.get("layers", [Layer(0).scalars()] * len(layers)), strict=True):
            layer.load(scalars)

    def _collect(self) -> dict[str, Any]:
        return {**super()._collect(), "layers": [layer.scalars() for layer in self._update.layers]}
