"""Named operations on tensors with gradients, which are named operations, too.

`commlib.autodiff` defines the operation and the factor of each gradient for both adapters. Tensors and names are used
unchanged. GPU tensors stay on the GPU (see `_on_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.horovod import Reduction
from commlib_tensorflow._device_calls import allocate_like, call_on_device, copy_array
from commlib_tensorflow._host_calls import Spec, gradient_name, is_recording, refuse_eager_forward_mode


def allreduce_tensors(tensors: Sequence[Any], how: Reduction) -> list[Any]:
    """Reduce tensors element by element. Backward reduces gradients in the same way."""

    def host(*arrays: Any) -> Sequence[Any]:
        outputs = [allocate_like(array) for array in arrays]
        core.start_allreduce(arrays, outputs, **how.options(), blocking=True).wait()
        return outputs

    def backward(xs: Sequence[Any], dys: Sequence[Any]) -> list[Any]:
        how.check_linear(f"allreduce with op={how.op.name.capitalize()}")
        return allreduce_tensors(dys, how.called(gradient_name(how.name)))

    return _differentiable(lambda xs: call_on_device(host, xs, [Spec.like(x) for x in xs]), backward, tensors)


def allgather_tensors(tensors: Sequence[Any], name: str | None, group: Any) -> list[Any]:
    """Concatenate tensors along dimension 0. Backward takes this rank's rows of the mean of the gradients."""

    def host(*arrays: Any) -> Sequence[Any]:
        return list(core.start_allgather(arrays, name, process_set=group, blocking=True).wait())

    def backward(xs: Sequence[Any], dys: Sequence[Any]) -> list[Any]:
        below = gradient_name(name)
        averaged = allreduce_tensors(dys, Reduction.of_gradients("all_gather_v", below, group))
        rows = tf.stack([tf.shape(x, tf.int64)[0] for x in xs])
        (everyone,) = allgather_tensors([rows[tf.newaxis]], None if below is None else f"{below}_rows", group)
        before = tf.reduce_sum(everyone[: group.rank()], axis=0)
        return [dy[before[i] : before[i] + rows[i]] for i, dy in enumerate(averaged)]

    _refuse_forward_mode("allgather", tensors, group, "all_gather or all_gather_v")
    return _differentiable(lambda xs: call_on_device(host, xs, [Spec.rows_of(x) for x in xs]), backward, tensors)


def reducescatter_tensors(tensors: Sequence[Any], how: Reduction) -> list[Any]:
    """Reduce tensors, and return this rank's part. Backward gathers the parts of the gradients."""

    def host(*arrays: Any) -> Sequence[Any]:
        return list(core.start_reducescatter(arrays, **how.options(), blocking=True).wait())

    def backward(xs: Sequence[Any], dys: Sequence[Any]) -> list[Any]:
        how.check_linear(f"reducescatter with op={how.op.name.capitalize()}")
        gathered = allgather_tensors(dys, gradient_name(how.name), how.process_set)
        factor = how.gathered_factor
        return [dy if factor == 1 else dy * tf.cast(factor, dy.dtype) for dy in gathered]

    return _differentiable(lambda xs: call_on_device(host, xs, [Spec.rows_of(x) for x in xs]), backward, tensors)


def alltoall_tensor(tensor: Any, splits: Any, name: str | None, group: core.ProcessSet) -> tuple[Any, Any]:
    """Exchange rows; return them and the number of rows from each rank. Backward sends gradients back."""

    def host(array: Any, *given: Any) -> Sequence[Any]:
        return list(
            core.start_alltoall(array, given[0] if given else None, name, process_set=group, blocking=True).wait()
        )

    def forward(x: Any) -> tuple[tuple[Any, Any], Callable[..., Any]]:
        inputs = [x] if splits is None else [x, splits]
        outputs = [Spec.rows_of(x), Spec(tf.int64, (group.size(),))]
        output, received = call_on_device(host, inputs, outputs, host=1)

        def backward(dy: Any, _: Any = None) -> Any:
            back = alltoall_tensor(dy, received, gradient_name(name), group)[0]
            # Splits may leave out rows at the end; these do not affect the result.
            unsent = tf.shape(x)[:1] - tf.shape(back)[:1]
            zeros = tf.zeros(tf.concat([unsent, tf.shape(back)[1:]], 0), back.dtype)
            return back if splits is None else tf.concat([back, zeros], 0)

        return (output, received), backward

    output, received = tf.custom_gradient(forward)(tensor) if is_recording() else forward(tensor)[0]
    return output, received


def broadcast_tensor(tensor: Any, root_rank: int, name: str | None, group: core.ProcessSet) -> Any:
    """Return the tensor of `root_rank`. Backward gives it the mean of the gradients, and zeros to the others."""

    def backward(xs: Sequence[Any], dys: Sequence[Any]) -> list[Any]:
        averaged = allreduce_tensors(dys, Reduction.of_gradients("broadcast", gradient_name(name), group))
        if core.rank() == root_rank:
            return averaged
        # Connected with the reduction, whose gradient all ranks compute together.
        return [tf.where(False, dy, tf.zeros_like(dy)) for dy in averaged]

    _refuse_forward_mode("broadcast", [tensor], group, "broadcast with ranks=")
    return _differentiable(lambda xs: broadcast_tensors(xs, root_rank, name, group), backward, [tensor])[0]


def broadcast_tensors(tensors: Sequence[Any], root_rank: int, name: str | None, group: core.ProcessSet) -> list[Any]:
    """Return the values of rank `root_rank` for each tensor, in one operation. No gradient flows through."""

    def host(*arrays: Any) -> Sequence[Any]:
        copies = list(map(copy_array if core.rank() == root_rank else allocate_like, arrays))
        return list(core.start_broadcast(copies, root_rank, name, process_set=group, blocking=True).wait())

    return call_on_device(host, tensors, [Spec.like(tensor) for tensor in tensors])


def _refuse_forward_mode(verb: str, tensors: Sequence[Any], group: core.ProcessSet, ordered: str) -> None:
    """Raise UsageError in forward mode for a verb whose backward averages, so that it is not the transposed verb."""
    if group.size() != 1:
        refuse_eager_forward_mode(verb, tensors, f"call the ordered verb ({ordered})")


def _differentiable(
    operation: Callable[[list[Any]], list[Any]],
    backward: Callable[[list[Any], list[Any]], list[Any]],
    tensors: Sequence[Any],
) -> list[Any]:
    """Return `operation(tensors)`, with gradients computed by `backward` from tensors and gradients.

    Only differentiable tensors have a backward. This depends on their dtypes, so it is the same on all ranks.
    """
    smooth = [index for index, t in enumerate(tensors) if t.dtype.is_floating or t.dtype.is_complex]
    if not smooth or not is_recording():
        return operation(list(tensors))

    def forward(*xs: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        def gradients(*dys: Any) -> list[Any]:
            answer: list[Any] = [None] * len(xs)
            derivatives = backward([xs[index] for index in smooth], [dys[index] for index in smooth])
            for index, gradient in zip(smooth, derivatives, strict=True):
                answer[index] = gradient
            return answer

        return operation(list(xs)), gradients

    return list(tf.custom_gradient(forward)(*tensors))
