"""parallelize: divide the layers of a plain model among the ranks of an axis, by a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.comparison.agreement import agree_on_call, together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.checks.checks import Checks, found_plan
from commlib.tensor_parallel.plan import Plan, lines, resolve
from commlib.tensor_parallel.run.division import Division
from commlib.tensor_parallel.run.per_rank import Number, check_numbers, divide_numbers
from commlib.tensor_parallel.styles import PerRank, Slice, Style
from commlib_torch._fast_path import keep_padding
from commlib_torch._shards import shard_of
from commlib_torch._uncompiled import original
from commlib_torch._unready import check_shapes
from commlib_torch.tensor._arguments import arguments_in, divide_arguments
from commlib_torch.tensor._dividing import describe_everywhere
from commlib_torch.tensor._likeness import likeness
from commlib_torch.tensor._numbers import numbers_in
from commlib_torch.tensor._values import values_of_rank_0
from commlib_torch.tensor.checking import PlanCheck, Traced
from commlib_torch.tensor.layers import check_layers, find_layer
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
    checked by `commlib.tensor_parallel.rules`, and by the numbers of a forward, before anything is divided. Without
    either these are checked at the model's first call, which runs the model three times more, as does the first call of
    each other kind (in evaluation, with a flag). codec: in which activations and their gradients travel, such as
    "bf16". divided_output: what the model returns may stay divided. Logits of `Vocabulary()` without gather always may,
    for `vocabulary_cross_entropy`: of such, F.cross_entropy, argmax and generate() see this rank's words alone; with
    gather=True they are whole.

    Collective over the axis. Raises UsageError, on all ranks, for a plan that does not fit, breaks a rule, or gives
    other numbers, MismatchError if ranks hold different models or plans. The model is as it was then, but if it was
    divided before it showed that it fails or gives other numbers (verify=, example=): that one has to be made anew.
    """
    shared = Axis(axis, codec)
    agree_on_call(axis, "parallelize", plan=plan, verify=verify, example=example, codec=codec, output=divided_output)
    together(axis, lambda: _check_weights(model))
    whole, model = model, original(model)
    is_found = isinstance(plan, str)
    if is_found:  # for other models ranks would find other plans
        likeness(model).compare(axis, "parallelize")
    traced, batch = Traced(model, shared), example if verify is None else verify
    call = together(axis, lambda: None if batch is None else arguments_of(batch))
    wanted = found_plan(traced, shared, plan, call, report) if isinstance(plan, str) else _plain(plan)
    found, numbers, arguments = together(axis, lambda: _layers(model, wanted))
    named: dict[str, Style] = {name: style for name, (_, style) in numbers.items()}
    named |= {name: style for name, (_, style) in arguments.items()}
    styles = {name: style for name, _, style, _ in found} | named
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [f"{name}: {one.dtype}{_whole_shape(one)}" for name, one in tensors]
    check_agreement(axis, "parallelize", [f"codec {codec}", *lines(styles), *shapes])

    def check() -> None:
        check_layers(found, Division(shared))
        check_numbers(numbers, axis.size)

    together(axis, check)
    if not is_found:
        likeness(model).compare(axis, "parallelize")
    checks = None
    with values_of_rank_0([*model.parameters(), *model.buffers()], axis):
        if call is not None:
            first = {module: name for name, module in model.named_modules()}
            given = {first[module]: style for _, module, style, _ in found} | styles_in(model)
            given |= named
            checks = Checks(traced, shared, given, call, divided_output=divided_output)
            if verify is None:
                checks.compare_numbers()
            else:
                checks.keep_numbers()
    for name, module, style, layer in found:
        if layer is not type(module):  # one that has several names has changed by the first
            module.__class__ = layer
            module.become(name, shared, style)
            module.style, module.layer_name = style, name  # the plan's, where a layer has made another one of it
    torch.clear_autocast_cache()  # of whole weights
    divide_numbers(numbers, shared)
    divide_arguments(arguments, shared)
    describe_everywhere(model)
    keep_padding(model)
    shared.threads = torch.get_num_threads()
    if checks is not None:
        checks.divided()
    evaluated = verify is not None
    PlanCheck.of(model, shared, divided_output=divided_output, checked=call, way=traced.way, evaluated=evaluated)
    return whole


def _check_weights(model: nn.Module) -> None:
    """Raise UsageError for weights without shapes, and in inference mode: outside of it nobody can use its tensors."""
    check_shapes(model, "parallelize", "a division")
    if torch.is_inference_mode_enabled() or any(weight.is_inference() for weight in model.parameters()):
        raise UsageError(
            "parallelize: parameters that are made or divided in torch.inference_mode() can be used nowhere else: "
            "call it outside, on a model that was made outside, or use torch.no_grad()"
        )


def _plain(plan: Plan) -> Plan:
    """Return a plan by the names of a model, be it named as in a compiled one, or as in the model itself."""
    return {name.removeprefix("_orig_mod."): style for name, style in plan.items()}


def _layers(
    model: nn.Module, plan: Plan
) -> tuple[
    list[tuple[str, Any, Style, Any]],
    dict[str, tuple[Number, PerRank]],
    dict[str, tuple[tuple[nn.Module, str], Slice]],
]:
    """Return (name, module, style, the class that it becomes) of what a plan names; numbers, arguments and styles."""
    modules, numbers = dict(model.named_modules(remove_duplicate=False)), numbers_in(model)
    arguments = arguments_in(model)
    inside = {
        child: name
        for name, module in modules.items()
        if type(module) is nn.MultiheadAttention
        for child in module.children()
    }
    styles = resolve(plan, list(modules), numbers=list(numbers), arguments=list(arguments))
    for name in styles:
        if (module := modules.get(name)) in inside:
            raise UsageError(
                f"plan: {name} is a layer that {inside[module]} does not call, but takes the weights of: divide "
                f"{inside[module]} as a whole, by Column()"
            )
    layers: list[tuple[str, Any, Style, Any]] = [
        (name, modules[name], style, find_layer(name, modules[name], style))
        for name, style in styles.items()
        if not isinstance(style, PerRank | Slice)
    ]
    return (
        layers,
        {name: (numbers[name], style) for name, style in styles.items() if isinstance(style, PerRank)},
        {name: (arguments[name], style) for name, style in styles.items() if isinstance(style, Slice)},
    )


def _whole_shape(tensor: Tensor) -> list[int]:
    shard = shard_of(tensor)
    return list(tensor.shape if shard is None else shard.sharding.shape)
