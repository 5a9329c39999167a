"""Operations: run named operations on arrays, with Horovod's meaning. Both adapters convert tensors for them.

Every `start_*` requests an operation and returns a `PendingOp` at once. The operation runs when all ranks of the
process set have requested it under the same name, in any order. `name=None` makes a name from the verb and a counter of
the process set, so unnamed operations match in program order. Arrays are contiguous; do not touch them until the
operation is done. They are numpy arrays, or arrays of a registered device (`commlib.devices`), whose results stay on
that device. For numpy arrays, `device` names the kind of device of the user's tensors, "cpu" or "gpu". `blocking`: the
caller waits immediately.

All raise UsageError (a ValueError) for a bad argument on this rank, such as a name that is already pending. If ranks
disagree, `wait` raises MismatchError on every rank; later operations are not affected.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from commlib.coordinator import Coordinator, OpRequest, PendingOp
from commlib.coordinator.compressed_reductions import VERB as COMPRESSED
from commlib.coordinator.device_operands import wrap_operands
from commlib.coordinator.op_request import Shape
from commlib.dtypes import FLOATS, kernel_operation, name_of
from commlib.errors import UsageError
from commlib.horovod.process_sets import ProcessSet, coordinator_of, process_set_of
from commlib.horovod.reductions import ReduceOp, resolve_op

Options = tuple[tuple[str, str | int | float], ...]


def start_allreduce(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None = None,
    *,
    op: Any = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    device: str = "cpu",
    blocking: bool = False,
) -> PendingOp:
    """Combine arrays of all ranks element by element; the results go to `outputs`, which may be the inputs themselves.

    Several arrays form one group: it runs when all ranks have requested all of it. Their dtypes may differ. The factors
    multiply before and after: half precision in float32; integers in float64, truncated.
    """
    coordinator, name = _prepare("allreduce", name, process_set)
    if not (len(inputs) == len(outputs) == 1 and type(inputs[0]) is type(outputs[0]) is np.ndarray):
        inputs, outputs, device = _placed(coordinator, "allreduce", name, inputs, outputs, device)
    if len(inputs) == 1:
        kind: Any = inputs[0].dtype, inputs[0].shape
    else:
        kind = [(array.dtype, array.shape) for array in inputs]
    key = (name, op, prescale_factor, postscale_factor, device, *kind)
    request = coordinator.requests.get(key)
    if request is None:
        request = _allreduce(name, inputs, op, prescale_factor, postscale_factor, device)
        _keep(coordinator, key, request)
    # Most calls reduce one array in place.
    if not (len(inputs) == len(outputs) == 1 and outputs[0] is inputs[0] and inputs[0].flags.carray):
        for array in inputs:
            if not array.flags.c_contiguous:
                raise UsageError(f"{request}: the array of shape {array.shape} is not contiguous")
        _check_outputs(request, inputs, outputs)
    return coordinator.submit(request, inputs, outputs, blocking=blocking)


def _allreduce(
    name: str,
    inputs: Sequence[Any],
    op: Any,
    prescale: float,
    postscale: float,
    device: str,
) -> OpRequest:
    options = _reduction("allreduce", name, inputs, resolve_op(op), prescale, postscale, device)
    return _request("allreduce", name, inputs, options, free_rows=False)


def start_compressed_allreduce(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    name: str,
    *,
    compression: str,
    within_node: bool = False,
    op: Any = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    device: str = "cpu",
    blocking: bool = False,
) -> PendingOp:
    """Combine floating-point arrays as one group, with compression `commlib.compress.scheme_of(compression)`.

    The compression error is added to the next arrays under this name. Data within a node is not compressed unless
    `within_node`. Average and Sum only.
    """
    coordinator, name = _prepare(COMPRESSED, name, process_set)
    inputs, outputs, device = _placed(coordinator, COMPRESSED, name, inputs, outputs, device)
    operation = resolve_op(op)
    if operation not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(f"{COMPRESSED} {name!r}: op is {operation.name.title()}; expected Average or Sum")
    for array in inputs:
        if name_of(array.dtype) not in FLOATS:
            raise UsageError(f"{COMPRESSED} {name!r}: codecs take {', '.join(FLOATS)}, got {name_of(array.dtype)}")
    options = (
        *_reduction(COMPRESSED, name, inputs, operation, prescale_factor, postscale_factor, device),
        ("compression", compression),
        ("within_node", int(within_node)),
    )
    request = _request(COMPRESSED, name, inputs, options, free_rows=False)
    _check_outputs(request, inputs, outputs)
    return coordinator.submit(request, inputs, outputs, blocking=blocking)


def start_allgather(
    inputs: Sequence[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet | None = None,
    device: str = "cpu",
    blocking: bool = False,
) -> PendingOp:
    """Gather arrays of all ranks along dimension 0 into new arrays. Lengths of dimension 0 may differ among ranks."""
    coordinator, name = _prepare("allgather", name, process_set)
    inputs, _, device = _placed(coordinator, "allgather", name, inputs, (), device)
    _check_rows("allgather", name, inputs)
    request = _request("allgather", name, inputs, (("device", device),), free_rows=True)
    return coordinator.submit(request, inputs, blocking=blocking)


def start_broadcast(
    arrays: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet | None = None,
    device: str = "cpu",
    blocking: bool = False,
) -> PendingOp:
    """Overwrite arrays with the root's. The root is a rank of the world, also in a process set."""
    coordinator, name = _prepare("broadcast", name, process_set)
    root = _root("broadcast", name, root_rank, process_set)
    arrays, _, device = _placed(coordinator, "broadcast", name, arrays, arrays, device)
    request = _request("broadcast", name, arrays, (("root", root), ("device", device)), free_rows=False)
    _check_outputs(request, arrays, arrays)
    return coordinator.submit(request, arrays, arrays, blocking=blocking)


