"""Inputs of column-sharded layers: one copy, or gather, of an input for all layers that take it.

Q, K and V are often three layers with one input. The gradient of this input is a sum over the layers and over the
ranks: the layers share the redistribution, so the sum has one reduction. If overlap pays, the reduction starts as soon
as the sum is complete, and overlaps with the products for the gradients of weights:

    forward      x -> finish -> start -> product with a deferred weight
    backward     product: gradient of its input -> start: begins to reduce it -> late: gradient of the weight
                 -> finish: waits for the reduction

Of the nodes that are ready, autograd runs the one made last in the forward. Otherwise there would be less overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.moves import COPY, Redistribute, gather
from commlib.tensor_parallel.run.moves import run, start
from commlib_torch._bridge import array_of, pack, to_tensor
from commlib_torch._function_transforms import explain
from commlib_torch._graph_breaks import disable_compile
from commlib_torch.devices import device_of
from commlib_torch.tensor._comparison import note_eager_input, takes_notes
from commlib_torch.tensor.moves import redistribute


class InputCache(NamedTuple):
    """The last redistributed input and its result. Dropped with that input, or when another input arrives.

    Changes of an input are not always detectable: numpy arrays may share its memory. So it is reused only by
    consecutive layers that have not used it yet, as long as nothing is reduced over the axis in between.
    """

    source: weakref.ref[Tensor]
    version: int
    move: Redistribute
    records: bool
    result: Tensor
    weights: list[int]
    """Weights of layers that have used it, by id."""

    def holds(self, x: Tensor, move: Redistribute, weight: Tensor) -> bool:
        return (
            self.source() is x
            and self.version == x._version
            and self.move == move
            and self.records == _records(x)
            and id(weight) not in self.weights
        )


@disable_compile
def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: ParallelAxis, sequence: int | None, layer: Any = None
) -> Tensor:
    """Return x @ weight.T + bias for a weight that is sharded along its outputs, and an unsharded input.

    sequence: the dimension along which the input is sharded instead; it is gathered first. layer: the calling layer.
    """
    if layer is not None and takes_notes(axis):
        note_eager_input(layer, x, sequence=sequence)
    move = COPY if sequence is None else gather(sequence, partial=True)
    if axis.size == 1:
        return torch.nn.functional.linear(x, weight, bias)
    overlaps = axis.overlaps and device_of(x) is None  # products on a GPU continue while the host waits
    if not (overlaps and torch.is_grad_enabled() and weight.requires_grad and x.requires_grad):
        return torch.nn.functional.linear(enter(x, axis, move, redistribute, weight), weight, bias)
    late = _DeferredGradient()
    try:  # made before `start`, so that it runs after it
        late_weight: Tensor = _LateWeight.apply(weight, late)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise explain(error, "sharded layers") from error
    inside = enter(x, axis, move, _overlapping, weight)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        inside, late_weight = inside.to(dtype), late_weight.to(dtype)
        return torch.nn.functional.linear(inside, late_weight, bias)
    output: Tensor = _Product.apply(inside, late_weight, bias, late)  # type: ignore[no-untyped-call]
    return output


@disable_compile
def enter(
    x: Tensor,
    axis: ParallelAxis,
    move: Redistribute,
    make: Callable[[Tensor, ParallelAxis, Redistribute], Tensor],
    weight: Tensor,
) -> Tensor:
    """Return the redistributed input, shared by consecutive layers with the same input.

    weight: the layer's weight.
    """
    if x.is_inference():  # without a version, changes are undetectable
        return make(x, axis, move)
    last: InputCache | None = axis.entered
    if last is not None and last.holds(x, move, weight):
        last.weights.append(id(weight))
        return last.result
    result = make(x, axis, move)
    if result is x:  # nothing to share; and it would keep itself alive
        return result

    def forget(reference: weakref.ref[Tensor]) -> None:
        if axis.entered is not None and axis.entered.source is reference:
            axis.entered = None

    axis.entered = InputCache(weakref.ref(x, forget), x._version, move, _records(x), result, [id(weight)])
    return result


def _records(x: Tensor) -> bool:
    """Return whether results computed from `x` have gradients."""
    return torch.is_grad_enabled() and x.requires_grad


def _overlapping(x: Tensor, axis: ParallelAxis, move: Redistribute) -> Tensor:
    box = _Box()
    outside = _Finish.apply(x, box)  # type: ignore[no-untyped-call]
    output: Tensor = _Start.apply(outside, axis, move, box)  # type: ignore[no-untyped-call]
    return output


class _Box:
    """Passes state from `start` to `finish`."""

    wait: Callable[[], Any] | None = None


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ParallelAxis, move: Redistribute, box: _Box) -> Tensor:
        ctx.axis, ctx.move, ctx.box, ctx.shape = axis, move, box, x.shape
        if move is COPY:
            return x.detach()
        result, ctx.move = run(axis, move, array_of(pack(x)))
        return to_tensor(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = ctx.move.conjugate
        if torch.is_grad_enabled():  # the gradient of this gradient may be needed
            return redistribute(gradient, ctx.axis, back), None, None, None
        ctx.box.wait = start(ctx.axis, back, array_of(pack(gradient)))
        return gradient.new_zeros(()).expand(ctx.shape), None, None, None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, box: _Box) -> Tensor:
        ctx.box = box
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wait, ctx.box.wait = ctx.box.wait, None
        return gradient if wait is None else to_tensor(wait()), None


class _DeferredGradient:
    """Passes state from a product to the gradient of its weight."""

    made_of: tuple[Tensor, Tensor] | None = None
    """The gradient of its outputs, and its inputs, both as rows."""


class _LateWeight(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: _DeferredGradient) -> Tensor:
        ctx.late = late
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        made_of, ctx.late.made_of = ctx.late.made_of, None
        if made_of is None:
            return gradient, None
        gradient_of_output, x = made_of
        product = gradient_of_output.t() @ x
        if any(gradient.stride()):  # for a second gradient, the product's state is not enough
            product += gradient
        return product, None


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late: _DeferredGradient) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.late, ctx.has_bias = late, bias is not None
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        flat, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        bias = flat.sum(0) if ctx.has_bias else None
        of_input = gradient @ weight
        if torch.is_grad_enabled():
            return of_input, flat.t() @ rows, bias, None
        ctx.late.made_of = (flat, rows)
        return of_input, weight.new_zeros(()).expand(weight.shape), bias, None
