"""Ordered verbs that autograd records: see `commlib.tensor_verbs.gradients` for the backward of each.

PyTorch runs the ready nodes of a graph in the reverse order of their creation, and a node is ready once the nodes that
use its results have run, which were created later. So one device's backward runs the verbs in the reverse order of
their calls, whatever else is in the graph: the same order on all ranks. Nodes of different devices run in different
threads: a graph with verbs on the host and on a GPU has no such order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from commlib.errors import UsageError
from commlib.tensor_verbs import (
    RECEIVED,
    WITH_GRADIENT,
    OrderedVerbs,
    TensorCall,
    TensorWork,
    VerbGradients,
    VerbMaker,
    WritingVerbs,
)
from commlib_torch._call import BRIDGE, OutputTensor
from commlib_torch._function_transforms import explain

ordered = OrderedVerbs(BRIDGE)
writing = WritingVerbs(BRIDGE, OutputTensor)

_WAY_OUT = "pass tensor.detach(), or call it within torch.no_grad()"


def run(call: Any, label: str = "") -> Any:
    """Run a call and wait. Autograd records an ordered verb on a tensor that requires a gradient.

    label: of an ordered verb, see `Communicator.labelled`.
    """
    if type(call) is not TensorCall:
        return call.run()
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(call)
    for tensor in call.operands:
        if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
            return _record(call, label or WITH_GRADIENT)
    return call.run(label) if label else call.run()


def start(call: Any) -> TensorWork[Any]:
    """Start a call. Raises UsageError for an ordered verb on a tensor that requires a gradient."""
    if type(call) is TensorCall:
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(call)
        for tensor in call.operands:
            if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
                raise GRADIENTS.refuse_async(call)
    work: TensorWork[Any] = call.start()
    return work


def ordered_verb_maker(module: str) -> VerbMaker:
    """Return a factory for the verbs of a module, some of them ordered."""
    return VerbMaker(module, "Tensor", run, start)


def _refuse_forward_mode(call: TensorCall[Any]) -> None:
    """Raise UsageError for a tensor with a tangent, which the result would lose."""
    for tensor in call.inputs:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UsageError(
                f"{call.comm.name}: {call.verb}, rank {call.comm.rank}: verbs do not support forward-mode "
                "differentiation: use torch.autograd.grad, or pass the primal, torch.autograd.forward_ad.unpack_dual"
                "(tensor).primal"
            )


def _record(call: TensorCall[Any], label: str) -> Any:
    GRADIENTS.check(call)
    tensor = call.operands[0]
    written = call.result.tensor if isinstance(call.result, OutputTensor) else None
    if written is not None:
        _check_written(call, written)
    # If the written tensor is a view, autograd takes the first tensor for that view, and drops its gradient.
    first, second = (tensor, written) if written is None or written is tensor else (written, tensor)
    try:
        return _RecordedVerb.apply(call, label, first, second)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise explain(error, "ordered verbs on tensors that require a gradient") from error


def _check_written(call: TensorCall[Any], written: Tensor) -> None:
    """Raise UsageError, before anything is sent, for a tensor that must not be overwritten."""
    if not written.requires_grad:
        return
    place = f"{call.comm.name}: {call.verb} in place, rank {call.comm.rank}"
    if call.verb == "send_recv":
        raise UsageError(f"{place}: the tensor that is received into requires a gradient: {_WAY_OUT} for it")
    base = written._base if written._is_view() else written
    if base is not None and base.is_leaf and base.requires_grad:
        raise UsageError(
            f"{place}: the tensor is a leaf that requires a gradient, or a view of one, so it must not be overwritten: "
            f"call {call.verb} for a new tensor, or {_WAY_OUT}"
        )


GRADIENTS: VerbGradients[Tensor] = VerbGradients(BRIDGE, writing.send_recv, run, _WAY_OUT)


class _TensorForm:
    """See `InputForm`."""

    __slots__ = ("_device", "_dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    @property
    def length(self) -> int | None:
        return self.shape[0] if self.shape else None

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self._dtype, device=self._device)

    def rows(self) -> Tensor:
        return torch.tensor(self.shape[:1])


class _RecordedVerb(Function):
    @staticmethod
    def forward(ctx: Any, call: TensorCall[Any], label: str, first: Tensor, second: Tensor | None) -> Any:
        ctx.is_second = second is not first and second is call.operands[0]  # the order of `_record`
        tensor: Any = second if ctx.is_second else first
        written = first if ctx.is_second else second
        ctx.form = _TensorForm(tensor)
        answer = call.run(label)
        received = answer[1] if call.result is RECEIVED else None
        if received is not None:
            ctx.mark_non_differentiable(received)
        if written is not None:
            ctx.mark_dirty(written)
        ctx.verb = GRADIENTS.record(call, label, received)
        return answer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        derivative = GRADIENTS.gradient(ctx.verb, ctx.form, gradient).reshape(ctx.form.shape)
        return (None, None, None, derivative) if ctx.is_second else (None, None, derivative, None)
