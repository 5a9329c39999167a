"""Comparison records: inputs and gradients of sharded layers, for `commlib.tensor_parallel.checks.axis_equality`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.axis_equality import AxisWatch, note_tensor, stride, whole_shape
from commlib_torch._bridge import dtype_name, host_array
from commlib_torch._function_transforms import explain
from commlib_torch._graph_breaks import disable_compile


def note_input(layer: Any, x: Any, what: str = "the input", sequence: int | None = None) -> None:
    """Record the input of a sharded layer in training: unsharded, or this rank's part along `sequence`.

    For a compiler, which would otherwise make one program per answer, records are always taken.
    """
    if torch.compiler.is_compiling() or takes_notes(layer.axis):
        _note_input(layer, x, what, sequence)


def takes_notes(axis: ParallelAxis) -> bool:
    """Return whether records are taken now; a cheap test for eager code, which runs it about ten times per step."""
    watch: AxisWatch | None = axis.watch
    return watch is not None and watch.takes


@disable_compile
def _note_input(layer: Any, x: Any, what: str, sequence: int | None) -> None:
    if takes_notes(layer.axis):
        note_eager_input(layer, x, what, sequence)


def note_eager_input(layer: Any, x: Any, what: str = "the input", sequence: int | None = None) -> None:
    """Do the work of `note_input` in eager code, if records are taken."""
    watch: AxisWatch = layer.axis.watch
    if not (torch.is_grad_enabled() and has_numbers(x)):
        return
    if sequence is None:
        _note(watch, what, layer, x)
        return
    first = x.narrow(sequence, 0, min(1, x.shape[sequence]))
    differs = bool(x.ne(first).any())
    _note(watch, f"its part of a sequence, {what}", layer, x, sequence, is_part=True, positions_differ=differs)


def note_returned(layer: Any, out: Tensor) -> None:
    """Record the gradient of a sharded layer's unsharded output, if records are taken, in training."""
    watch: AxisWatch = layer.axis.watch
    if not (torch.is_grad_enabled() and out.requires_grad and has_numbers(out)):
        return

    def note(gradient: Tensor) -> None:
        if watch.takes and has_numbers(gradient):
            _note(watch, "the gradient of the output", layer, gradient, is_gradient=True)

    out.register_hook(note)


def _note(watch: AxisWatch, what: str, layer: Any, x: Tensor, sequence: int | None = None, **kinds: bool) -> None:
    shape = whole_shape(x.shape, sequence)
    with torch.no_grad():
        try:
            x = x.detach()
        except RuntimeError as error:
            raise explain(error, "sharded layers") from error
        flat = x.resolve_neg().resolve_conj().reshape(-1)
        sample = flat[:: stride(flat.numel())] if flat.is_floating_point() or flat.is_complex() else flat
        sample = sample.float() if sample.dtype in (torch.bfloat16, torch.float16) else sample
        note = note_tensor(what, _name(layer), shape, dtype_name(x.dtype), host_array(sample), **kinds)
    watch.notes.append(note)


def has_numbers(x: Any) -> bool:
    """Return whether a tensor has values that can be read now."""
    if not isinstance(x, Tensor) or isinstance(x, fx.Proxy) or x.is_meta or x.layout != torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and type(x) in (Tensor, torch.nn.Parameter)


def _name(layer: Any) -> str:
    return getattr(layer, "layer_name", "") or type(layer).__name__
