"""Low-rank adapters: find products of two small layers that are added to a layer, W x + B A x, as in LoRA. [pure]

They are sharded like the layer, and never by their rank: if W is a Column, B is one and A is unsharded; if W is a Row,
A is one and B is unsharded. Then each rank's part of B A matches its part of W, and may be added to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlib.tensor_parallel.trace import ModelTrace, TraceStep, reach


@dataclass(frozen=True, slots=True)
class LowRank:
    """Names of layers: the first, A, the second, B, and the base, W. rank: number of features between A and B."""

    first: str
    second: str
    base: str
    rank: int


def find_low_ranks(trace: ModelTrace) -> list[LowRank]:
    """Return the low-rank adapters of a trace. A base has the features of both ends, and the input of the first."""
    users, products = trace.users, [step for step in trace.steps if step.kind == "product"]
    shapes = {step.size for step in products}
    adapters: dict[str, LowRank] = {}
    for first in products:
        if first.layer in adapters:
            continue
        inputs, rank = first.size
        if not any(size[0] == inputs for size in shapes):
            continue
        ends, values = reach(trace, users, first)
        if {end.layer for end in ends} != {ends[0].layer if ends else ""} or values.intersection(trace.outputs):
            continue
        second = ends[0]
        outputs = second.size[1]
        if (
            second.kind != "product"
            or second.layer == first.layer
            or (inputs, outputs) not in shapes
            or not (rank < min(inputs, outputs) or first.outputs[0] == second.inputs[0])
        ):
            continue
        before, after = _origins(trace, first), reach(trace, users, second)[1]
        combined = {
            at: one.layer
            for one in reversed(products)
            if one.size == (inputs, outputs) and one.layer not in (first.layer, second.layer)
            if not before.isdisjoint(_origins(trace, one))
            if (at := _combining_step(trace, reach(trace, users, one)[1], after)) is not None
        }
        if combined:
            adapters[first.layer] = LowRank(first.layer, second.layer, combined[min(combined)], rank)
    return list(adapters.values())


def _origins(trace: ModelTrace, step: TraceStep) -> set[int]:
    """Return a layer's input, and the values that it was made from by dropout, a cast and the like."""
    value, values = step.inputs[0], {step.inputs[0]}
    while (maker := trace.steps[trace.makers[value]]).kind in ("equation", "reshape") and not maker.weights:
        if len(set(maker.inputs)) != 1:
            break
        value = maker.inputs[0]
        values.add(value)
    return values


def _combining_step(trace: ModelTrace, ones: set[int], others: set[int]) -> int | None:
    """Return the index of the first step with inputs from both layers, if it is element-wise."""
    for at, step in enumerate(trace.steps):
        if step.kind != "equation" or ones.isdisjoint(step.inputs) or others.isdisjoint(step.inputs):
            continue
        shapes = {trace.shapes[value] for value in (*step.inputs, *step.outputs)}
        return at if len(shapes) == 1 else None
    return None