def start_alltoall(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet | None = None,
    device: str = "cpu",
    blocking: bool = False,
) -> PendingOp:
    """Send `splits[i]` rows to the i-th rank of the set; without splits, equal parts.

    The result is (received rows, in a new array; number of rows from each rank, int64).
    """
    coordinator, name = _prepare("alltoall", name, process_set)
    (array,), _, device = _placed(coordinator, "alltoall", name, [array], (), device)
    _check_rows("alltoall", name, [array])
    rows, size = array.shape[0], coordinator.comm.size
    if splits is None:
        if rows % size:
            raise UsageError(
                f"alltoall {name!r}: dimension 0 has length {rows}, not divisible by {size} ranks: pass splits"
            )
        numbers = [rows // size] * size
    else:
        given = np.asarray(splits)
        if given.ndim != 1 or given.dtype.kind not in "iu" or len(given) != size:
            raise UsageError(
                f"alltoall {name!r}: splits must be {size} integers, one for each rank; got {given.dtype} of shape "
                f"{given.shape}"
            )
        numbers = [int(number) for number in given]
        if min(numbers) < 0 or sum(numbers) > rows:
            raise UsageError(
                f"alltoall {name!r}: splits {numbers}: expected no negative number, and a sum of at most {rows} rows"
            )
        array = array[: sum(numbers)]
    request = _request("alltoall", name, [array], (("device", device),), free_rows=True)
    return coordinator.submit(request, [array], extra=numbers, blocking=blocking)


def start_reducescatter(
    inputs: Sequence[Any],
    name: str | None = None,
    *,
    op: Any = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    device: str = "cpu",
    blocking: bool = False,
) -> PendingOp:
    """Combine arrays of all ranks, and return each rank's rows of the results in new arrays.

    If the rows cannot be divided equally, the first ranks get one more. Average and Sum only.
    """
    coordinator, name = _prepare("reducescatter", name, process_set)
    inputs, _, device = _placed(coordinator, "reducescatter", name, inputs, (), device)
    _check_rows("reducescatter", name, inputs)
    operation = resolve_op(op)
    if operation not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(f"reducescatter {name!r}: op is {operation.name.title()}; expected Average or Sum")
    options = _reduction("reducescatter", name, inputs, operation, prescale_factor, postscale_factor, device)
    request = _request("reducescatter", name, inputs, options, free_rows=False)
    return coordinator.submit(request, inputs, blocking=blocking)


def start_barrier(
    process_set: ProcessSet | None = None, name: str | None = None, *, blocking: bool = False
) -> PendingOp:
    """Synchronise all ranks of the set. It may overtake operations that still wait for ranks."""
    coordinator, name = _prepare("barrier", name, process_set)
    return coordinator.submit(OpRequest("barrier", name), blocking=blocking)


def start_join(process_set: ProcessSet | None = None, *, blocking: bool = False) -> PendingOp:
    """Announce that this rank has no more data; done when all ranks have joined. The result is the last rank to join.

    Until then this rank takes part in the others' operations without data: it adds zeros to a sum (an Average still
    divides by all ranks), does not change a minimum, maximum or product, contributes no rows to a gather or an exchange
    and drops received rows. A broadcast from a joined rank is an error on all ranks.
    """
    coordinator = coordinator_of(process_set, "join")
    return coordinator.submit(OpRequest("join", "join", repeats=False), blocking=blocking)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the root's picklable object on all ranks of the set. Unpickling runs code: trust your ranks."""
    coordinator, name = _prepare("broadcast_object", name, process_set)
    root = _root("broadcast_object", name, root_rank, process_set)
    here = root == coordinator.members[coordinator.comm.rank]
    data = pickle.dumps(obj) if here else None  # an object that cannot be pickled must raise before any communication
    request = OpRequest("broadcast_object", name, (), (("root", root),))
    received = coordinator.submit(request, extra=data, blocking=True).wait()
    return obj if here else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Return the picklable objects of all ranks of the set that have not joined, in rank order.

    Unpickling runs code: trust your ranks.
    """
    coordinator, name = _prepare("allgather_object", name, process_set)
    request = OpRequest("allgather_object", name)
    received = coordinator.submit(request, extra=pickle.dumps(obj), blocking=True).wait()
    return [pickle.loads(data) for data in received if data is not None]


# Shared helpers


_MOST_KEPT = 1 << 14  # requests of a process set


def _prepare(verb: str, name: str | None, process_set: ProcessSet | None) -> tuple[Coordinator, str]:
    coordinator = coordinator_of(process_set, verb)
    if name is None:
        return coordinator, coordinator.next_name(verb)
    if not isinstance(name, str):
        raise UsageError(f"{verb}: name is a {type(name).__name__}: expected a string")
    return coordinator, name


_HOST = {np.ndarray}


def _placed(
    coordinator: Coordinator, verb: str, name: str, inputs: Sequence[Any], outputs: Sequence[Any], device: str
) -> tuple[Sequence[Any], Sequence[Any], str]:
    """Return the arrays as operations take them, and the kind of their device."""
    if set(map(type, (*inputs, *outputs))) <= _HOST:
        return inputs, outputs, device
    coordinator.take_devices()
    return wrap_operands(verb, name, inputs, outputs, device)


def _keep(coordinator: Coordinator, key: Hashable, request: OpRequest) -> None:
    if len(coordinator.requests) >= _MOST_KEPT:
        coordinator.requests.clear()
    coordinator.requests[key] = request


def _root(verb: str, name: str, root_rank: int, process_set: ProcessSet | None) -> int:
    members = process_set_of(process_set).ranks
    try:
        root = operator.index(root_rank)
    except TypeError:
        raise UsageError(f"{verb} {name!r}: root_rank is a {type(root_rank).__name__}: expected a rank") from None
    if members is None or root not in members:
        raise UsageError(f"{verb} {name!r}: root_rank is {root}, expected one of the ranks {members}")
    return root


def _reduction(
    verb: str, name: str, arrays: Sequence[Any], op: ReduceOp, prescale: float, postscale: float, device: str
) -> Options:
    """Check the arguments of a reduction; return the options that ranks must agree on."""
    for array in arrays:
        dtype = name_of(array.dtype)
        if op is ReduceOp.ADASUM:
            if dtype not in FLOATS:
                raise UsageError(f"{verb} {name!r}: Adasum needs floats, got {dtype}")
        else:
            try:
                kernel_operation(dtype, op.core)
            except UsageError as error:
                raise UsageError(f"{verb} {name!r}: {error}") from None
        if (prescale != 1 or postscale != 1) and dtype == "bool":
            raise UsageError(f"{verb} {name!r}: bool cannot be scaled (prescale {prescale}, postscale {postscale})")
    return (
        ("op", op.core),
        ("prescale_factor", float(prescale)),
        ("postscale_factor", float(postscale)),
        ("device", device),
    )


def _check_rows(verb: str, name: str, arrays: Sequence[Any]) -> None:
    for array in arrays:
        if array.ndim == 0:
            raise UsageError(f"{verb} {name!r}: a 0-dimensional tensor has no rows: reshape it to (1,)")


def _check_outputs(request: OpRequest, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise UsageError unless results fit. A later error, on one rank, would put the ranks out of step."""
    if len(outputs) != len(inputs):
        raise UsageError(f"{request}: {len(inputs)} inputs but {len(outputs)} outputs")
    for array, output in zip(inputs, outputs, strict=False):
        flags = output.flags
        if not flags.writeable:
            raise UsageError(f"{request}: the output of shape {output.shape} is read-only: pass a writable array")
        if output is array:
            continue
        if output.shape != array.shape or output.dtype != array.dtype:
            raise UsageError(
                f"{request}: an output has shape {output.shape} and dtype {output.dtype}; its input has shape "
                f"{array.shape} and dtype {array.dtype}"
            )
        if not flags.c_contiguous:
            raise UsageError(f"{request}: the output of shape {output.shape} is not contiguous")


def _request(verb: str, name: str, arrays: Sequence[Any], options: Options, *, free_rows: bool) -> OpRequest:
    if not arrays:
        raise UsageError(f"{verb} {name!r}: no tensors were given")
    for array in arrays:
        if not array.flags.c_contiguous:
            raise UsageError(f"{verb} {name!r}: the array of shape {array.shape} is not contiguous")
    tensors = tuple((name_of(array.dtype), _shape(array.shape) if free_rows else array.shape) for array in arrays)
    return OpRequest(verb, name, tensors, options)


def _shape(shape: tuple[int, ...]) -> Shape:
    return (None, *shape[1:])
