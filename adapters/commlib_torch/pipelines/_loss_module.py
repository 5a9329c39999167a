"""Loss module: the parameters of a loss are part of the last stage; others that it uses are found out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch._autograd import backward_passes
from commlib_torch._uncompiled import original

NAME = "loss"
"""Where its parameters and buffers are: `loss.temperature`."""


def loss_module(loss: Any, parts: Sequence[nn.Module]) -> nn.Module | None:
    """Return the module that a loss is, or of which it is a method, if it has parameters that the stages have not."""
    while isinstance(loss, partial):
        loss = loss.func
    is_method = hasattr(loss, "__self__")
    owner = loss.__self__ if is_method else original(loss)
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
    """Looks, once, which parameters a stage of this rank depends on, in what it passes on or in the loss.

    stage: its number. own: returns those that this rank trains. others: by name, those of all stages of the model.
    """

    def __init__(
        self, stage: int, own: Callable[[], Iterable[Tensor]], others: Mapping[str, Tensor], rank: int
    ) -> None:
        self._stage, self._own, self._rank = stage, own, rank
        # Whoever has no weight of theirs need not keep them; but an id alone may be another tensor's later.
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
        """Look at what a stage gives, computed of inputs, at its loss if it has one, and at what x and y came out of.

        Warns of parameters that nobody trains, nor reduces the gradients of. Raises UsageError for one that another
        rank has.
        """
        known = {id(tensor) for tensor in (*self._own(), *inputs)}
        layer = f"a layer of stage {self._stage} uses"
        for roots, who, how in (
            (x, "x was computed of", "let the model compute it of what x was computed of"),
            (given, layer, "let the layer have it"),
            (y, "y was computed of", "let the loss compute it of what y was computed of, as an nn.Module that has it"),
            (loss, "the loss uses", "give loss= as an nn.Module that has it"),
        ):
            for leaf in _leaves(roots):
                if id(leaf) in known:
                    continue
                if name := self._name_of(leaf):
                    self._refuse(name, who, is_layer=who == layer)
                if isinstance(leaf, nn.Parameter) and not any(leaf in member for member in backward_passes.members):
                    warnings.warn(
                        f"commlib: {who} a parameter of shape {tuple(leaf.shape)} that is none of pipe.parameters(): "
                        f"its gradient is on rank {self._rank} alone. To train and save it with the model, {how}",
                        stacklevel=2,
                    )
                    return

    def _refuse(self, name: str, who: str, *, is_layer: bool) -> None:
        """Raise UsageError: something depends on a weight of the model that another rank has."""
        if is_layer:
            raise UsageError(
                f"pipeline: {who} {name}, which stages on other ranks have, without having it as a parameter: its copy "
                f"on rank {self._rank} would not be trained. Let the layer have it as a parameter or a submodule (then "
                "stages share it), or let split= put both into one stage"
            )
        raise UsageError(
            f"pipeline: {who} {name}, which stages on other ranks have, so that its copy on rank {self._rank} would "
            "not change: let the model compute what is needed of it, or give loss= as an nn.Module that has it as a "
            "parameter"
        )

    def _name_of(self, leaf: Tensor) -> str:
        """Return the name of a weight of the model, "" if it is none."""
        name, weight = self._others.get(id(leaf), ("", lambda: None))
        return name if weight() is leaf else ""


def _leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that a backward of some others would give gradients to."""
    found: list[Tensor] = []
    todo: list[Any] = [root.grad_fn for root in roots]
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
