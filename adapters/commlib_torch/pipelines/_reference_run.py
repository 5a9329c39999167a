"""Reference runs: run a model, or its stages in sequence, forward and backward, and record the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.pipeline.cut_check import ModelRun
from commlib.pipeline.schedule import Link
from commlib.tensor_parallel.checks.compare import TOLERANCES
from commlib_torch._bridge import host_array
from commlib_torch._copies import copy_of, force_mode, preserve_random_state
from commlib_torch.expert.losses import keepers_in, take_losses
from commlib_torch.pipelines._flattening import flatten, unflatten
from commlib_torch.pipelines._operations import state_names
from commlib_torch.pipelines._parts import INPUTS, OUTPUT
from commlib_torch.pipelines._units import is_container

Call = tuple[tuple[Any, ...], dict[str, Any]]


def reference_run(model: Any, call: Call, *, spreads: bool, training: bool) -> ModelRun:
    """Run a copy of a model in one process. model: a module or a list of them, called as `call_chain` does."""
    copied = copy_of(model)
    modules = named_modules(copied)
    for name, module in [*([("", copied)] if isinstance(copied, nn.Module) else []), *modules.items()]:
        own = vars(module).get("forward")
        if own is not None and getattr(own, "__self__", None) is not module:
            raise UsageError(
                f"{name or type(module).__name__} has a forward set on the object, which may call the original "
                "instead of the copy"
            )
    also = [copied] if isinstance(copied, nn.Module) else []
    with _recording(modules, training=training, also=also) as values, _copy_inputs(call) as (fresh, inputs):
        output = call_chain(copied, fresh, spreads=spreads)
        _give_gradients(output, copied)
    return _run(copied, values, output, inputs)


def call_chain(model: Any, call: Call, *, spreads: bool) -> Any:
    """Call a model, or a list of modules in sequence: a tuple becomes the arguments of the next."""
    args, options = call
    if isinstance(model, nn.Module) and not (isinstance(model, nn.ModuleList) and is_container(model)):
        return model(*args, **options)
    first, *rest = model
    value = first(*args, **options)
    for layer in rest:
        value = layer(*value) if spreads and isinstance(value, tuple) else layer(value)
    return value


def staged_run(
    parts: Sequence[nn.Module],
    links: Mapping[Link, tuple[str, ...]],
    names: Mapping[str, str],
    call: Call,
    *,
    training: bool,
) -> ModelRun:
    """Run copies of the stages of a model in sequence. names: see `first_names`."""
    modules = {names.get(name, name): module for part in parts for name, module in part.named_modules() if name}
    stages: dict[str, int] = {}
    for stage, part in enumerate(parts):
        stages |= {f"the output of {names.get(name, name)}": stage for name, _ in part.named_modules()}
        stages |= dict.fromkeys(state_names(part), stage)
    given: dict[int, list[tuple[Tensor, Tensor]]] = {stage: [] for stage in range(len(parts))}
    with _recording(modules, training=training, also=parts) as values, _copy_inputs(call) as (fresh, inputs):
        output = run_stages(parts, links, fresh, given)
        _backward_from(given[len(parts) - 1], _objective(output))
        for both in reversed(given.values()):  # the outputs of a stage and its own losses have one backward
            pairs = [(one, leaf.grad) for one, leaf in both if one.requires_grad and leaf.grad is not None]
            if pairs:
                torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
    result = _run(parts, values, output, inputs)
    return ModelRun(result.values, result.gradients, result.state, stages)


def run_stages(
    parts: Sequence[nn.Module],
    links: Mapping[Link, tuple[str, ...]],
    call: Call,
    given: Mapping[int, list[tuple[Tensor, Tensor]]] | None = None,
) -> Any:
    """Call stages in sequence, each with separate leaves, and return their outputs.

    given: filled by stage with its outputs, with the leaves that later stages got for them, and with its own losses,
    whose gradient is one.
    """
    along: dict[tuple[int, int], tuple[list[Tensor], str]] = {}
    results: Any = None
    for stage, part in enumerate(parts):
        named: dict[str, Any] = {INPUTS: call} if stage == 0 else {}
        for link, notes in links.items():
            if link.target == stage:
                value, note = along.pop((link.source, stage))
                leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in value]
                if given is not None:
                    given[link.source].extend(zip(value, leaves, strict=True))
                named.update(zip(notes, unflatten([leaf.clone() for leaf in leaves], note), strict=True))
        results = part(named)
        if given is not None:
            _backward_from(given[stage], take_losses(keepers_in(part)))
        for link, notes in links.items():
            if link.source == stage:
                along[stage, link.target] = flatten([results[name] for name in notes])
    return results[OUTPUT]


def forward_run(
    model: Any, run: Callable[[Call], Any], call: Call, modules: Mapping[str, nn.Module], *, training: bool
) -> ModelRun:
    """Run a copy of a model, or of its stages in a list, forward; also record the outputs of `modules`.

    It runs without autograd: no weight requires a gradient, because a copy needs none.
    """
    roots: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
    for root in roots:
        root.requires_grad_(False)
    fresh = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), call)
    with _recording(modules, training=training, also=roots) as values, torch.set_grad_enabled(training):
        output = run(fresh)
    return _run(model, values, output, [])


def first_names(model: Any) -> dict[str, str]:
    """Map each name of a module to the module's first name."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, module in named_modules(model, remove_duplicate=False).items():
        names[name] = first.setdefault(id(module), name)
    return names


