"""parallelize: divide the layers of a plain model among the ranks of an axis, by a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from commlib.buffers.freed_memory import keep_freed_memory
from commlib.communicator import Communicator
from commlib.data_parallel.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.checks import Checks, found_plan
from commlib.tensor.plan import Plan, lines, resolve
from commlib.tensor.styles import Style
from commlib_torch._bridge import array_of, packed
from commlib_torch._fast_path import keep_padding
from commlib_torch.tensor.checking import AtFirstCall, Traced
from commlib_torch.tensor.layers import find_layer
from commlib_torch.tensor.tracing import arguments_of, styles_in

ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
    axis: Communicator,
    plan: Plan | str,
    *,
    verify: Any = None,
    example: Any = None,
    codec: Any = None,
    divided_output: bool = False,
    report: Callable[[str], object] = print,
) -> ModelT:
    """Divide the layers that `plan` names among the ranks of `axis`, such as `mesh["tp"]`, and return `model`.

    It is the same model: modules and parameters stay the objects that they are, with rank 0's values, and parameters
    are plain tensors, smaller ones where they are divided. plan: styles by patterns of names, `{"layers.*.up":
    Column(), "layers.*.down": Row()}`; or "auto" for models like transformers, which rank 0 reports as a table.

    verify: a batch (a tensor, or a tuple or dict of the model's arguments), the same on all ranks, for one forward and
    backward beside those of the undivided model, which are kept for so long. example: a batch on which the plan is
    checked by `commlib.tensor.rules`, before anything is divided. Without either these are checked at the model's first
    call, which runs the model twice. codec: in which activations and their gradients travel, such as "bf16".
    divided_output: what the model returns may stay divided.

    Collective over the axis. Raises UsageError for a plan that does not fit, breaks a rule, or gives other numbers,
    MismatchError if ranks hold different models or plans.
    """
    shared = Axis(axis, codec)
    traced, batch = Traced(model), example if verify is None else verify
    call = None if batch is None else arguments_of(batch)
    if isinstance(plan, str):
        plan = found_plan(traced, shared, plan, call, report)
    modules = dict(model.named_modules(remove_duplicate=False))
    styles = resolve(plan, list(modules))
    shapes = [f"{name}: {list(parameter.shape)}" for name, parameter in model.named_parameters()]
    check_agreement(axis, "parallelize", [f"codec {codec}", *lines(styles), *shapes])
    found = [(name, modules[name], style, find_layer(name, modules[name], style)) for name, style in styles.items()]
    _take_values_of_rank_0(model, axis)
    checks = None
    if call is not None:
        first = {module: name for name, module in model.named_modules()}
        given = {first[module]: style for _, module, style, _ in found} | styles_in(model)
        checks = Checks(traced, shared, given, call, numbers=verify is not None, divided_output=divided_output)
    done: dict[int, tuple[str, Style]] = {}
    for name, module, style, layer in found:
        before = done.setdefault(id(module), (name, style))
        if before[1] != style:
            raise UsageError(f"plan: {name} and {before[0]} are one module: give them one style")
        if before[0] == name and layer is not type(module):
            module.__class__ = layer
            module.become(name, shared, style)
            module.style = style  # the plan's, where a layer has made another one of it
    keep_padding(model)
    shared.threads = torch.get_num_threads()
    keep_freed_memory()
    if checks is not None:
        checks.divided()
    else:
        AtFirstCall.of(model, divided_output=divided_output, warns=axis.rank == 0)
    return model


def _take_values_of_rank_0(model: nn.Module, axis: Communicator) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel():
                values = packed(tensor)
                axis.broadcast(array_of(values))
                if values.data_ptr() != tensor.data_ptr():
                    tensor.copy_(values)
