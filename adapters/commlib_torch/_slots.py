"""Gradients brought into their slots in the buckets, and results taken out of them.

A slot that is of a gradient's own dtype and device becomes the gradient: `parameter.grad` is a view of it, which is
reduced in place. Another slot has a copy, and the result is copied back.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from commlib.data_parallel import Engine
from commlib_torch._bridge import to_tensor


class Slots:
    """The slots of `parameters`, as tensors of their shapes. Gradients are divided by `predivide` on their way in."""

    def __init__(self, parameters: Sequence[Tensor], predivide: float) -> None:
        self._parameters, self._predivide = parameters, predivide
        self._kept: dict[int, Tensor] = {}
        """Gradients whose copies are in their slots."""

    def use(self, engine: Engine, aside: Container[int]) -> None:
        """Take the slots of `engine`, but none for parameters that go `aside`.

        Gradients that are views of other slots stay valid, and move when they are reduced next.
        """
        self._engine = engine
        numbers = range(len(self._parameters))
        self._views = [None if number in aside else self._view(number) for number in numbers]
        self._in_place = [
            view is not None and view.dtype == parameter.dtype and view.device == parameter.device
            for view, parameter in zip(self._views, self._parameters, strict=True)
        ]

    def put(self, index: int, grad: Tensor) -> None:
        """Bring a parameter's gradient to where it is reduced from."""
        view, parameter = self._views[index], self._parameters[index]
        assert view is not None, "it goes aside"
        if grad is not view:
            if grad.layout != torch.strided:
                grad = parameter.grad = grad.detach().to_dense()
            if not self._in_place[index]:
                self._kept[index] = grad.detach()
                view.copy_(grad.detach() / self._predivide if self._predivide != 1 else grad.detach())
                return
            # Autograd made a new tensor: zero_grad() dropped the view, or somebody put another one in its place.
            if _is_plain(grad) and grad.dtype == view.dtype:
                self._engine.write(index, grad.data_ptr())
            else:
                view.copy_(grad.detach())
            parameter.grad = view
        if self._predivide != 1:
            view.div_(self._predivide)

    def take(self, index: int) -> None:
        """Make what was reduced the gradient of a parameter."""
        view, parameter = self._views[index], self._parameters[index]
        if view is None:
            return
        if self._in_place[index]:
            parameter.grad = grad = view
        else:
            grad = self._kept.get(index, parameter)
            if grad is parameter or not _is_plain(grad):
                grad = torch.empty_like(parameter)
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
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None and parameter.grad is view:
                parameter.grad = view.clone()

    def forget(self) -> None:
        """Drop the gradients whose copies were reduced."""
        self._kept.clear()

    def _view(self, index: int) -> Tensor:
        parameter, flat = self._parameters[index], to_tensor(self._engine.slot(index))
        if parameter.is_complex():
            return torch.view_as_complex(flat.view(*parameter.shape, 2))
        return flat.view(parameter.shape)


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether the bytes behind `tensor` are its elements, in order."""
    return type(tensor) is Tensor and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
