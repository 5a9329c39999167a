"""Recomputation: call a stage, or some of its layers, so that a backward recomputes activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from commlib.pipeline.recompute import Checkpoint, Recompute, recompute_of
from commlib_torch.pipelines import _selective_recompute as selective
from commlib_torch.pipelines._parts import Named

_CHECKPOINTS = {
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=selective.contexts),
}


def resolve_recompute(model: nn.Module | Sequence[nn.Module], how: Checkpoint) -> Recompute:
    """Return the recomputed layers of a model or a list of layers; a shared layer under each of its names.

    Raises UsageError as `recompute_of` does.
    """
    layers = [("", model)] if isinstance(model, nn.Module) else [(str(n), layer) for n, layer in enumerate(model)]
    named = [
        (name, module)
        for prefix, layer in layers
        for name, module in layer.named_modules(prefix=prefix, remove_duplicate=False)
        if name
    ]
    result = recompute_of(how, named)
    if isinstance(result, str):
        return result
    words = {id(module): result[name] for name, module in reversed(named) if name in result}
    return {name: words[id(module)] for name, module in named if id(module) in words}


def modules_to_recompute(part: nn.Module, how: Recompute) -> list[nn.Module]:
    """Return the recomputed modules of a stage: the stage, or layers of it."""
    if isinstance(how, str):
        return [] if how == "none" else [part]
    return [module for name, module in part.named_modules() if name in how]


def wrap_recompute(call: Callable[[Named], Named], part: nn.Module, how: Recompute) -> Callable[[Named], Named]:
    """Wrap the call of a stage: it saves and recomputes activations as requested."""
    if not modules_to_recompute(part, how):
        return call
    return partial(_CHECKPOINTS[how], call) if isinstance(how, str) else _RecomputedLayers(part, how).within(call)


class _RecomputedLayers:
    """Layers of a stage, each recomputed as a unit with its sublayers.

    Their forwards are replaced only while the stage's forward runs: names, states, hooks and copies do not change.
    """

    def __init__(self, part: nn.Module, how: Mapping[str, str]) -> None:
        self._layers = [
            (module, _RecomputedLayer(self, _CHECKPOINTS[how[name]]))
            for name, module in part.named_modules()
            if name in how
        ]
        self.is_within = False
        """Whether one of them is running."""

    def within(self, call: Callable[[Named], Named]) -> Callable[[Named], Named]:
        """Return a call of the stage that uses the replaced forwards."""

        def called(named: Named) -> Named:
            with self._forwards():
                return call(named)

        return called

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module, layer in self._layers:
                # A compiled layer calls its compiled code instead of its forward.
                name = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
                before.append((vars(module), name, vars(module).get(name)))
                vars(module)[name] = partial(layer.call, getattr(module, name))
            yield
        finally:
            for own, name, value in reversed(before):
                if value is None:
                    own.pop(name, None)
                else:
                    own[name] = value


class _RecomputedLayer:
    """Calls a layer's forward, and again in the backward."""

    def __init__(self, layers: _RecomputedLayers, checkpointed: Callable[..., Any]) -> None:
        self._layers, self._checkpointed = layers, checkpointed
        self._changes_inputs: bool | None = None
        """Whether it changes its inputs in place, so that it needs copies; the first call finds out."""

    def call(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the layer on its inputs; in recomputation on copies of them, or on the same tensors."""
        if self._layers.is_within:
            return forward(*args, **options)
        leaves, spec = pytree.tree_flatten((args, options))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in places]
        for place in places:
            leaves[place] = None  # saved by autograd, which detects changes
        copies = self._changes_inputs is not False
        first = [(args, options)]

        def compute(*saved: Tensor) -> Any:
            if first:
                given = first.pop()
            else:
                again = list(leaves)
                for place, tensor in zip(places, saved, strict=True):
                    again[place] = tensor.clone() if copies else tensor
                given = pytree.tree_unflatten(again, spec)
            self._layers.is_within = True
            try:
                return forward(*given[0], **given[1])
            finally:
                self._layers.is_within = False

        versions = [_version(tensor) for tensor in tensors]
        result = self._checkpointed(compute, *(map(_copy, tensors) if copies else tensors))
        if self._changes_inputs is None:
            self._changes_inputs = versions != [_version(tensor) for tensor in tensors]
        return result


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
