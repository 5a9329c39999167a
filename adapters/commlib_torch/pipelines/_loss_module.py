"""Loss module: the parameters of a loss belong to the last stage; others that it uses are found and refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch._autograd import backward_passes
from commlib_torch._graph_breaks import unwrap_compiled

NAME = "loss"
"""Prefix of its parameters and buffers: `loss.temperature`."""


def loss_module(loss: Any, parts: Sequence[nn.Module]) -> nn.Module | None:
    """Return the loss, or the module of a loss that is a method, if it has parameters that the stages do not have."""
    while isinstance(loss, partial):
        loss = loss.func
    is_method = hasattr(loss, "__self__")
    owner = loss.__self__ if is_method else unwrap_compiled(loss)
    if not isinstance(owner, nn.Module):
        return None
    own = {id(parameter) for parameter in owner.parameters()}
    of_stages = {id(parameter) for part in parts for parameter in part.parameters()}
    if not own - of_stages or (is_method and own & of_stages):  # a method of the model
        return None
    if conflict := next((name for part in parts for name in part.state_dict() if name.startswith(f"{NAME}.")), None):
        raise UsageError(
            f"pipeline: the loss has parameters, whose names would begin with {NAME!r}, like {conflict} of the model: "
            "rename that layer"
        )
    return owner


class UsedParameters:
    """Checks once which parameters a stage of this rank uses, for its outputs or for the loss.

    stage: its number. own: returns the parameters that this rank trains. others: the parameters of all
    stages of the model, by name.
    """

    def __init__(
        self, stage: int, own: Callable[[], Iterable[Tensor]], others: Mapping[str, Tensor], rank: int
    ) -> None:
        self._stage, self._own, self._rank = stage, own, rank
        # Ranks without weights of others need not keep them; an id alone may later belong to another tensor.
        self._others = {id(tensor): (name, ref(tensor)) for name, tensor in others.items()}

    def check(
        self,
        inputs: Sequence[Tensor],
        *,
        x: Sequence[Tensor],
        given: Sequence[Tensor],
        y: Sequence[Tensor],
        loss: Sequence[Tensor],
    ) -> None:
        """Check the outputs of a stage for given inputs, its loss if it has one, and the graphs behind x and y.

        Warns of parameters that no rank trains, and whose gradients are not reduced. Raises UsageError for parameters
        of another rank.
        """
        known = {id(tensor) for tensor in (*self._own(), *inputs)}
        layer = f"a layer of stage {self._stage} uses"
        for roots, use, how in (
            (x, "x was computed of", "let the model compute it from the source of x"),
            (given, layer, "make it a parameter of the layer"),
            (y, "y was computed of", "let the loss compute it from the source of y, as an nn.Module that has it"),
            (loss, "the loss uses", "pass loss= as an nn.Module that has it"),
        ):
            for leaf in _leaves(roots):
                if id(leaf) in known:
                    continue
                if name := self._name_of(leaf):
                    self._refuse(name, use, is_layer=use == layer)
                if isinstance(leaf, nn.Parameter) and not any(leaf in member for member in backward_passes.members):
                    warnings.warn(
                        f"commlib: {use} a parameter of shape {tuple(leaf.shape)} that is not in pipe.parameters(): "
                        f"its gradient is on rank {self._rank} only. To train and save it with the model, {how}",
                        stacklevel=2,
                    )
                    return

    def _refuse(self, name: str, use: str, *, is_layer: bool) -> None:
        """Raise UsageError: a stage or the loss uses a weight of the model that another rank has."""
        if is_layer:
            raise UsageError(
                f"pipeline: {use} {name}, which stages on other ranks have, but does not have it as a parameter: its "
                f"copy on rank {self._rank} would not be trained. Make it a parameter or a submodule of the layer "
                "(then stages share it), or use split= to put both into one stage"
            )
        raise UsageError(
            f"pipeline: {use} {name}, which stages on other ranks have, so its copy on rank {self._rank} would not "
            "change: let the model compute the value, or pass loss= as an nn.Module that has it as a parameter"
        )

    def _name_of(self, leaf: Tensor) -> str:
        """Return the name of a weight of the model; "" for other tensors."""
        name, weight = self._others.get(id(leaf), ("", lambda: None))
        return name if weight() is leaf else ""


def _leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves to which a backward of some tensors would give gradients."""
    leaves: list[Tensor] = []
    todo: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [after for after, _ in node.next_functions]
    return leaves
