"""Attribute state: tensors, arrays and numbers in attributes of modules, which must be equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.expert.layer_values import (
    ValueDigest,
    ValueSearch,
    class_values,
    digest_array,
    digest_numbers,
    find_replaceable,
)
from commlib_torch._bridge import dtype_name
from commlib_torch._copies import OF_MODULES
from commlib_torch._shards import shard_of
from commlib_torch.tensor._values import values_of_rank_0


def attribute_state_of(modules: Iterable[tuple[str, nn.Module]], model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the attribute state of a model's modules, each value once: module name, attribute path, value."""
    known = [*model.modules(), *model.parameters(), *model.buffers()]
    search = ValueSearch(
        _is_array, known, lambda value: _foreign_attributes(value) if isinstance(value, nn.Module) else None
    )
    for name, module in modules:
        for where, value in search.find({**_attributes(module), **class_values(module)}):
            yield name, where, value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES}


def _foreign_attributes(module: nn.Module) -> Mapping[str, Any]:
    """Return the attributes of a module that do not belong to the model."""
    return {**module._parameters, **module._buffers, **module._modules, **_attributes(module), **class_values(module)}


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def fingerprint_of(value: Any) -> ValueDigest:
    """Return the fingerprint of a value for comparison among ranks."""
    if isinstance(value, np.ndarray):
        return digest_array(value)
    if not isinstance(value, Tensor):
        return digest_numbers(value)
    kind = f"tensor {dtype_name(value.dtype)}{list(value.shape)}"
    if value.is_meta or shard_of(value) is not None:
        return ValueDigest(kind, "")
    if value.is_quantized or value.is_nested:
        return ValueDigest(kind, _digest(repr(value).encode()))
    dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return ValueDigest(kind, _digest(flat.view(torch.uint8).numpy().tobytes()), _takes_values(value))


def _takes_values(tensor: Tensor) -> bool:
    """Return whether a tensor can be written in place: a computed one is computed again."""
    is_leaf = tensor.grad_fn is None and not tensor.is_inference()
    return is_leaf and tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) != 1


def _digest(values: bytes) -> str:
    return hashlib.sha256(values).hexdigest()[:16]


@contextmanager
def broadcast_attribute_state(model: nn.Module, without: Iterable[nn.Module], comm: Communicator) -> Iterator[None]:
    """Overwrite tensors and arrays in attributes with the values of rank 0; restore them if the caller's code raises.

    without: modules to skip. Rank 0 warns of other values that differ. Collective.
    """
    left = set(without)
    modules = [(name, module) for name, module in model.named_modules() if module not in left]
    state = {
        f"module {name}: {where}" if name else f"the model: {where}": value
        for name, where, value in attribute_state_of(modules, model)
    }
    replaceable = find_replaceable(comm, "expertize", {where: fingerprint_of(value) for where, value in state.items()})
    tensors = [one if isinstance(one := state[where], Tensor) else torch.from_numpy(one) for where in replaceable]
    with values_of_rank_0(tensors, comm):
        yield
