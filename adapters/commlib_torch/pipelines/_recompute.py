"""Recompute: call a stage, or single layers of it, so that a backward computes again what is not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from commlib.pipeline.recompute import Checkpoint, Recompute, recompute_of
from commlib_torch.pipelines import _selective as selective
from commlib_torch.pipelines._parts import Named

_CHECKPOINTS = {
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=selective.contexts),
}


def recompute_in(model: nn.Module | Sequence[nn.Module], how: Checkpoint) -> Recompute:
    """Return what is computed again of a model, or of a list of layers; a shared layer under each of its names.

    Raises UsageError as `recompute_of` does.
    """
    layers = [("", model)] if isinstance(model, nn.Module) else [(str(n), layer) for n, layer in enumerate(model)]
    named = [
        (name, module)
        for prefix, layer in layers
        for name, module in layer.named_modules(prefix=prefix, remove_duplicate=False)
        if name
    ]
    found = recompute_of(how, named)
    if isinstance(found, str):
        return found
    words = {id(module): found[name] for name, module in reversed(named) if name in found}
    return {name: words[id(module)] for name, module in named if id(module) in words}


def recomputed(part: nn.Module, how: Recompute) -> list[nn.Module]:
    """Return what is computed again of a part: itself, or layers of it."""
    if isinstance(how, str):
        return [] if how == "none" else [part]
    return [module for name, module in part.named_modules() if name in how]


def recomputing(call: Callable[[Named], Named], part: nn.Module, how: Recompute) -> Callable[[Named], Named]:
    """Return what calls a part by `call`, and keeps of its activations, or of those of its layers, what it says."""
    if not recomputed(part, how):
        return call
    return partial(_CHECKPOINTS[how], call) if isinstance(how, str) else _Layers(part, how).within(call)


class _Layers:
    """Layers of a stage, each of which is computed again as a whole: what is within one is part of it.

    Their forwards are others only while the stage's runs, so nothing else sees it: names, states, hooks, copies.
    """

    def __init__(self, part: nn.Module, how: Mapping[str, str]) -> None:
        self._layers = [
            (module, _Layer(self, _CHECKPOINTS[how[name]])) for name, module in part.named_modules() if name in how
        ]
        self.is_within = False
        """Whether one of them computes."""

    def within(self, call: Callable[[Named], Named]) -> Callable[[Named], Named]:
        """Return what calls it with these forwards."""

        def called(named: Named) -> Named:
            with self._forwards():
                return call(named)

        return called

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module, layer in self._layers:
                # One that is compiled calls what was compiled instead of its forward.
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


class _Layer:
    """What calls a layer's forward, and calls it again in the backward."""

    def __init__(self, layers: _Layers, checkpointed: Callable[..., Any]) -> None:
        self._layers, self._checkpointed = layers, checkpointed
        self._changes_inputs: bool | None = None
        """Whether it works in place on what it is given, of which it must have copies then; the first call tells."""

    def call(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the layer with what it is given; again, with copies of that, or with the same tensors."""
        if self._layers.is_within:
            return forward(*args, **options)
        leaves, spec = pytree.tree_flatten((args, options))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in places]
        for place in places:
            leaves[place] = None  # kept by autograd alone, which tells if somebody changes them
        copies = self._changes_inputs is not False
        first = [(args, options)]

        def compute(*kept: Tensor) -> Any:
            if first:
                given = first.pop()
            else:
                again = list(leaves)
                for place, tensor in zip(places, kept, strict=True):
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
