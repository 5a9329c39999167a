"""Selective recomputation: keep the results of products between forward and backward, and compute the rest again.

As `torch.utils.checkpoint.create_selective_checkpoint_contexts` does, which refuses results that the forward changes in
place, as recurrent layers and activations do. Here these are copied before they are changed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")
)


class _Kept:
    """A result, apart from autograd, and how often it had been changed when it was kept."""

    __slots__ = ("value", "version")

    def __init__(self, result: Tensor) -> None:
        # Below autograd: what is made of it there shares its count of changes only if it is asked to.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.value = result.detach()
        self.version = self.value._version

    def own(self) -> None:
        """Keep a copy: what is kept now is about to be changed."""
        self.value = self.value.clone()
        self.version = self.value._version


class _Keeping(TorchDispatchMode):
    """Keeps the results of products, by the order of these."""

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._by_memory = kept, dict[int, list[_Kept]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and self._by_memory:
            self._own_changed(func._schema.arguments, args, kwargs)
        out = func(*args, **kwargs)
        if func in _PRODUCTS:
            self._kept.append(pytree.tree_map_only(Tensor, self._keep, out))
        return out

    def _keep(self, result: Tensor) -> _Kept:
        kept = _Kept(result)
        self._by_memory.setdefault(_memory(result), []).append(kept)
        return kept

    def _own_changed(self, expected: Any, args: Any, kwargs: Any) -> None:
        given = [
            *zip(expected, args, strict=False),
            *((one, kwargs[one.name]) for one in expected if one.name in kwargs),
        ]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        for kept in self._by_memory.pop(_memory(tensor), ()):
                            kept.own()


class _Giving(TorchDispatchMode):
    """Gives the results that were kept instead of computing them again."""

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS or not self._kept:
            return func(*args, **(kwargs or {}))
        return pytree.tree_map_only(_Kept, _given, self._kept.popleft())


def _given(kept: _Kept) -> Tensor:
    if kept.value._version != kept.version:
        raise RuntimeError(
            "a result that checkpoint='selective' has kept was changed in place after its stage: by the loss, or by a "
            "hook; use an operation that makes a new tensor, or another checkpoint="
        )
    return kept.value


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return what a forward runs in, and in what it is computed again: for `checkpoint(context_fn=)`."""
    kept: deque[Any] = deque()
    return _Keeping(kept), _Giving(kept)
