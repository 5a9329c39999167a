"""1-bit Adam and 1-bit LAMB: optimizers that average over the ranks by themselves, with one bit per parameter.

The algorithms are in `commlib.optim` and run on the host. This module handles torch's parameters, gradients and state;
those on a GPU are copied to the host and back in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commlib import horovod as core
from commlib.compress.scheme import Scheme
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.horovod.pytree import map_leaves
from commlib.optim.one_bit_lamb import CoefficientLimits
from commlib.optim.one_bit_moments import Hyperparameters, check_hyper
from commlib.optim.one_bit_optimizer import OneBitOptimizer, OneBitSettings
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.shards import check_same_shard, world_ranks
from commlib_torch._bridge import check_dense, dtype_name, to_array, to_tensor
from commlib_torch._shards import shard_of

_DTYPES = ("float32", "bfloat16", "float16")
_OWN = "one_bit"  # the key in `state_dict()["state"]` of values that belong to no parameter
_MEMORY = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")  # torch's names of the core's moments


class OneBit(torch.optim.Optimizer):
    """Base of optimizers that average over the ranks by themselves. Subclasses define the update."""

    averages_by_itself = True
    """A DistributedOptimizer refuses it, because it would first reduce gradients at full size."""

    _step_supports_amp_scaling = True  # GradScaler lets `step` decide to skip: all ranks must, or none

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        settings: OneBitSettings,
        ranks: Ranks | None,
    ) -> None:
        self._core = OneBitOptimizer(settings)
        self._gradients: list[Tensor] = []  # the core reads gradients from these
        self._values: list[Array] = []  # the parameters
        self._copies: list[tuple[Tensor, Tensor]] = []  # for parameters that are not contiguous float32 on the host
        super().__init__(params, defaults)
        self.freeze_step = settings.freeze_step
        self.comm = core.require_world() if ranks is None else communicator_of(ranks, settings.kind)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; before the first step. Raises UsageError for dtypes, devices and settings."""
        settings = self._core.settings
        if self._core.is_started:
            raise UsageError(f"{settings.kind}: parameters can be added only before the first step")
        super().add_param_group(param_group)
        check_hyper(settings.kind, _hyper(self.param_groups[-1]))
        for parameter in self.param_groups[-1]["params"]:
            label = f"shape {tuple(parameter.shape)}"
            if parameter.device.type not in ("cpu", "cuda", "meta"):
                raise UsageError(
                    f"{settings.kind} updates parameters on the host and supports parameters on the CPU and on CUDA, "
                    f"but one of {label} is on {parameter.device}: call .cpu() on the model first"
                )
            check_dense(parameter)
            settings.check_dtype(dtype_name(parameter.dtype), label, _DTYPES)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with gradients averaged over all ranks; `p.grad` keeps this rank's gradient. Collective.

        Returns the result of `closure`, this rank's loss. Under a GradScaler no rank steps if a gradient of one of them
        is not finite; each rank's scale follows its own gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        parameters = self._parameters()
        if not self._core.is_started:
            self._start(parameters)
        scale, has_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise UsageError(f"gradients must be dense, got {parameter.grad.layout}: use sparse=False")
            gradient.copy_(parameter.grad)
            if scale is not None:
                gradient.div_(scale.cpu())
            if has_inf is not None and has_inf > 0:
                gradient.fill_(torch.nan)
        for copy, parameter in self._copies:
            copy.copy_(parameter)
        hypers = [_hyper(group) for group in self.param_groups for _ in group["params"]]
        used = [parameter.grad is not None for parameter in parameters]
        if self._core.step(self._values, hypers, used, skip=has_inf is not None):
            for copy, parameter in self._copies:
                parameter.copy_(copy)
            torch.autograd.graph.increment_version(parameters)  # the core wrote to them without torch's knowledge

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with this rank's residuals: save it on every rank.

        State per parameter is float32, regardless of the parameter's dtype.
        """
        own = map_leaves(self._core.state(), lambda leaf: to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)
        if own:
            self.state[_OWN] = own  # type: ignore[index]
        try:
            return super().state_dict()
        finally:
            self.state.pop(_OWN, None)  # type: ignore[call-overload]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Only the rank that saved residuals takes them over.

        Raises UsageError for the state of another optimizer, or of another freeze_step.
        """
        own = state_dict["state"].get(_OWN, {})
        if state_dict["state"]:
            self._core.check_state(own)
        super().load_state_dict(state_dict)
        self.state.pop(_OWN, None)  # type: ignore[call-overload]
        # torch has rounded moments to the dtypes of the parameters.
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, self._parameters(), strict=True):
            for what, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][what] = value.clone() if isinstance(value, Tensor) else value
        self._core.load(map_leaves(own, lambda leaf: to_array(leaf) if isinstance(leaf, Tensor) else leaf))
        if self._core.is_started:
            self._show()

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            f"a {type(self).__name__} cannot be copied or pickled: make a new one and load its state_dict()"
        )

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _start(self, parameters: list[Tensor]) -> None:
        named = ((f"parameter {place}", shard_of(one)) for place, one in enumerate(parameters))
        check_same_shard(self._core.settings.kind, named, world_ranks(self.comm), local=True)
        self._core.start(self.comm, [parameter.numel() for parameter in parameters])
        for parameter, gradient in zip(parameters, self._core.gradients, strict=True):
            self._gradients.append(to_tensor(gradient).view(parameter.shape))
            values = parameter.detach()
            if not parameter.is_cpu or parameter.dtype != torch.float32 or not parameter.is_contiguous():
                values = torch.empty(parameter.shape, dtype=torch.float32)
                self._copies.append((values, parameter))
            self._values.append(to_array(values.view(-1)))
        self._show()

    def _show(self) -> None:
        """Initialize the core's moments from `self.state`, and make `self.state` views of them."""
        for what, arrays in zip(_MEMORY, self._core.memory, strict=False):
            for parameter, array in zip(self._parameters(), arrays, strict=True):
                state = self.state[parameter]
                shown = to_tensor(array).view(parameter.shape)
                shown.copy_(state.get(what, torch.tensor(0.0)))
                state[what] = shown


