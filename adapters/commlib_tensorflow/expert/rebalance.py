"""rebalance_experts: experts that are chosen often go to ranks whose experts are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from commlib.comparison.agreement import together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.expert.moving import moved
from commlib.expert.placement import Placement
from commlib_tensorflow.expert._keepers import kept_for
from commlib_tensorflow.expert.moe import MoE


def rebalance_experts(
    model: keras.Model, optimizer: Any = None, *, least: float = 1.1, copies: Sequence[keras.Model] = ()
) -> dict[str, tuple[float, float]]:
    """Exchange experts between ranks where that relieves the busiest one, with what optimizers keep for them.

    It goes by how often experts were chosen since the last time, or since `expert_stats`, by tokens of all ranks; call
    it between steps, every some hundred of them, such as at the end of an epoch. A layer whose busiest rank would not
    get `least` times less stays as it is. What optimizers keep, such as the model's own, goes with it. optimizer: one
    that may not have made a step yet. copies: other models with the same mixtures, such as one with an average of the
    weights: their experts go where the model's go.

    Returns by the names of layers the load of the busiest rank by the mean one, before and after. Collective. Raises
    UsageError on all ranks, before a layer's experts go, for copies with other mixtures, and for an optimizer that
    keeps something else for them than for each element of their weights; MismatchError if ranks have other optimizers
    or copies.

        ct.rebalance_experts(model, optimizer)
    """
    layers = _mixtures(model)
    given = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    found: dict[str, tuple[float, float]] = {}
    for number, layer in enumerate(layers):
        placement, before, after = layer.mixture.better_placement(least)
        if placement == layer.mixture.placement:
            after = before
        else:
            _move(layer, number, len(layers), copies, given, placement)
        found[layer.mixture.name_among(found)] = before, after
    return found


def _mixtures(model: Any) -> list[MoE]:
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    return [each for each in layers if isinstance(each, MoE)]


def _move(layer: MoE, number: int, count: int, copies: Sequence[Any], optimizer: Any, placement: Placement) -> None:
    mixture = layer.mixture
    comm = mixture.ranks.axis.comm

    def find() -> tuple[list[MoE], list[tuple[str, Any]]]:
        same = [layer, *(_same(layer, number, count, copy) for copy in copies)]
        return same, list(_stacks(mixture.name, same, optimizer))

    everyone, stacks = together(comm, find)
    lines = [f"{what}: {stack.dtype}{list(stack.shape[1:])}" for what, stack in stacks]
    check_agreement(comm, f"rebalance_experts: {mixture.name}", lines)
    arrays = moved([stack.numpy() for _, stack in stacks], mixture.placement, placement, comm)
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
    """Let weights be of the experts that they were when `owners_of` told. Collective where that is another place."""
    for layer, ranks in zip(_mixtures(model), owners, strict=True):
        layer.put_owners(tuple(ranks))


def _same(layer: MoE, number: int, count: int, copy: Any) -> MoE:
    """Return a copy's layer. Raises UsageError unless it has as many, and this one where the layer has its experts."""
    found = _mixtures(copy)
    shapes = [(stack.dtype, tuple(stack.shape)) for stack in layer.stacks]
    if len(found) == count and found[number] is not layer:
        other = found[number]
        is_same = [(stack.dtype, tuple(stack.shape)) for stack in other.stacks] == shapes
        if is_same and other.mixture.placement == layer.mixture.placement and other.ranks.axis is layer.ranks.axis:
            return other
    raise UsageError(
        f"rebalance_experts: {copy.name}, one of copies=, has no mixture like {layer.mixture.name} whose experts are "
        "on the same ranks: give models that are made and moved alike from the beginning"
    )


def _stacks(name: str, layers: Sequence[MoE], optimizer: Any) -> Iterator[tuple[str, Any]]:
    for number, layer in enumerate(layers):
        for place, variable in enumerate(layer.stacks):
            what = f"experts.{place} of {name}" if number == 0 else f"experts.{place} of {name}, copy {number}"
            yield what, variable
            for kept, value in kept_for(variable, optimizer):
                if value.shape != variable.shape:
                    raise UsageError(
                        f"rebalance_experts: {kept} for {what} has shape {tuple(value.shape)}, and this rank's experts "
                        f"{tuple(variable.shape)}: it is not known what of it belongs to which expert"
                    )
                yield f"{what}, {kept}", value
