"""First batch: compare a traced model with the whole one on the first microbatch, then drop the whole one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.group.single_rank import SingleRank
from commlib.pipeline.cut_check import ModelRun, compare_with_original, cut_failure, mode
from commlib_torch._copies import copy_of
from commlib_torch.expert.losses import AuxiliaryLossModule
from commlib_torch.pipelines._parts import SplitModel
from commlib_torch.pipelines._reference_run import (
    Call,
    call_chain,
    first_names,
    forward_run,
    named_modules,
    named_values,
    run_stages,
    tolerance_of,
)

_Values = dict[str, Tensor]


class FirstBatch:
    """A traced model, whole and in stages, until its first batch. Exists on the rank of the first stage only.

    The outputs and buffers of both are compared on the first microbatch, in training and in evaluation mode, forward
    only and without gradients, on copies with the pipeline's current weights. The models and the random states do not
    change. spreads: as in `call_chain`. A model with weights on the meta device is not compared.

        fault = FirstBatch(model, cut, own=[0]).fault(((x,), {}))
    """

    def __init__(self, model: nn.Module, cut: SplitModel, own: list[int], *, spreads: bool = False) -> None:
        self._model, self._cut, self._spreads = model, cut, spreads
        self._own = [cut.parts[stage] for stage in own]
        self._dtypes = self._float_types()
        self.unable = ""
        """The reason why nothing could be compared, if there is one."""

    def warn(self) -> None:
        """Warn if nothing could be compared."""
        if self.unable:
            warnings.warn(
                f"pipeline: the split model is not compared with the whole model {self.unable}; to compare them "
                "before the first batch, pass example= to pipeline()",
                stacklevel=4,
            )

    def fault(self, call: Call) -> str:
        """Return the difference for a call of the model, "" if there is none or it cannot be determined."""
        self.unable = ""
        if any(value.is_meta for value in _state(self._model).values()):
            return ""
        if module := find_communicating_module(self._model):
            self.unable = f"on the first batch, because {module} communicates"
            return ""
        errors = []
        for training in (True, False):
            try:
                whole = self._run_of_whole(call, training)
            except Exception as error:  # such as batch norm of one row in training
                errors.append(error)
                continue
            if fault := self._fault(call, whole, training):
                return fault
        if len(errors) == 2:
            self.unable = f"on the first batch, because a copy of it fails: {type(errors[0]).__name__}: {errors[0]}"
        return ""

    def _fault(self, call: Call, whole: ModelRun, training: bool) -> str:
        fault = self._difference(whole, partial(self._run_of_cut, call, training), training)
        if not fault or self._difference(whole, partial(self._run_of_whole, call, training), training):
            return ""  # otherwise the whole model differs between runs, too
        try:  # to name the first module that differs
            named = self._run_of_whole(call, training, records=True)
            return self._difference(named, partial(self._run_of_cut, call, training, records=True), training) or fault
        except Exception:
            return fault

    def _difference(self, whole: ModelRun, run: Callable[[], ModelRun], training: bool) -> str:
        try:
            own = run()
        except (UsageError, torch.OutOfMemoryError):  # the batch itself raises it, or there is no memory for a copy
            return ""
        except Exception as error:
            return cut_failure(training, error)
        try:
            compare_with_original(
                SingleRank(), whole, own, when=mode(training), tolerance=tolerance_of(self._model), every=False
            )
        except UsageError as error:
            return str(error)
        return ""

    def _run_of_whole(self, call: Call, training: bool, *, records: bool = False) -> ModelRun:
        for name, module in [("", self._model), *named_modules(self._model).items()]:
            own = vars(module).get("forward")
            if own is not None and getattr(own, "__self__", None) is not module:
                raise UsageError(
                    f"{name or type(module).__name__} has a forward set on the object, which may call the original "
                    "instead of the copy"
                )
        copied = self._copied([self._model])[0]
        names = named_modules(copied) if records else {}
        run = partial(call_chain, copied, spreads=self._spreads)
        with preserve_state(self._model):
            return forward_run(copied, run, self._moved(call), names, training=training)

    def _run_of_cut(self, call: Call, training: bool, *, records: bool = False) -> ModelRun:
        parts = self._copied(list(self._cut.parts))
        names: dict[str, nn.Module] = {}
        if records:
            first = first_names(self._model)
            names = {first.get(name, name): one for part in parts for name, one in part.named_modules() if name}
        with preserve_state(self._model):
            run = partial(run_stages, parts, self._cut.values)
            return forward_run(parts, run, self._moved(call), names, training=training)

    def _copies(self, models: list[nn.Module]) -> list[nn.Module]:
        return copy_of(models)

    def _copied(self, models: list[nn.Module]) -> list[nn.Module]:
        """Return copies on the pipeline's devices, with its current weights."""
        copies = self._copies(models)
        self._move(copies)
        begun, now = _state(self._model), dict[int, Tensor]()
        for part in self._own:  # weights may have been replaced, and several stages may share one
            now |= {id(begun[name]): one for name, one in _state(part).items() if one is not begun[name]}
        with torch.no_grad():
            for name, value in (pair for one in copies for pair in _state(one).items()):
                if id(begun[name]) in now:
                    value.copy_(now[id(begun[name])])
        return copies

    # Pipelines may be moved after their construction

    def _float_types(self) -> set[torch.dtype]:
        return {one.dtype for part in self._own for one in part.parameters() if one.is_floating_point()}

    def _device(self) -> torch.device | None:
        """Return the common device if weights are on several devices: a pipeline moves only its own stages."""
        devices = {value.device for one in (self._model, *self._cut.parts) for value in _state(one).values()}
        return next((one.device for part in self._own for one in part.parameters()), None) if len(devices) > 1 else None

    def _move(self, copies: list[nn.Module]) -> None:
        device, types = self._device(), self._float_types()
        dtype = next(iter(types)) if len(types) == 1 and types != self._dtypes else None
        if device is not None or dtype is not None:
            for one in copies:
                one.to(device=device, dtype=dtype)

    def _moved(self, call: Call) -> Call:
        device = self._device()
        return call if device is None else pytree.tree_map_only(Tensor, lambda one: one.to(device), call)


def _state(module: nn.Module) -> _Values:
    return {name: one for what in ("named_parameters", "named_buffers") for name, one in named_values(module, what)}


def find_communicating_module(model: nn.Module) -> str:
    """Return the name of a submodule whose call is collective; "" if there is none."""
    for name, module in model.named_modules():
        kinds = [type(one) for one in (module, *vars(module).values())]
        if any(issubclass(kind, Communicator | nn.SyncBatchNorm) or _is_ours(kind) for kind in kinds):
            return name or type(model).__name__
    return ""


def _is_ours(kind: type) -> bool:
    is_of_losses = kind.__module__ == AuxiliaryLossModule.__module__  # of a user's layer that stores them
    return kind.__module__.startswith(("commlib_torch.", "torch.distributed.")) and not is_of_losses


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Call copies without side effects: on the model's own generators, on warnings, and on compiled code."""
    generators = {id(one): one for module in model.modules() for one in _generators(vars(module))}
    states = [(one, one.get_state()) for one in generators.values()]
    has_compiler = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            torch.compiler.set_stance("force_eager") if has_compiler else nullcontext(),
        ):
            yield
    finally:
        for one, state in states:
            one.set_state(state)


def _generators(attributes: Mapping[str, Any]) -> list[torch.Generator]:
    return [one for one in attributes.values() if isinstance(one, torch.Generator)]
