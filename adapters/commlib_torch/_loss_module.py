"""Loss module: the parameters of a loss are part of the last stage; others that it uses are found out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from commlib.errors import UsageError

NAME = "loss"
"""Where its parameters and buffers are: `loss.temperature`."""


def loss_module(loss: Any, parts: Sequence[nn.Module]) -> nn.Module | None:
    """Return the module that a loss is, or of which it is a method, if it has parameters that the stages have not."""
    while isinstance(loss, partial):
        loss = loss.func
    is_method = hasattr(loss, "__self__")
    owner = loss.__self__ if is_method else getattr(loss, "_orig_mod", loss)  # of a compiled one
    if not isinstance(owner, nn.Module):
        return None
    own = {id(parameter) for parameter in owner.parameters()}
    of_stages = {id(parameter) for part in parts for parameter in part.parameters()}
    if not own - of_stages or (is_method and own & of_stages):  # the model's own method
        return None
    if taken := next((name for part in parts for name in part.state_dict() if name.startswith(f"{NAME}.")), None):
        raise UsageError(
            f"pipeline: the loss has parameters, whose names would begin with {NAME!r}, as that of {taken} of the "
            "model does: call that layer something else"
        )
    return owner


class UsedParameters:
    """Looks, once, which parameters the loss of the last stage depends on.

    own: returns those that this rank trains. others: the names of those that any stage of the model has, by id.
    """

    def __init__(self, own: Callable[[], Iterable[Tensor]], others: Mapping[int, str], rank: int) -> None:
        self._own, self._others, self._rank = own, others, rank

    def check(self, loss: Tensor, inputs: Sequence[Tensor]) -> None:
        """Warn of parameters that nobody trains. Raises UsageError for one that another stage has."""
        known = {id(tensor) for tensor in (*self._own(), *inputs)}
        for leaf in _leaves(loss):
            if id(leaf) in known:
                continue
            if name := self._others.get(id(leaf)):
                raise UsageError(
                    f"pipeline: the loss uses {name}, which stages on other ranks have, so that its copy on rank "
                    f"{self._rank} would not change: let the model compute what the loss needs of it, or give loss= as "
                    "an nn.Module that has it as a parameter"
                )
            if isinstance(leaf, nn.Parameter):
                warnings.warn(
                    f"commlib: the loss or a layer of the last stage uses a parameter of shape {tuple(leaf.shape)} "
                    f"that is none of pipe.parameters(): its gradient is on rank {self._rank} alone. Give loss= as an "
                    "nn.Module that has it, and it is trained and saved with the model",
                    stacklevel=2,
                )
                return


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors that a backward of a loss would give gradients to."""
    found: list[Tensor] = []
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [after for after, _ in node.next_functions]
    return found
