"""Bucket slots for gradients: moves gradients into the slots of a GradientReducer's buckets and back.

A slot with the dtype and the device of its gradient becomes the gradient: `parameter.grad` is a view of it, which is
reduced in place, on the host and on a GPU alike. Other slots hold a copy, and the result is copied back. A user may
keep a gradient across `zero_grad()`: the tensor, a view of it, or its numpy array; see `commlib.data_parallel.slots`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.slots import Slots
from commlib.devices.array import DeviceArray
from commlib.errors import UsageError
from commlib_torch import devices
from commlib_torch._bridge import Array, read, to_array, to_tensor

Named = tuple[str, Tensor]

_RESULT = "commlib_result"
"""Marks gradients whose reduction took place in other memory."""


class ParameterValues:
    """The `Values` of named parameters. `compressor` is a custom one, if the user passed one.

    Gradients are divided by `predivide` on their way into slots, and multiplied by it on their way back.
    """

    accumulates = True
    hint = (
        "Either the previous backward raised and was caught (then call zero_grad() before the next one, or "
        "synchronize() to use its gradients: the other ranks wait for this one), or the parameter is used in two "
        "segments of re-entrant checkpointing (then pass use_reentrant=False)"
    )

    def __init__(self, named: Sequence[Named], compressor: Any, predivide: float) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self._parameters]
        self._compressor, self._contexts, self._predivide = compressor, dict[int, Any](), predivide
        self._slots = Slots(len(named), self._fitting)
        self._becoming: dict[int, Tensor] = {}
        """The tensors that become `grad` after the reduction."""

    def use(self, engine: BucketReducer, members: Sequence[Sequence[int]]) -> None:
        """Use the slots of `engine`. Gradients in older slots stay valid, and move at their next reduction."""
        count = len(self._parameters)
        self._engine = engine
        self._views: list[Tensor | None] = [None] * count
        self._in_place = [False] * count
        self._addresses = [0] * count
        self._slots.use(engine, members)
        for bucket in members:
            for index in bucket:
                self._find(index)

    def free(self) -> None:
        """Ensure that no user tensor refers to slots that are about to be overwritten."""
        self._slots.free(self._find, self._adds_up)

    def exists(self, index: int) -> bool:
        """Return whether a parameter has a gradient."""
        return self._parameters[index].grad is not None

    def put(self, index: int) -> None:
        """Move a parameter's gradient into its slot."""
        view, parameter = self._views[index], self._parameters[index]
        assert view is not None, "it has a slot"
        grad = parameter.grad
        if grad is None:
            raise UsageError(f"{self._names[index]} has no gradient after accumulation: did a hook remove it?")
        if grad.requires_grad:
            _warn_of_graph()
        if grad.layout != torch.strided:
            grad = parameter.grad = grad.detach().to_dense()
        if not self._in_place[index]:
            if (grad.dtype, grad.device) != self._kinds[index]:
                self._refuse_kind(index, grad)
            self._becoming[index] = grad = grad.detach()
            view.copy_(_to_slot_format(view, grad / self._predivide if self._predivide != 1 else grad))
            return
        address, plain = grad.data_ptr(), _is_plain(grad)
        if address != self._addresses[index] or not plain:
            # Autograd made a new tensor: zero_grad() dropped the old one, or another tensor replaced it.
            if (grad.dtype, grad.device) != self._kinds[index]:
                self._refuse_kind(index, grad)
            if plain and grad.dtype == view.dtype:
                self._engine.write(index, address)
            else:
                view.copy_(grad.detach())
            parameter.grad = grad = self._lend(index)
        self._becoming[index] = grad
        if self._predivide != 1:
            view.div_(self._predivide)

    def take(self, index: int) -> None:
        """Make the reduced values the gradient of a parameter."""
        view, parameter = self._views[index], self._parameters[index]
        assert view is not None, "it has a slot"
        grad = self._becoming.get(index)
        if self._in_place[index]:
            grad = self._lend(index) if grad is None else grad
        else:
            grad = torch.empty_like(parameter) if grad is None or not _is_plain(grad) else grad
            _to_slot_format(view, grad).copy_(view)
            vars(grad)[_RESULT] = True
        parameter.grad = grad
        if self._predivide != 1:
            grad.mul_(self._predivide)

    def is_result(self, index: int) -> bool:
        """Return whether a gradient is a reduced one, as far as its memory shows, or missing."""
        grad = self._parameters[index].grad
        if grad is None or grad.layout != torch.strided:
            return True
        return grad.data_ptr() == self._addresses[index] or _RESULT in vars(grad)

    def forget(self) -> None:
        """Drop the tensors that were to become gradients."""
        self._becoming.clear()

    def hide(self, indices: Iterable[int]) -> None:
        """Detach gradients from slots that are in flight."""
        for index in indices:
            self._parameters[index].grad = None

    def detach(self) -> None:
        """Copy each gradient out of its slot."""
        for parameter, address in zip(self._parameters, self._addresses, strict=True):
            if address and parameter.grad is not None and parameter.grad.data_ptr() == address:
                parameter.grad = parameter.grad.clone()

    def scale(self, index: int, factor: float) -> None:
        """Multiply a gradient in place."""
        with torch.no_grad():
            _gradient(self._parameters[index]).mul_(factor)

    # Gradients outside the buckets

    def sparse_dimensions(self, index: int) -> int | None:
        """Return the number of sparse dimensions of a gradient; None if it is dense or missing."""
        grad = self._parameters[index].grad
        if grad is None or grad.layout == torch.strided:
            return None
        return grad.sparse_dim() if grad.layout == torch.sparse_coo else grad.dim()

    def make_sparse(self, index: int, dimensions: int = 1) -> None:
        """Convert a dense gradient to a sparse one with this number of sparse dimensions."""
        parameter = self._parameters[index]
        parameter.grad = _gradient(parameter).detach().to_sparse(dimensions)

    def make_dense(self, index: int) -> None:
        """Make a sparse gradient dense."""
        parameter = self._parameters[index]
        parameter.grad = _gradient(parameter).detach().to_dense()

    def rows(self, index: int, wire: str) -> tuple[Any, Any]:
        """Return (numbers of rows, their values as `wire`) of a sparse gradient, each row once."""
        return rows_of(self._names[index], _gradient(self._parameters[index]), wire)

    def take_rows(self, index: int, numbers: Any, rows: Any, divisor: int) -> None:
        """Make summed and divided rows the gradient."""
        parameter = self._parameters[index]
        parameter.grad = sparse_of(parameter, numbers, rows) / divisor

    def compress(self, index: int) -> Array:
        """Return the compressed gradient of a custom compressor; zeros are compressed if there is no gradient."""
        parameter = self._parameters[index]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        if parameter.grad is not None and parameter.grad.requires_grad:
            _warn_of_graph()
        tensor, self._contexts[index] = self._compressor.compress(gradient)
        # The result may be the gradient itself, which a failed operation must not change.
        return to_array((tensor.clone() if tensor is gradient else tensor.detach()).cpu().contiguous())

    def decompress(self, index: int, array: Array) -> None:
        """Decompress a reduced array with the custom compressor, and make it the gradient."""
        parameter = self._parameters[index]
        tensor = to_tensor(array).to(parameter.device)
        parameter.grad = self._compressor.decompress(tensor, self._contexts.pop(index))

    def _refuse_kind(self, index: int, grad: Tensor) -> None:
        """Raise UsageError: the gradient's dtype or device is not the parameter's at the time of wrapping."""
        dtype, device = self._kinds[index]
        raise UsageError(
            f"the gradient of {self._names[index]} is {grad.dtype} on {grad.device}, but the parameter was {dtype} on "
            f"{device} when it was wrapped: call .to(), .double() and similar methods before you wrap the model"
        )

    def _find(self, index: int) -> None:
        """Find the slot of a parameter."""
        parameter = self._parameters[index]
        flat = to_tensor(self._engine.slot(index)[:])  # a separate object: only references to lent memory are counted
        if parameter.is_complex():
            view = flat.view(*parameter.shape, 2)  # complex numbers are sent as pairs of real numbers
            if flat.dtype == parameter.real.dtype:
                view = torch.view_as_complex(view)
        else:
            view = flat.view(parameter.shape)
        self._views[index], self._addresses[index] = view, view.data_ptr()
        fits = view.dtype == parameter.dtype and view.device == parameter.device
        self._in_place[index] = fits and index not in self._slots.copied

    def _fitting(self, index: int, slot: Any) -> Any:
        """Return the memory of a slot to lend to its gradient; None if its dtype or device is not the parameter's.

        On the host it is the slot in the shape of the parameter, in a dtype that torch accepts.
        """
        parameter = self._parameters[index]
        tensor = to_tensor(slot[:])
        real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
        if tensor.dtype != real.dtype or tensor.device != parameter.device:
            return None
        if type(slot) is DeviceArray:
            return devices.lend(slot)
        array: Array = slot
        if parameter.dtype == torch.bfloat16:
            array = slot.view(np.int16)
        elif parameter.is_complex():
            array = slot.view(np.result_type(slot.dtype, np.complex64))
        return array.reshape(parameter.shape)

    def _lend(self, index: int) -> Tensor:
        lent, slot = self._slots.views[index], self._engine.slot(index)
        if type(slot) is DeviceArray:
            flat = devices.tensor_from(lent, slot)
            parameter = self._parameters[index]
            return flat.view(parameter.dtype).view(parameter.shape)
        tensor = torch.from_numpy(lent)
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor

    def _adds_up(self, index: int) -> bool:
        """Return whether autograd accumulates into the slot: a kept gradient is then expected to change."""
        grad = self._parameters[index].grad
        # If autograd builds a graph of gradients, it makes a new tensor instead.
        return grad is not None and grad.data_ptr() == self._addresses[index] and not torch.is_grad_enabled()


