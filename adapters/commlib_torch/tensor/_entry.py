"""The way into layers that divide their outputs: one copy, or gather, of an input for all layers that take it.

Q, K and V are often three layers with one input. Its gradient is the sum over them, and over the ranks: they share the
move into the divided part, so that there is one reduction of the sum. Where overlapping pays, that is begun as soon as
the sum is known and runs beside products for the gradients of weights:

    forward      x -> finish -> start -> product with a late weight
    backward     product: gradient of its input -> start: begins to reduce it -> late: gradient of the weight
                 -> finish: waits for the reduction

Autograd runs, of what it could run, what was made last in the forward. If it did not, less would overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from commlib.sharding.axis import Axis
from commlib.tensor_parallel.moves import COPY, Move, gather
from commlib.tensor_parallel.run.moves import run, start
from commlib_torch._bridge import array_of, packed, to_tensor
from commlib_torch._uncompiled import uncompiled
from commlib_torch.devices import device_of
from commlib_torch.tensor._alike import note_given, takes_notes
from commlib_torch.tensor.moves import explained, moved


class Entered(NamedTuple):
    """The last input that was moved, and what became of it. It is forgotten with that input, or what comes after it.

    Whether an input has changed is not always known: arrays of numpy may be over its memory. So it is taken for the
    same one by layers that are called one after another: none of them has had it yet, and nothing was added up over the
    axis meanwhile.
    """

    source: weakref.ref[Tensor]
    version: int
    move: Move
    records: bool
    result: Tensor
    weights: list[int]
    """Those of layers that have had it, by id."""

    def holds(self, x: Tensor, move: Move, weight: Tensor) -> bool:
        return (
            self.source() is x
            and self.version == x._version
            and self.move == move
            and self.records == _records(x)
            and id(weight) not in self.weights
        )


@uncompiled
def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: int | None, layer: Any = None
) -> Tensor:
    """Return x @ weight.T + bias for a weight that is divided along its outputs, and an input that is whole.

    sequence: the dimension along which the input is divided instead, and gathered first. layer: whose product it is.
    """
    if layer is not None and takes_notes(axis):
        note_given(layer, x, sequence=sequence)
    move = COPY if sequence is None else gather(sequence, partial=True)
    if axis.size == 1:
        return torch.nn.functional.linear(x, weight, bias)
    overlaps = axis.overlaps and device_of(x) is None  # products on a GPU run on while the host waits
    if not (overlaps and torch.is_grad_enabled() and weight.requires_grad and x.requires_grad):
        return torch.nn.functional.linear(entered(x, axis, move, moved, weight), weight, bias)
    late = _Late()
    try:  # made before `start`, so that it runs after that
        late_weight: Tensor = _LateWeight.apply(weight, late)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise explained(error) from error
    inside = entered(x, axis, move, _overlapping, weight)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        inside, late_weight = inside.to(dtype), late_weight.to(dtype)
        return torch.nn.functional.linear(inside, late_weight, bias)
    found: Tensor = _Product.apply(inside, late_weight, bias, late)  # type: ignore[no-untyped-call]
    return found


@uncompiled
def entered(x: Tensor, axis: Axis, move: Move, make: Callable[[Tensor, Axis, Move], Tensor], weight: Tensor) -> Tensor:
    """Return the moved input; the same one for layers that are called with the same input one after another.

    weight: of the layer.
    """
    if x.is_inference():  # has no version: whether it has changed is not known
        return make(x, axis, move)
    last: Entered | None = axis.entered
    if last is not None and last.holds(x, move, weight):
        last.weights.append(id(weight))
        return last.result
    result = make(x, axis, move)
    if result is x:  # nothing to share; and it would keep itself
        return result

    def forget(reference: weakref.ref[Tensor]) -> None:
        if axis.entered is not None and axis.entered.source is reference:
            axis.entered = None

    axis.entered = Entered(weakref.ref(x, forget), x._version, move, _records(x), result, [id(weight)])
    return result


def _records(x: Tensor) -> bool:
    """Return whether what is computed of `x` has a gradient."""
    return torch.is_grad_enabled() and x.requires_grad


def _overlapping(x: Tensor, axis: Axis, move: Move) -> Tensor:
    box = _Box()
    outside = _Finish.apply(x, box)  # type: ignore[no-untyped-call]
    found: Tensor = _Start.apply(outside, axis, move, box)  # type: ignore[no-untyped-call]
    return found


class _Box:
    """What `start` leaves for `finish`."""

    wait: Callable[[], Any] | None = None


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, move: Move, box: _Box) -> Tensor:
        ctx.axis, ctx.move, ctx.box, ctx.shape = axis, move, box, x.shape
        if move is COPY:
            return x.detach()
        result, ctx.move = run(axis, move, array_of(packed(x)))
        return to_tensor(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = ctx.move.conjugate
        if torch.is_grad_enabled():  # a gradient of this gradient may be asked for
            return moved(gradient, ctx.axis, back), None, None, None
        ctx.box.wait = start(ctx.axis, back, array_of(packed(gradient)))
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


class _Late:
    """What a product leaves for the gradient of its weight."""

    made_of: tuple[Tensor, Tensor] | None = None
    """The gradient of its outputs, and its inputs, both as rows."""


class _LateWeight(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: _Late) -> Tensor:
        ctx.late = late
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        made_of, ctx.late.made_of = ctx.late.made_of, None
        if made_of is None:
            return gradient, None
        gradient_of_output, x = made_of
        product = gradient_of_output.t() @ x
        if any(gradient.stride()):  # not only what the product left: it has a second gradient, too
            product += gradient
        return product, None


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late: _Late) -> Tensor:
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
