"""Gradients brought into their slots in the buckets, and results taken out of them.

A slot that is of a gradient's own dtype and device becomes the gradient: `parameter.grad` is a view of it, which is
reduced in place. Another slot has a copy, and the result is copied back.

A user may keep such a gradient over `zero_grad()`: itself, a part of it, or its numpy array. What has become of the
next gradient must not show there. Whatever shares a gradient's memory refers to the numpy array that it was made from,
so that array's reference count tells whether anybody still looks at a slot; where somebody does when it is to be
written, the whole bucket moves to other memory of this rank.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from sys import getrefcount

import numpy as np
import torch
from torch import Tensor

from commlib.data_parallel import Engine
from commlib_torch._bridge import Array, to_tensor


class Slots:
    """The slots of `parameters`, as tensors of their shapes. Gradients are divided by `predivide` on their way in."""

    def __init__(self, parameters: Sequence[Tensor], predivide: float) -> None:
        self._parameters, self._predivide = parameters, predivide
        self._becoming: dict[int, Tensor] = {}
        """What becomes `grad` once it is reduced."""
        self._copied: set[int] = set()
        """Parameters whose gradients were found kept: theirs have memory of their own from then on."""

    def use(self, engine: Engine, aside: Container[int]) -> None:
        """Take the slots of `engine`, but none for parameters that go `aside`.

        Gradients that are views of other slots stay valid, and move when they are reduced next.
        """
        self._engine = engine
        count = len(self._parameters)
        self._views: list[Tensor | None] = [None] * count
        self._in_place = [False] * count
        self._addresses = [0] * count
        self._lent: list[Array] = [np.empty(0) for _ in range(count)]
        """Slots as arrays. Nothing refers to these very objects but gradients that were made of them."""
        self._left: dict[int, list[Array]] = {}
        """Those in the symmetric memory of buckets that moved aside."""
        self._members = [
            [number for number in bucket.parameters if number < count and number not in aside]
            for bucket in engine.buckets
        ]
        for bucket in range(len(self._members)):
            self._see(bucket)

    def free(self) -> None:
        """See to it that nobody looks at slots that are about to be written. Nothing may be in flight, or put."""
        for bucket, arrays in list(self._left.items()):
            if not any(_are_kept(arrays)):
                del self._left[bucket]
                self._engine.move(bucket, aside=False)
                self._see(bucket)
        kept = _are_kept(self._lent)
        if not any(kept):
            return
        for bucket, members in enumerate(self._members):
            surprised = [number for number in members if kept[number] and not self._adds_up(number)]
            if surprised:
                self._copied.update(surprised)
                if not self._engine.is_aside(bucket):
                    self._left[bucket] = [self._lent[number] for number in members]
                self._engine.move(bucket, aside=True)
                self._see(bucket)

    def put(self, index: int, grad: Tensor) -> None:
        """Bring a parameter's gradient to where it is reduced from."""
        view, parameter = self._views[index], self._parameters[index]
        assert view is not None, "it goes aside"
        if grad.layout != torch.strided:
            grad = parameter.grad = grad.detach().to_dense()
        if not self._in_place[index]:
            self._becoming[index] = grad.detach()
            view.copy_(grad.detach() / self._predivide if self._predivide != 1 else grad.detach())
            return
        address, plain = grad.data_ptr(), _is_plain(grad)
        if address != self._addresses[index] or not plain:
            # Autograd made a new tensor: zero_grad() dropped the old one, or somebody put another one in its place.
            if plain and grad.dtype == view.dtype:
                self._engine.write(index, address)
            else:
                view.copy_(grad.detach())
            parameter.grad = grad = self._lend(index)
        self._becoming[index] = grad
        if self._predivide != 1:
            view.div_(self._predivide)

    def take(self, index: int) -> None:
        """Make what was reduced the gradient of a parameter."""
        view, parameter = self._views[index], self._parameters[index]
        if view is None:
            return
        grad = self._becoming.get(index)
        if self._in_place[index]:
            grad = self._lend(index) if grad is None else grad
        else:
            grad = torch.empty_like(parameter) if grad is None or not _is_plain(grad) else grad
            grad.copy_(view)
        parameter.grad = grad
        if self._predivide != 1:
            grad.mul_(self._predivide)

    def hide(self, indices: Iterable[int]) -> None:
        """Part gradients from slots that are in flight: whoever accumulates now, by mistake, must not do it there."""
        for index in indices:
            if self._views[index] is not None:
                self._parameters[index].grad = None

    def detach(self) -> None:
        """Give each gradient that lies in its slot memory of its own."""
        for parameter, address in zip(self._parameters, self._addresses, strict=True):
            if address and parameter.grad is not None and parameter.grad.data_ptr() == address:
                parameter.grad = parameter.grad.clone()

    def forget(self) -> None:
        """Drop what was to become gradients."""
        self._becoming.clear()

    def _see(self, bucket: int) -> None:
        """Find the slots of a bucket."""
        for number in self._members[bucket]:
            parameter = self._parameters[number]
            self._views[number] = view = self._view(number)
            self._addresses[number] = view.data_ptr()
            fits = view.dtype == parameter.dtype and view.device == parameter.device
            self._in_place[number] = fits and number not in self._copied
            if fits:
                self._lent[number] = _array(self._engine.slot(number), parameter)

    def _view(self, number: int) -> Tensor:
        parameter, flat = self._parameters[number], to_tensor(self._engine.slot(number).view())
        if parameter.is_complex():
            return torch.view_as_complex(flat.view(*parameter.shape, 2))
        return flat.view(parameter.shape)

    def _lend(self, number: int) -> Tensor:
        """Return a slot as a gradient, which keeps the array that was lent alive, as all do that share its memory."""
        tensor = torch.from_numpy(self._lent[number])
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor

    def _adds_up(self, number: int) -> bool:
        """Tell whether a gradient lies in its slot, and autograd adds to it there: who keeps it expects no other."""
        grad = self._parameters[number].grad
        # Where autograd builds a graph of gradients, it makes a new one instead.
        return grad is not None and grad.data_ptr() == self._addresses[number] and not torch.is_grad_enabled()


def _array(slot: Array, parameter: Tensor) -> Array:
    """Return a slot in the shape of its parameter, in a dtype that torch takes."""
    if parameter.dtype == torch.bfloat16:
        slot = slot.view(np.int16)
    elif parameter.is_complex():
        slot = slot.view(np.result_type(slot.dtype, np.complex64))
    return slot.reshape(parameter.shape)


(_ALONE,) = map(getrefcount, [np.empty(0)])  # versions of Python differ


def _are_kept(arrays: list[Array]) -> list[bool]:
    """Tell of each array whether a tensor that was made of it, or whatever shares its memory, still exists."""
    return [count > _ALONE for count in map(getrefcount, arrays)]


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether the bytes behind `tensor` are its elements, in order."""
    return type(tensor) is Tensor and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
