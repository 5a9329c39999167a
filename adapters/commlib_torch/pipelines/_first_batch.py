"""First batch: compare a traced model with the whole one on the first values that come, and forget the whole one."""

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
from commlib.pipeline.whole import Run, compare_with_whole
from commlib_torch._copies import copy_of
from commlib_torch.expert.losses import KeepsLosses
from commlib_torch.pipelines._parts import Cut
from commlib_torch.pipelines._verify import Alone
from commlib_torch.pipelines._whole import (
    Call,
    called,
    first_names,
    forward_run,
    named_modules,
    named_values,
    through,
    tolerance_of,
)

_Values = dict[str, Tensor]


class FirstBatch:
    """A traced model, whole and in stages, until its first batch has come. Where the first stage is: others have None.

    The outputs and buffers of both are compared on the first microbatch, in training and in evaluation mode, forward
    and without gradients, on copies, which have the weights that the pipeline has then. Nothing of the models changes,
    nor of random numbers. spreads: as `called` has it. A model that has weights on the meta device is not compared.

        fault = FirstBatch(model, cut, own=[0]).fault(((x,), {}))
    """

    def __init__(self, model: nn.Module, cut: Cut, own: list[int], *, spreads: bool = False) -> None:
        self._model, self._cut, self._spreads = model, cut, spreads
        self._own = [cut.parts[stage] for stage in own]
        self._dtypes = self._float_types()
        self.unable = ""
        """Why nothing could be compared, if that is so."""

    def warn(self) -> None:
        """Say that nothing was compared, if that is so."""
        if self.unable:
            warnings.warn(
                f"pipeline: the cut model is not compared with the whole one {self.unable}; to compare them before the "
                "first batch, give example= to pipeline()",
                stacklevel=4,
            )

    def fault(self, call: Call) -> str:
        """Return what differs if the model is called so, "" if nothing does or nobody can tell."""
        self.unable = ""
        if any(value.is_meta for value in _state(self._model).values()):
            return ""
        if found := communicating(self._model):
            self.unable = f"on the first batch, because {found} communicates"
            return ""
        errors = []
        for training in (True, False):
            try:
                whole = self._run_of_whole(call, training)
            except Exception as error:  # as batch norm of one row in training
                errors.append(error)
                continue
            if fault := self._fault(call, whole, training):
                return fault
        if len(errors) == 2:
            self.unable = f"on the first batch, with which a copy of it fails: {type(errors[0]).__name__}: {errors[0]}"
        return ""

    def _fault(self, call: Call, whole: Run, training: bool) -> str:
        fault = self._difference(whole, partial(self._run_of_cut, call, training), training)
        if not fault or self._difference(whole, partial(self._run_of_whole, call, training), training):
            return ""  # else it is never the same, whole or not
        try:  # to name the first module that differs
            named = self._run_of_whole(call, training, records=True)
            return self._difference(named, partial(self._run_of_cut, call, training, records=True), training) or fault
        except Exception:
            return fault

    def _difference(self, whole: Run, run: Callable[[], Run], training: bool) -> str:
        how = "in training" if training else "in evaluation"
        try:
            own = run()
        except (UsageError, torch.OutOfMemoryError):  # the batch itself will raise it, or there is no room for a copy
            return ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return f"pipeline: the cut model fails {how}, and the whole one does not: {said}"
        try:
            compare_with_whole(Alone(), whole, own, when=how, tolerance=tolerance_of(self._model), every=False)
        except UsageError as error:
            return str(error)
        return ""

    def _run_of_whole(self, call: Call, training: bool, *, records: bool = False) -> Run:
        for name, module in [("", self._model), *named_modules(self._model).items()]:
            own = vars(module).get("forward")
            if own is not None and getattr(own, "__self__", None) is not module:
                raise UsageError(
                    f"{name or type(module).__name__} has a forward of its own, which may call what is no copy"
                )
        copied = self._copied([self._model])[0]
        names = named_modules(copied) if records else {}
        run = partial(called, copied, spreads=self._spreads)
        with as_it_is(self._model):
            return forward_run(copied, run, self._moved(call), names, training=training)

    def _run_of_cut(self, call: Call, training: bool, *, records: bool = False) -> Run:
        parts = self._copied(list(self._cut.parts))
        names: dict[str, nn.Module] = {}
        if records:
            first = first_names(self._model)
            names = {first.get(name, name): one for part in parts for name, one in part.named_modules() if name}
        with as_it_is(self._model):
            run = partial(through, parts, self._cut.values)
            return forward_run(parts, run, self._moved(call), names, training=training)

    def _copies(self, models: list[nn.Module]) -> list[nn.Module]:
        return copy_of(models)

    def _copied(self, models: list[nn.Module]) -> list[nn.Module]:
        """Return copies that compute where the pipeline does, with the weights that it has now."""
        copies = self._copies(models)
        self._move(copies)
        begun, now = _state(self._model), dict[int, Tensor]()
        for part in self._own:  # weights may have been replaced there, and another stage may have the same ones
            now |= {id(begun[name]): one for name, one in _state(part).items() if one is not begun[name]}
        with torch.no_grad():
            for name, value in (pair for one in copies for pair in _state(one).items()):
                if id(begun[name]) in now:
                    value.copy_(now[id(begun[name])])
        return copies

    # Where pipelines were moved to after they were made

    def _float_types(self) -> set[torch.dtype]:
        return {one.dtype for part in self._own for one in part.parameters() if one.is_floating_point()}

    def _device(self) -> torch.device | None:
        """Return where all must be, if weights are on several devices: a pipeline moves its own stages only."""
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


def communicating(model: nn.Module) -> str:
    """Return the name of a submodule that other ranks must call, too, when this one does; "" if there is none."""
    for name, module in model.named_modules():
        kinds = [type(one) for one in (module, *vars(module).values())]
        if any(issubclass(kind, Communicator | nn.SyncBatchNorm) or _is_ours(kind) for kind in kinds):
            return name or type(model).__name__
    return ""


def _is_ours(kind: type) -> bool:
    is_of_losses = kind.__module__ == KeepsLosses.__module__  # of a user's layer that keeps them
    return kind.__module__.startswith(("commlib_torch.", "torch.distributed.")) and not is_of_losses


@contextmanager
def as_it_is(model: nn.Module) -> Iterator[None]:
    """Let copies be called without a trace of it: the model's own generators, warnings, and what is compiled."""
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