def _hyper(group: dict[str, Any]) -> Hyperparameters:
    beta1, beta2 = group["betas"]
    decoupled = group.get("decoupled_weight_decay", False)
    return Hyperparameters(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], decoupled)


class OneBitAdam(OneBit):
    """Adam that sends full gradients for `freeze_step` steps, then one bit per element. Collective.

    Use it by itself, not in a DistributedOptimizer: it averages over `ranks`. In the first phase it is torch's Adam
    (AdamW with `decoupled_weight_decay`) on averaged gradients. Then the second moment is frozen, so the learning
    rate's warm-up should be over and training should be stable. A few small second moments could make training diverge,
    hence `variance_floor`. Elements without a gradient before the freeze are not trained afterwards. Clipping gradients
    before the step clips on each rank separately. Source: Tang et al. 2021.

    On a group within one node nothing is compressed, unless `compress_within_node` is set: memory is faster.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate.
        betas: The decays of the moments.
        eps: Added to the root of the second moment.
        weight_decay: The weight decay.
        freeze_step: The number of steps before the second moment is frozen: 15 to 25 % of all steps.
        decoupled_weight_decay: Whether weights decay as in AdamW.
        ranks: The ranks to average over; None: all.
        compress_within_node: Whether gradients are compressed within a node, too.
        variance_floor: The least root of a frozen second moment, as a share of the typical one of its parameter; 0: the
            paper's algorithm.
        scheme: The compression scheme of the first moment; None: `AllToAll(Sign())`.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = ct.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=100)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
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
        ranks: Ranks | None = None,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Scheme | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults["decoupled_weight_decay"] = decoupled_weight_decay
        kind = type(self).__name__
        settings = OneBitSettings(kind, freeze_step, compress_within_node, variance_floor, scheme)
        super().__init__(params, defaults, settings, ranks)


class OneBitLAMB(OneBit):
    """LAMB that sends full gradients for `freeze_step` steps, then one bit per element. Collective.

    Equal to `OneBitAdam` except for the update, which scales each layer's step by the size of its weights. These
    coefficients are averaged in the first phase and adapted afterwards: see `commlib.optim.one_bit_lamb`. Weight decay
    is part of the scaled step. Source: Li et al. 2021.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate.
        betas: The decays of the moments.
        eps: Added to the root of the second moment.
        weight_decay: The weight decay.
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

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = ct.OneBitLAMB(model.parameters(), lr=1e-3, freeze_step=100)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
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
        ranks: Ranks | None = None,
        compress_within_node: bool = False,
        variance_floor: float = 0.03,
        scheme: Scheme | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        limits = CoefficientLimits(max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold)
        kind = type(self).__name__
        settings = OneBitSettings(kind, freeze_step, compress_within_node, variance_floor, scheme, limits)
        super().__init__(params, defaults, settings, ranks)
