"""1-bit Adam and 1-bit LAMB: optimizers that average over the ranks by themselves, in one bit for each parameter.

What they do is in `commlib.optim`, on the host. Here are torch's parameters, gradients and state; those of a model on a
GPU are copied there and back in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.compress.scheme import Scheme
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.horovod.nested import map_leaves
from commlib.optim.one_bit_lamb import Limits
from commlib.optim.one_bit_moments import Hyper, check_hyper
from commlib.optim.one_bit_optimizer import OneBitOptimizer, OneBitSettings
from commlib.sharding.shards import check_apart, world_ranks
from commlib_torch._bridge import check_dense, dtype_name, to_array, to_tensor
from commlib_torch._shards import shard_of
from commlib_torch.horovod._start import ProcessSets

_DTYPES = ("float32", "bfloat16", "float16")
_OWN = "one_bit"  # the key in `state_dict()["state"]` of what belongs to no parameter
_MEMORY = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")  # what torch's optimizers call what the core remembers


class OneBit(torch.optim.Optimizer):
    """An optimizer that averages over the ranks by itself. Subclasses say what the update is."""

    averages_by_itself = True
    """In a DistributedOptimizer, which refuses it, gradients would travel in full before."""

    _step_supports_amp_scaling = True  # GradScaler leaves it to `step` to skip: all ranks must, or none

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        settings: OneBitSettings,
        process_set: ProcessSets,
        comm: Communicator | None,
    ) -> None:
        if comm is not None and process_set is not None:
            raise UsageError("process_set and comm both say over which ranks to average: give one of them")
        self._core = OneBitOptimizer(settings)
        self._gradients: list[Tensor] = []  # where the core reads them
        self._values: list[Array] = []  # the parameters
        self._copies: list[tuple[Tensor, Tensor]] = []  # of those that are not contiguous float32 of the host
        super().__init__(params, defaults)
        core.running()
        self.freeze_step = settings.freeze_step
        self.comm = comm or core.process_set_of(process_set).communicator(settings.kind)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; before the first step. Raises UsageError for dtypes, devices and settings."""
        settings = self._core.settings
        if self._core.is_started:
            raise UsageError(f"{settings.kind}: parameters can be added before the first step only")
        super().add_param_group(param_group)
        check_hyper(settings.kind, _hyper(self.param_groups[-1]))
        for parameter in self.param_groups[-1]["params"]:
            label = f"shape {tuple(parameter.shape)}"
            if parameter.device.type not in ("cpu", "cuda", "meta"):
                raise UsageError(
                    f"{settings.kind} updates parameters on the host, where the moments are, and knows those of the "
                    f"CPU and of CUDA, but one of {label} is on {parameter.device}: call .cpu() on the model first"
                )
            check_dense(parameter)
            settings.check_dtype(dtype_name(parameter.dtype), label, _DTYPES)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with gradients averaged over all ranks; `p.grad` stays this rank's own. Collective.

        Returns what `closure` does, this rank's own loss. Under a GradScaler no rank steps if a gradient of one of
        them is not finite; each rank's scale follows its own gradients.
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
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise UsageError(f"gradients must be dense, got {parameter.grad.layout}: use sparse=False")
            gradient.copy_(parameter.grad)
            if scale is not None:
                gradient.div_(scale.cpu())
            if found is not None and found > 0:
                gradient.fill_(torch.nan)
        for copy, parameter in self._copies:
            copy.copy_(parameter)
        hypers = [_hyper(group) for group in self.param_groups for _ in group["params"]]
        used = [parameter.grad is not None for parameter in parameters]
        if self._core.step(self._values, hypers, used, skip=found is not None):
            for copy, parameter in self._copies:
                parameter.copy_(copy)
            torch.autograd.graph.increment_version(parameters)  # the core wrote where torch does not see it

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with this rank's residuals: save it on every rank.

        What is kept for each parameter is float32, whatever its dtype.
        """
        own = map_leaves(self._core.state(), lambda leaf: to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)
        if own:
            self.state[_OWN] = own  # type: ignore[index]
        try:
            return super().state_dict()
        finally:
            self.state.pop(_OWN, None)  # type: ignore[call-overload]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Residuals are taken over by the rank that had them only.

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
        raise UsageError(f"a {type(self).__name__} cannot be copied or pickled: make another and use its state_dict()")

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _start(self, parameters: list[Tensor]) -> None:
        named = ((f"parameter {place}", shard_of(one)) for place, one in enumerate(parameters))
        check_apart(self._core.settings.kind, named, world_ranks(self.comm), local=True)
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
        """Let the core go on from `self.state`, and `self.state` show what the core has."""
        for what, arrays in zip(_MEMORY, self._core.memory, strict=False):
            for parameter, array in zip(self._parameters(), arrays, strict=True):
                state = self.state[parameter]
                shown = to_tensor(array).view(parameter.shape)
                shown.copy_(state.get(what, torch.tensor(0.0)))
                state[what] = shown


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    decoupled = group.get("decoupled_weight_decay", False)
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], decoupled)


class OneBitAdam(OneBit):
    """Adam whose gradients travel in full for `freeze_step` steps, and then as one bit each. Collective.

    Use it by itself, not in a DistributedOptimizer: it averages over the ranks, of `process_set` or `comm` or all. In
    the first phase it is torch's Adam (AdamW with `decoupled_weight_decay`) on averaged gradients. Then the second
    moment stays what it is, so the learning rate's warm-up should be over, and training be past its first turbulence:
    after 15 to 25 % of all steps. No root of it is frozen below `variance_floor` times what is usual in its parameter,
    else few of them could make training diverge; 0 is the paper. What had no gradient until then is not trained any
    more. Gradients that are clipped before are clipped on each rank by itself. Source: Tang et al. 2021.

    On a group within one node nothing is compressed, unless `compress_within_node`: memory is faster. `scheme` is how
    the first moment travels, by default `AllToAll(Sign())`.
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
        kind = type(self).__name__
        settings = OneBitSettings(kind, freeze_step, compress_within_node, variance_floor, scheme)
        super().__init__(params, defaults, settings, process_set, comm)


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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        limits = Limits(max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold)
        kind = type(self).__name__
        settings = OneBitSettings(kind, freeze_step, compress_within_node, variance_floor, scheme, limits)
        super().__init__(params, defaults, settings, process_set, comm)