def _warn_of_graph() -> None:
    """Warn of a gradient that has an autograd graph: the reduced one has none."""
    warnings.warn(
        "backward(create_graph=True): gradients that are reduced over ranks have no graph, so a loss computed from "
        ".grad has no gradients: use torch.autograd.grad(loss, parameters, create_graph=True) for it, and call "
        "backward without create_graph",
        stacklevel=2,
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "it exists"
    return parameter.grad


def _to_slot_format(view: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in the format of its slot, as pairs of real numbers if needed: a view if it is contiguous."""
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() and not view.is_complex() else grad


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of `tensor` is contiguous and holds its elements in order."""
    return type(tensor) is Tensor and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def rows_of(name: str, gradient: Tensor, wire: str) -> tuple[Any, Any]:
    """Return (row indices, row values in the dtype `wire`) of a sparse gradient, each row once.

    They are arrays of the core, on the gradient's device.

    Raises UsageError for sparse gradients of other kinds than an embedding's.
    """
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise UsageError(
            f"the gradient of {name} has layout {gradient.layout} with {gradient.sparse_dim()} sparse dimensions; "
            "only rows, as of an embedding, are supported: pass sparse_as_dense=True"
        )
    gradient = gradient.coalesce()
    return read(gradient.indices()[0]), read(gradient.values().detach().to(getattr(torch, wire)))


def sparse_of(parameter: Tensor, numbers: Any, rows: Any) -> Tensor:
    """Return a sparse gradient of `parameter` from rows; rows with equal indices are summed."""
    values = to_tensor(rows).to(parameter.device, parameter.dtype)
    indices = to_tensor(numbers).to(parameter.device).unsqueeze(0)
    return torch.sparse_coo_tensor(indices, values, tuple(parameter.shape), check_invariants=True).coalesce()
