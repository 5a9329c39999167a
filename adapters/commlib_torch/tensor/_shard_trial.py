"""Shard trials: find out whether a module with style Sequence needs values of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from commlib.dtypes import Array
from commlib.tensor_parallel import styles
from commlib.tensor_parallel.checks.position_checks import are_parts, refuse_move, try_positions
from commlib.tensor_parallel.equations import dimwise
from commlib.tensor_parallel.recording import replace_attribute
from commlib.tensor_parallel.styles import Style
from commlib_torch._bridge import host_array, to_device_of
from commlib_torch._trial_run import preserve_model
from commlib_torch.tensor import moves
from commlib_torch.tensor._guided_calls import replace_tensors


def try_on_shards(style: Style | None, module: nn.Module, args: Any, options: Any) -> dict[str, Any]:
    """Return the equation of a module with style Sequence that, by trial, needs values of other ranks; otherwise {}.

    For a module that cannot be tried, for example because it draws random numbers, the equation is unknown.
    """
    if not isinstance(style, styles.Sequence):
        return {}
    fields = _try_parts(module, args, options, style.dim)
    if fields is not None:
        return {"open_doubt": fields} if fields else {}
    given = next(one for one in tree_leaves((args, options)) if isinstance(one, Tensor))
    return {"equation": dimwise(tuple(given.shape), (style.dim % given.dim(),))}


def _try_parts(module: nn.Module, args: Any, options: Any, dim: int) -> str | None:
    """Return "" or the reason why a trial on parts along `dim` is undecided; None if the module needs other parts."""
    given = [one for one in tree_leaves((args, options)) if isinstance(one, Tensor)]
    rank = given[0].dim() if given else 0
    if not -rank <= dim < rank:
        return ""
    parts = are_parts([one.shape for one in given], dim % rank)

    def called(arrays: Sequence[Array]) -> list[Array]:
        new = [to_device_of(array.copy(), one) for array, one in zip(arrays, given, strict=True)]
        learned = [
            one.requires_grad_() for one, part in zip(new, parts, strict=True) if part and one.is_floating_point()
        ]
        quiet = _NoDropout(new[0].numel())
        with torch.enable_grad(), replace_attribute(moves, "redistribute", refuse_move), quiet:
            copies = {id(one): other.clone() for one, other in zip(given, new, strict=True)}  # it may write to them
            output = module.forward(*replace_tensors(tuple(args), copies), **replace_tensors(dict(options), copies))
            results = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
            ends = [one for one in results if one.requires_grad]
            begin = [torch.cos(3 * one.detach() + 1) for one in ends]
            gradients = torch.autograd.grad(ends, learned, begin, materialize_grads=True) if ends and learned else ()
        return [host_array(one.detach()) for one in (*results, *gradients)]

    def evaluated(arrays: Sequence[Array]) -> list[Array]:
        with _evaluating(module):
            return called(arrays)

    with preserve_model(module):
        return try_positions([called, evaluated], [host_array(one.detach()) for one in given], dim % rank)


class _NoDropout(TorchFunctionMode):
    """Disables dropout, which draws other random numbers on parts, and is correct there. least: number of elements."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS and isinstance(args[0] if args else None, Tensor) and args[0].numel() >= self._least:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


_DROPOUTS = {torch.dropout, torch.alpha_dropout, functional.dropout, functional.alpha_dropout}


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    trained = [one for one in module.modules() if one.training]
    try:
        for one in trained:
            one.training = False
        yield
    finally:
        for one in trained:
            one.training = True
