"""What 1-bit Adam and 1-bit LAMB have in common: torch's parameters, gradients and state, as arrays for the core."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.compress.scheme import Scheme
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.optim.one_bit_adam import Hyper, Moments
from commlib_torch._bridge import check, dtype_name, to_array, to_tensor
from commlib_torch._options import communicator_of
from commlib_torch.horovod._start import ProcessSets

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OWN = "one_bit"  # the key in `state_dict()["state"]` of what belongs to no parameter


class OneBit(torch.optim.Optimizer):
    """An optimizer that averages over the ranks by itself. Subclasses say what the update is."""

    averages_by_itself = True
    """In a DistributedOptimizer, which refuses it, gradients would travel in full before."""

    _step_supports_amp_scaling = True  # GradScaler leaves it to `step` to skip: all ranks must, or none

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        freeze_step: int,
        process_set: ProcessSets,
        comm: Communicator | None,
        compress_within_node: bool,
        variance_floor: float,
        scheme: Scheme | None,
    ) -> None:
        self._update: Any = None
        self._slots: list[Tensor] = []  # where gradients go
        self._values: list[Array] = []  # the parameters
        self._copies: list[tuple[Tensor, Tensor]] = []  # of those that are not contiguous float32
        self._loaded: dict[str, Any] = {}
        self._warned = False
        if freeze_step < 1:
            raise UsageError(f"freeze_step must be at least 1, got {freeze_step}: 15 to 25 % of all steps are usual")
        if not 0 <= variance_floor < 1:
            raise UsageError(f"variance_floor must be at least 0 and less than 1, got {variance_floor}")
        if comm is not None and process_set is not None:
            raise UsageError("process_set and comm both say over which ranks to average: give one of them")
        lr, eps, (beta1, beta2) = defaults["lr"], defaults["eps"], defaults["betas"]
        if not (lr >= 0 and eps > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1 and defaults["weight_decay"] >= 0):
            raise UsageError(
                f"expected lr >= 0, eps > 0, weight_decay >= 0 and betas from 0 to below 1, got lr={lr}, eps={eps}, "
                f"weight_decay={defaults['weight_decay']}, betas={(beta1, beta2)}"
            )
        super().__init__(params, defaults)
        core.running()
        self.freeze_step = freeze_step
        self.comm = comm or communicator_of(process_set, type(self).__name__)
        self._options: dict[str, Any] = {
            "scheme": scheme,
            "within_node": compress_within_node,
            "floor": variance_floor,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; before the first step. Raises UsageError for dtypes and devices."""
        if self._update is not None:
            raise UsageError(f"{type(self).__name__}: parameters can be added before the first step only")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.device.type not in ("cpu", "meta"):
                raise UsageError(
                    f"{type(self).__name__} updates parameters on the host, where the moments are, but one of shape "
                    f"{tuple(parameter.shape)} is on {parameter.device}: call .cpu() on the model first"
                )
            check(parameter)
            if parameter.dtype not in DTYPES:
                known = ", ".join(map(dtype_name, DTYPES))
                raise UsageError(f"parameters must be {known}, got {dtype_name(parameter.dtype)}: moments are float32")

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
        if self._update is None:
            self._start()
        moments: Moments = self._update.moments
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        parameters = list(self._parameters())
        for number, (parameter, slot) in enumerate(zip(parameters, self._slots, strict=True)):
            moments.used[number] = parameter.grad is not None
            if parameter.grad is None:
                slot.zero_()
                continue
            if parameter.grad.layout != torch.strided:
                raise UsageError(f"gradients must be dense, got {parameter.grad.layout}: use sparse=False")
            slot.view(parameter.shape).copy_(parameter.grad)
            if scale is not None:
                slot.div_(scale)
            if found is not None and found > 0:
                slot.fill_(torch.nan)
        for copy, parameter in self._copies:
            copy.view(parameter.shape).copy_(parameter)
        hypers = [self._hyper(group) for group in self.param_groups for _ in group["params"]]
        if self._update.step(self._values, hypers, skip=found is not None):
            for copy, parameter in self._copies:
                parameter.copy_(copy.view(parameter.shape))
            torch.autograd.graph.increment_version(parameters)  # the core wrote where torch does not see it
        if moments.came_late and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: weights that had no gradient in the first {self.freeze_step} steps have one "
                "now. They are not trained any more, because their second moment is zero: choose a larger freeze_step",
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with this rank's residuals: save it on every rank.

        What is kept for each parameter is float32, whatever its dtype.
        """
        if self._update is not None:
            self._loaded = self._collect()
        if self._loaded:
            self.state[_OWN] = self._loaded  # type: ignore[index]
        try:
            return super().state_dict()
        finally:
            self.state.pop(_OWN, None)  # type: ignore[call-overload]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Residuals are taken over by the rank that had them only.

        Raises UsageError for the state of another optimizer, or of another freeze_step.
        """
        own = state_dict["state"].get(_OWN, {})
        if state_dict["state"] and not own:
            raise UsageError(f"this is no state of a {type(self).__name__}")
        if own and own["freeze_step"] != self.freeze_step:
            raise UsageError(
                f"the state has freeze_step={own['freeze_step']}, this optimizer {self.freeze_step}: they must be equal"
            )
        super().load_state_dict(state_dict)
        self.state.pop(_OWN, None)  # type: ignore[call-overload]
        self._loaded = own
        # torch has rounded moments to the dtypes of the parameters.
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, self._parameters(), strict=True):
            for what, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][what] = value.clone() if isinstance(value, Tensor) else value
        if self._update is not None:
            self._adopt()

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(f"a {type(self).__name__} cannot be copied or pickled: make another and use its state_dict()")

    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", False)
        return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], decoupled)

    def _start(self) -> None:
        parameters = list(self._parameters())
        names = [(str(number), parameter.numel()) for number, parameter in enumerate(parameters)]
        moments = Moments(self.comm, names, self.freeze_step, what=type(self).__name__, **self._options)
        self._update = self._make_update(moments)
        self._slots = [to_tensor(mine.gradient) for mine in moments.parameters]
        for parameter in parameters:
            values = parameter.detach()
            if parameter.dtype == torch.float32 and parameter.is_contiguous():
                values = values.view(-1)
            else:
                values = torch.empty(parameter.numel(), dtype=torch.float32)
                self._copies.append((values, parameter))
            self._values.append(to_array(values))
        self._adopt()

    def _make_update(self, moments: Moments) -> Any:
        raise NotImplementedError

    def _arrays(self, number: int) -> dict[str, Array]:
        """Return what is remembered of a parameter, by the names that torch's optimizers give it."""
        mine = self._update.moments.parameters[number]
        return {"exp_avg": mine.first, "exp_avg_sq": mine.second}

    def _adopt(self) -> None:
        """Let the core go on from `self.state`, and `self.state` show what the core has."""
        for number, parameter in enumerate(self._parameters()):
            state = self.state[parameter]
            for what, array in self._arrays(number).items():
                shown = to_tensor(array).view(parameter.shape)
                shown.copy_(state.get(what, torch.tensor(0.0)))
                state[what] = shown
        own = self._loaded
        residuals = own["residuals"] if own.get("rank") == self.comm.rank else {}
        arrays = {name: {what: np.asarray(x) for what, x in of.items()} for name, of in residuals.items()}
        self._update.moments.load(own.get("steps", 0), arrays)

    def _collect(self) -> dict[str, Any]:
        moments: Moments = self._update.moments
        residuals = {name: {what: to_tensor(x) for what, x in of.items()} for name, of in moments.state().items()}
        place = {"rank": self.comm.rank, "freeze_step": self.freeze_step, "steps": moments.steps}
        return {**place, "residuals": residuals}
