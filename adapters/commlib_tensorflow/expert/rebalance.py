"""rebalance_experts: move often-chosen experts to ranks with little load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from commlib.comparison.agreement import run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.expert.mixture import check_has_mixtures
from commlib.expert.moving import move_experts, no_copy, rebalance
from commlib.expert.placement import ExpertPlacement
from commlib_tensorflow.expert._expert_optimizers import states_for
from commlib_tensorflow.expert.moe import MoE
from commlib_tensorflow.pipelines.pipeline import Pipeline


def rebalance_experts(
    model: keras.Model, optimizer: Any = None, *, least: float = 1.1, copies: Sequence[keras.Model] = ()
) -> dict[str, tuple[float, float]]:
    """Exchange experts between ranks to relieve the busiest one, with their optimizer state.

    The load is how often experts were chosen since the last call, or since `expert_stats`, by the tokens of all ranks.
    Call it between steps, every few hundred of them, such as at the end of an epoch. A layer is not changed unless the
    load of its busiest rank drops by a factor of at least `least`. Optimizer state moves with the experts, including
    that of the model's own optimizer.

    Returns, by layer name, the load of the busiest rank divided by the mean load, before and after. Collective.

        ct.rebalance_experts(model, optimizer)

    Args:
        model: The model with mixtures of experts.
        optimizer: Its optimizer, whose state moves with the experts; None: there is none.
        least: The factor by which the load of a layer's busiest rank must fall, or the layer stays unchanged.
        copies: Other models with the same mixtures, such as an average of the weights.

    Raises:
        UsageError: For a model without mixtures; on all ranks, before a layer's experts move, for copies with other
            mixtures, and for an optimizer whose state does not have the shape of their weights.
        MismatchError: If ranks have different optimizers or copies.
    """
    layers = mixtures_of("rebalance_experts", model)
    given = optimizer if optimizer is not None else getattr(model, "optimizer", None)

    def move(number: int, placement: ExpertPlacement) -> None:
        _move(layers, number, copies, given, placement)

    return rebalance([layer.mixture for layer in layers], least, move)


def mixtures_of(verb: str, model: Any) -> list[MoE]:
    """Return the mixtures of a model. Raises UsageError for a call of `verb` if it has none."""
    layers = _mixtures(model)
    check_has_mixtures(verb, model, keras.layers.Layer, layers, whole=not isinstance(model, Pipeline))
    return layers


def _mixtures(model: Any) -> list[MoE]:
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    return [each for each in layers if isinstance(each, MoE)]


def _move(
    layers: Sequence[MoE], number: int, copies: Sequence[Any], optimizer: Any, placement: ExpertPlacement
) -> None:
    layer, mixture = layers[number], layers[number].mixture
    comm = mixture.ranks.axis.comm

    def find() -> tuple[list[MoE], list[tuple[str, Any]]]:
        same = [layer, *(_matching_layer(layers, number, copy) for copy in copies)]
        return same, list(_stacks(mixture.name, same, optimizer))

    everyone, stacks = run_together(comm, find)
    lines = [f"{what}: {stack.dtype}{list(stack.shape[1:])}" for what, stack in stacks]
    check_agreement(comm, f"rebalance_experts: {mixture.name}", lines)
    arrays = move_experts([stack.numpy() for _, stack in stacks], mixture.placement, placement, comm)
    for (_, stack), array in zip(stacks, arrays, strict=True):
        stack.assign(array)
    for one in everyone:
        one.mark(placement)
    mixture.place(placement)
    for one in everyone[1:]:
        one.mixture.follow(mixture)


def owners_of(model: Any) -> list[list[int]]:
    """Return the ranks of the experts of each mixture of a model."""
    return [list(layer.mixture.placement.owners) for layer in _mixtures(model)]


def put_owners(model: Any, owners: Sequence[Sequence[int]]) -> None:
    """Restore the placement that `owners_of` returned. Collective if it differs from the current one."""
    for layer, ranks in zip(_mixtures(model), owners, strict=True):
        layer.put_owners(tuple(ranks))


def _matching_layer(layers: Sequence[MoE], number: int, copy: Any) -> MoE:
    """Return a copy's layer. Raises UsageError unless it has as many mixtures, and this one has the same placement."""
    mixtures, layer = _mixtures(copy), layers[number]
    shapes = [(stack.dtype, tuple(stack.shape)) for stack in layer.stacks]
    if len(mixtures) == len(layers) and mixtures[number] is not layer:
        other = mixtures[number]
        is_same = [(stack.dtype, tuple(stack.shape)) for stack in other.stacks] == shapes
        if is_same and other.mixture.placement == layer.mixture.placement and other.ranks.axis is layer.ranks.axis:
            return other
    raise no_copy(copy.name, layer.mixture.name)


def _stacks(name: str, layers: Sequence[MoE], optimizer: Any) -> Iterator[tuple[str, Any]]:
    for number, layer in enumerate(layers):
        for place, variable in enumerate(layer.stacks):
            what = f"experts.{place} of {name}" if number == 0 else f"experts.{place} of {name}, copy {number}"
            yield what, variable
            for slot, value in states_for(variable, optimizer):
                if value.shape != variable.shape:
                    raise UsageError(
                        f"rebalance_experts: {slot} for {what} has shape {tuple(value.shape)}, but this rank's experts "
                        f"have {tuple(variable.shape)}, so its assignment to experts is unknown"
                    )
                yield f"{what}, {slot}", value