def named_modules(model: Any, *, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """Return the modules of a module or a list, by name."""
    if isinstance(model, nn.Module):
        return {name: one for name, one in model.named_modules(remove_duplicate=remove_duplicate) if name}
    holder = nn.ModuleList(model)
    return {name: one for name, one in holder.named_modules(remove_duplicate=remove_duplicate) if name}


def named_values(model: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Yield the parameters or buffers of a module, a list or stages, under each of their names."""
    if isinstance(model, nn.Module):
        yield from getattr(model, what)(remove_duplicate=False)
    elif model and all(hasattr(part, "_commlib") for part in model):
        for part in model:
            yield from getattr(part, what)(remove_duplicate=False)
    else:
        yield from getattr(nn.ModuleList(model), what)(remove_duplicate=False)


@contextmanager
def _recording(
    modules: Mapping[str, nn.Module], *, training: bool, also: Sequence[nn.Module] = ()
) -> Iterator[dict[str, Any]]:
    """Run models in a mode, with gradients and the current random states; yield the outputs of their modules."""
    values: dict[str, Any] = {}
    calls: dict[str, int] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, result: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            again = f" in call {calls[name]}" if calls[name] > 1 else ""
            for number, tensor in enumerate(_tensors(result)):
                of = f", value {number}" if number else ""
                values[f"the output of {name}{again}{of}"] = _array(tensor)

        return note

    everything = list(dict.fromkeys([*modules.values(), *(one for part in also for one in part.modules())]))
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(noting(name)).remove)
        stack.enter_context(force_mode(everything, training=training))
        stack.enter_context(preserve_random_state())
        stack.enter_context(torch.enable_grad())
        yield values


@contextmanager
def _copy_inputs(call: Call) -> Iterator[tuple[Call, list[Tensor]]]:
    """Yield copies of arguments, with the leaves among them that take gradients."""
    inputs: list[Tensor] = []

    def fresh(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        if copied.is_floating_point() or copied.is_complex():
            inputs.append(copied.requires_grad_())
            return copied * 1  # not a leaf: a model may change it in place
        return copied

    yield pytree.tree_map_only(Tensor, fresh, call), inputs


def _give_gradients(output: Any, model: Any) -> None:
    """Run the backward of a sum of the outputs and of recorded losses."""
    loss = _objective(output)
    keepers = [keeper for part in ([model] if isinstance(model, nn.Module) else model) for keeper in keepers_in(part)]
    extra = take_losses(dict.fromkeys(keepers))
    if extra is not None:
        loss = loss + extra
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()


def _backward_from(given: list[tuple[Tensor, Tensor]], loss: Any) -> None:
    """Run the backward of a stage, including its loss."""
    if isinstance(loss, Tensor) and loss.requires_grad:
        end = torch.zeros_like(loss)
        end.grad = torch.ones_like(loss)
        given.append((loss, end))


def _objective(output: Any) -> Any:
    """Return a sum of the outputs, weighted per element, equal in every run; 0.0 if none requires gradients."""
    loss: Any = 0.0
    for number, value in enumerate(_tensors(output)):
        if value.requires_grad:
            weights = torch.from_numpy(np.random.default_rng(number).standard_normal(tuple(value.shape)))
            total = (value * weights.to(value)).sum()
            loss = loss + (total.abs() if total.is_complex() else total)
    return loss


def _run(model: Any, values: dict[str, Any], output: Any, inputs: list[Tensor]) -> ModelRun:
    results: dict[str, Array | str] = dict(values)
    results["the output"] = _structure(output)
    for number, tensor in enumerate(_tensors(output)):
        results[f"output {number}"] = _array(tensor)
    gradients = {f"input {n}": None if one.grad is None else _array(one.grad) for n, one in enumerate(inputs)}
    for name, weight in named_values(model, "named_parameters"):
        gradients[name] = None if weight.grad is None else _array(weight.grad)
    state = {name: _array(buffer) for name, buffer in named_values(model, "named_buffers")}
    return ModelRun(results, gradients, state)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, including those in objects."""
    try:
        return flatten([value])[0]
    except Exception:
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _structure(value: Any) -> str:
    leaves, spec = pytree.tree_flatten(value)
    kinds = ["a tensor" if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    return kinds[0] if spec.is_leaf() else f"{spec.type.__name__} of {', '.join(kinds)}"


def _array(tensor: Tensor) -> Array:
    return host_array(tensor.detach().clone().contiguous())


def tolerance_of(model: Any) -> float:
    """Return the tolerance of a comparison, by the coarsest float dtype of the model."""
    names = {str(value.dtype).removeprefix("torch.") for _, value in named_values(model, "named_parameters")}
    return max((TOLERANCES.get(name, 0.0) for name in names), default=TOLERANCES["float32"])
