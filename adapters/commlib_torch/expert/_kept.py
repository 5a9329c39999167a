"""Tensors, arrays and numbers that modules keep beside weights and buffers, in attributes: ranks must have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.expert.kept import Search, Told, of_classes, to_take, told_numbers
from commlib_torch._bridge import dtype_name
from commlib_torch._copies import OF_MODULES
from commlib_torch._shards import shard_of
from commlib_torch.tensor._values import values_of_rank_0


def kept_of(modules: Iterable[tuple[str, nn.Module]], model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield what modules of a model keep, each value once: the module's name, where it stands in it, and the value."""
    known = [*model.modules(), *model.parameters(), *model.buffers()]
    search = Search(_is_array, known, lambda value: _of_another(value) if isinstance(value, nn.Module) else None)
    for name, module in modules:
        for where, value in search.kept({**_attributes(module), **of_classes(module)}):
            yield name, where, value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES}


def _of_another(module: nn.Module) -> Mapping[str, Any]:
    """Return what a module has that is none of the model."""
    return {**module._parameters, **module._buffers, **module._modules, **_attributes(module), **of_classes(module)}


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def told_of(value: Any) -> Told:
    """Return what ranks compare of a value."""
    if isinstance(value, np.ndarray):
        kind, takes = f"array {value.dtype}{list(value.shape)}", value.flags.writeable and value.dtype.kind in "biufc"
        return Told(kind, _digest(value.tobytes() if value.dtype.kind != "O" else repr(value).encode()), takes)
    if not isinstance(value, Tensor):
        return told_numbers(value)
    kind = f"tensor {dtype_name(value.dtype)}{list(value.shape)}"
    if value.is_meta or shard_of(value) is not None:
        return Told(kind, "")
    if value.is_quantized or value.is_nested:
        return Told(kind, _digest(repr(value).encode()))
    dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return Told(kind, _digest(flat.view(torch.uint8).numpy().tobytes()), _takes_values(value))


def _takes_values(tensor: Tensor) -> bool:
    """Return whether a tensor can be written in place: one that is computed of others is made anew."""
    is_leaf = tensor.grad_fn is None and not tensor.is_inference()
    return is_leaf and tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) != 1


def _digest(values: bytes) -> str:
    return hashlib.sha256(values).hexdigest()[:16]


@contextmanager
def kept_of_rank_0(model: nn.Module, without: Iterable[nn.Module], comm: Communicator) -> Iterator[None]:
    """Give tensors and arrays that modules of a model keep the values of rank 0, and their own again if it raises.

    without: modules that are not looked at. Rank 0 warns of what differs and is neither. Collective.
    """
    left = set(without)
    modules = [(name, module) for name, module in model.named_modules() if module not in left]
    found = {
        f"module {name}: {where}" if name else f"the model: {where}": value
        for name, where, value in kept_of(modules, model)
    }
    taken = to_take(comm, "expertize", {where: told_of(value) for where, value in found.items()})
    tensors = [one if isinstance(one := found[where], Tensor) else torch.from_numpy(one) for where in taken]
    with values_of_rank_0(tensors, comm):
        yield
