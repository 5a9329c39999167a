"""Selective recomputation: save the results of products for the backward, and recompute the rest.

Like `torch.utils.checkpoint.create_selective_checkpoint_contexts`, which refuses results that the forward changes in
place, as recurrent layers and activations do. Here these are copied before the change.
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


class _SavedResult:
    """A detached result, and its version counter when it was saved."""

    __slots__ = ("value", "version")

    def __init__(self, result: Tensor) -> None:
        # Below autograd: tensors made from it share its version counter only on request.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.value = result.detach()
        self.version = self.value._version

    def own(self) -> None:
        """Copy the result: its memory is about to change."""
        self.value = self.value.clone()
        self.version = self.value._version


class _SaveProducts(TorchDispatchMode):
    """Saves the results of products, in order."""

    def __init__(self, saved: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved, self._by_memory = saved, dict[int, list[_SavedResult]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and self._by_memory:
            self._own_changed(func._schema.arguments, args, kwargs)
        out = func(*args, **kwargs)
        if func in _PRODUCTS:
            self._saved.append(pytree.tree_map_only(Tensor, self._keep, out))
        return out

    def _keep(self, result: Tensor) -> _SavedResult:
        saved = _SavedResult(result)
        self._by_memory.setdefault(_memory(result), []).append(saved)
        return saved

    def _own_changed(self, expected: Any, args: Any, kwargs: Any) -> None:
        given = [
            *zip(expected, args, strict=False),
            *((one, kwargs[one.name]) for one in expected if one.name in kwargs),
        ]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        for saved in self._by_memory.pop(_memory(tensor), ()):
                            saved.own()


class _ReplayProducts(TorchDispatchMode):
    """Returns the saved results in order instead of computing products."""

    def __init__(self, saved: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS or not self._saved:
            return func(*args, **(kwargs or {}))
        return pytree.tree_map_only(_SavedResult, _take_result, self._saved.popleft())


def _take_result(saved: _SavedResult) -> Tensor:
    if saved.value._version != saved.version:
        raise RuntimeError(
            "a result that checkpoint='selective' saved was changed in place after its stage: by the loss, or by a "
            "hook; use an operation that makes a new tensor, or another checkpoint="
        )
    return saved.value


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a forward and of its recomputation, for `checkpoint(context_fn=)`."""
    saved: deque[Any] = deque()
    return _SaveProducts(saved), _ReplayProducts(saved)
