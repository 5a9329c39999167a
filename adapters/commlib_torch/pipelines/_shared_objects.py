"""Shared objects: find Python objects shared by layers of stages on several ranks; each rank has a copy."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.pipeline.tied_weights import find_owners
from commlib_torch._copies import copy_of

_DEPTH = 4
"""The depth of the search: the attributes of a layer, their attributes, and so on."""

_OWN = frozenset(("commlib", __package__))
"""Packages whose objects are not state of a user's layers."""

_OF_MODULES = frozenset((*vars(nn.Module()), "_commlib"))
_IMMUTABLE = (
    nn.Parameter, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Communicator,
    str, bytes, int, float, complex, frozenset, np.generic, torch.dtype, torch.device, torch.Size,
    torch.Generator, random.Random, np.random.Generator, np.random.RandomState,  # random in any case
)  # fmt: skip


class SharedObjects:
    """Dicts, lists and other objects shared by layers on several ranks: writes do not reach other ranks.

    Layers with buffers that another layer refers to without having them as submodules are included.

    Sharing may be harmless, as with a configuration or a cache; so stages with shared objects are compared with the
    whole model, on copies that share nothing with those of other ranks. placement: the rank of each stage.
    """

    def __init__(self, parts: Sequence[nn.Module], placement: Sequence[int]) -> None:
        objects = [{id(value): (value, where) for value, where in _objects(part)} for part in parts]
        hidden = {key for own in objects for key in own}
        for own, part in zip(objects, parts, strict=True):  # buffers that another stage has by a hidden reference
            own |= {id(one): (one, name) for name, one in part.named_modules() if id(one) in hidden}
        shared = find_owners([[value for value, _ in own.values()] for own in objects], placement)
        self.exist = bool(shared)
        """Whether there are any."""
        self._placement = list(placement)
        self.hint = ""
        """The hint for a difference in the comparison."""
        if shared:
            value, ranks = shared[0]
            names = list(dict.fromkeys(own[id(value)][1] for own in objects if id(value) in own))
            self.hint = (
                f". {names[0]} and {names[-1]}, of layers on ranks {', '.join(map(str, ranks))}, are one "
                f"{type(value).__name__} in one process, but here each rank has a copy, and a layer's writes do not "
                "reach other ranks: let layers pass the values to the next one, or use split= to put them into one "
                "stage"
            )

    def copies(self, parts: Sequence[nn.Module]) -> list[nn.Module]:
        """Return copies of the stages; those of one rank share objects, those of different ranks share nothing."""
        copies: dict[int, nn.Module] = {}
        for rank in dict.fromkeys(self._placement):
            numbers = [number for number, at in enumerate(self._placement) if at == rank]
            copies.update(zip(numbers, copy_of([parts[number] for number in numbers]), strict=True))
        return [copies[number] for number in range(len(parts))]


def _objects(part: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the objects of a stage's layers, each with the place of its first occurrence."""
    seen: set[int] = set()
    for name, module in part.named_modules():
        for key, value in list(vars(module).items()):
            if key not in _OF_MODULES:
                for one in _contents_of(value, seen, _DEPTH):
                    yield one, f"{name}.{key}" if name else key


def _contents_of(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if value is None or isinstance(value, _IMMUTABLE) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):  # not a submodule; weights are checked elsewhere
        yield from (module for module in value.modules() if module._buffers)
        return
    if type(value).__module__.partition(".")[0] in _OWN:  # such as the dispatcher of layers with experts
        return
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, tuple | list | Set | deque):
        inner = list(value)
    elif not isinstance(value, Tensor | np.ndarray):
        inner = list(getattr(value, "__dict__", {}).values())
        if not hasattr(value, "__dict__"):
            return
    if not isinstance(value, tuple):
        yield value
    for one in inner:
        yield from _contents_of(one, seen, depth - 1)
