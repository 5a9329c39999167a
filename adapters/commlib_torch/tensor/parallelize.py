"""parallelize: shard the layers of a plain model among the ranks of an axis, by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from commlib.comparison.agreement import agree_on_call, run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.plan_checks import PlanChecks, find_plan
from commlib.tensor_parallel.plan import Plan, lines, resolve
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib.tensor_parallel.run.rank_numbers import ModuleNumber, check_numbers, split_numbers
from commlib.tensor_parallel.styles import PerRank, Slice, Style
from commlib_torch._graph_breaks import unwrap_compiled
from commlib_torch._readiness import check_module, check_shapes
from commlib_torch._shards import shard_of
from commlib_torch.tensor._arguments import arguments_in, divide_arguments
from commlib_torch.tensor._numbers import numbers_in
from commlib_torch.tensor._sharding import describe_everywhere, keep_padding
from commlib_torch.tensor._structure import structure_of
from commlib_torch.tensor._values import values_of_rank_0
from commlib_torch.tensor.layers import check_layers, find_layer
from commlib_torch.tensor.plan_check import CheckedModel, PlanCheck
from commlib_torch.tensor.tracing import arguments_of, styles_in

ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
    ranks: Ranks,
    plan: Plan | Literal["auto"],
    *,
    verify: Any = None,
    example: Any = None,
    codec: Any = None,
    divided_output: bool = False,
    report: Callable[[str], object] = print,
) -> ModelT:
    """Shard the layers that `plan` names among `ranks`, such as `mesh["tp"]`, and return `model`.

    It changes the model in place: modules and parameters keep their identity, with rank 0's values. Parameters are
    plain tensors, smaller if they are sharded.

    Without `verify` and `example` the plan is checked at the model's first call, with three more runs of the model, and
    again at the first call of each other kind (in evaluation, with a flag).

    Collective. After an error the model is unchanged, unless the failure or the difference appeared after the sharding
    (`verify`, `example`): such a model must be rebuilt.

    Args:
        model: A module.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        plan: Styles by patterns of names, `{"layers.*.up": Column(), "layers.*.down": Row()}`; or "auto" for
            transformer-like models, which rank 0 reports as a table.
        verify: A batch (a tensor, or a tuple or dict of the model's arguments), equal on all ranks, for one forward and
            backward compared with those of the unsharded model, which is kept until then.
        example: A batch on which the plan is checked by `commlib.tensor_parallel.rules`, and by the results of a
            forward, before anything is sharded.
        codec: The compression of activations and their gradients, such as "bf16"; None: none.
        divided_output: Whether the model's output may stay sharded. Logits of `Vocabulary()` without gather always may,
            for `vocabulary_cross_entropy`: F.cross_entropy, argmax and generate() would see this rank's tokens only;
            with gather=True they are unsharded.
        report: A function that gets the text that rank 0 reports about "auto".

    Raises:
        UsageError: On all ranks, for a plan that does not fit, breaks a rule, or changes the results.
        MismatchError: If ranks have different models or plans.
    """
    axis = communicator_of(ranks, "parallelize")
    shared = ParallelAxis(axis, codec)
    agree_on_call(axis, "parallelize", plan=plan, verify=verify, example=example, codec=codec, output=divided_output)
    run_together(axis, lambda: _check_weights(model))
    whole, model = model, unwrap_compiled(model)
    is_auto = isinstance(plan, str)
    if is_auto:  # other models would give other plans
        structure_of(model).compare(axis, "parallelize")
    traced, batch = CheckedModel(model, shared), example if verify is None else verify
    call = run_together(axis, lambda: None if batch is None else arguments_of(batch))
    wanted = find_plan(traced, shared, plan, call, report) if isinstance(plan, str) else _plain(plan)
    layers_found, numbers, arguments = run_together(axis, lambda: _layers(model, wanted))
    named: dict[str, Style] = {name: style for name, (_, style) in numbers.items()}
    named |= {name: style for name, (_, style) in arguments.items()}
    styles = {name: style for name, _, style, _ in layers_found} | named
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [f"{name}: {one.dtype}{_whole_shape(one)}" for name, one in tensors]
    check_agreement(axis, "parallelize", [f"codec {codec}", *lines(styles), *shapes])

    def check() -> None:
        check_layers(layers_found, Divisibility(shared))
        check_numbers(numbers, axis.size)

    run_together(axis, check)
    if not is_auto:
        structure_of(model).compare(axis, "parallelize")
    checks = None
    with values_of_rank_0([*model.parameters(), *model.buffers()], axis):
        if call is not None:
            first = {module: name for name, module in model.named_modules()}
            given = {first[module]: style for _, module, style, _ in layers_found} | styles_in(model)
            given |= named
            checks = PlanChecks(traced, shared, given, call, divided_output=divided_output)
            if verify is None:
                checks.compare_numbers()
            else:
                checks.keep_numbers()
    for name, module, style, layer in layers_found:
        if layer is not type(module):  # a parameter with several names changes at its first one
            module.__class__ = layer
            module.become(name, shared, style)
            module.style, module.layer_name = style, name  # from the plan, if a layer has replaced the parameter
    torch.clear_autocast_cache()  # of full weights
    split_numbers(numbers, shared)
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
    """Raise UsageError for weights without shapes, and in inference mode, whose tensors are unusable outside of it."""
    check_module("parallelize", model)
    check_shapes(model, "parallelize", "a division")
    if torch.is_inference_mode_enabled() or any(weight.is_inference() for weight in model.parameters()):
        raise UsageError(
            "parallelize: parameters made or sharded in torch.inference_mode() can be used nowhere else: call it "
            "outside, on a model that was made outside, or use torch.no_grad()"
        )


def _plain(plan: Plan) -> Plan:
    """Convert a plan to the names of a model; it may use those of the compiled model."""
    if not isinstance(plan, Mapping):
        return plan
    return {name.removeprefix("_orig_mod."): style for name, style in plan.items()}


def _layers(
    model: nn.Module, plan: Plan
) -> tuple[
    list[tuple[str, Any, Style, Any]],
    dict[str, tuple[ModuleNumber, PerRank]],
    dict[str, tuple[tuple[nn.Module, str], Slice]],
]:
    """Return (name, module, style, new class) for a plan's layers; its numbers, arguments and styles."""
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
                f"plan: {name} is a layer that {inside[module]} does not call, although it uses its weights: shard "
                f"{inside[module]} as one layer, with Column()"
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
