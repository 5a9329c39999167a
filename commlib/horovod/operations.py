"""Operations: run named operations on arrays, with Horovod's meaning. Both adapters convert tensors for them.

Every `start_*` asks for an operation and returns a `Pending` at once; it runs when all ranks of the process set have
asked for it under the same name, in whatever order. `name=None` makes a name of a counter of the process set and the
verb, so operations without names match in the order in which they are asked for. Arrays are contiguous and must not be
touched until the operation is done. They are numpy's, or of a device that is registered (`commlib.devices`), where
results then are too. With numpy arrays `device` says on which kind of device, "cpu" or "gpu", the user's tensors are.
`blocking` says that the caller is about to wait.

All raise UsageError (a ValueError) for a bad argument here, such as a name that is pending already; MismatchError from
`wait`, on every rank, where ranks disagree; the operations after it are not disturbed.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from commlib.coordinator import Coordinator, Pending, Request
from commlib.coordinator.compressed_reductions import VERB as COMPRESSED
from commlib.coordinator.on_device import placed
from commlib.coordinator.request import Shape
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
) -> Pending:
    """Combine arrays of all ranks element by element; the result is `outputs`, which may be the inputs themselves.

    Several arrays are one group: it runs when all ranks have asked for all of it. Their dtypes may differ.
    The factors multiply before and after: half precision in float32, integers in float64, truncated.
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
    # One array, reduced in place, is what most calls are.
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
) -> Request:
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
) -> Pending:
    """Combine floating-point arrays as one group, compressed as `commlib.compress.scheme_of(compression)` says.

    What is lost is added to what is given next under this name. Within a node nothing is compressed unless
    `within_node`. Average and Sum only.
    """
    coordinator, name = _prepare(COMPRESSED, name, process_set)
    inputs, outputs, device = _placed(coordinator, COMPRESSED, name, inputs, outputs, device)
    operation = resolve_op(op)
    if operation not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(f"{COMPRESSED} {name!r}: op is {operation.name.title()}; expected Average or Sum")
    for array in inputs:
        if name_of(array.dtype) not in FLOATS:
            raise UsageError(f"{COMPRESSED} {name!r}: codecs are for {', '.join(FLOATS)}, got {name_of(array.dtype)}")
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
) -> Pending:
    """Gather arrays of all ranks, one after another along dimension 0, whose lengths may differ: new arrays."""
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
) -> Pending:
    """Overwrite arrays by those of the root, which is a rank of the world, also in a process set."""
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
) -> Pending:
    """Send `splits[i]` rows to the i-th rank of the set; without splits, equal parts.

    The result is (what the ranks sent here, in a new array; how many rows each of them sent, int64).
    """
    coordinator, name = _prepare("alltoall", name, process_set)
    (array,), _, device = _placed(coordinator, "alltoall", name, [array], (), device)
    _check_rows("alltoall", name, [array])
    rows, size = array.shape[0], coordinator.comm.size
    if splits is None:
        if rows % size:
            raise UsageError(
                f"alltoall {name!r}: dimension 0 has length {rows}, which {size} ranks cannot share: give splits"
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
                f"alltoall {name!r}: splits {numbers} must not be negative, nor more than the {rows} rows together"
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
) -> Pending:
    """Combine arrays of all ranks, and give each rank its rows of the results: new arrays.

    If the rows cannot be shared equally, the first ranks get one more. Average and Sum only.
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


def start_barrier(process_set: ProcessSet | None = None, name: str | None = None, *, blocking: bool = False) -> Pending:
    """Meet all ranks of the set. It may overtake operations that are still waiting for ranks."""
    coordinator, name = _prepare("barrier", name, process_set)
    return coordinator.submit(Request("barrier", name), blocking=blocking)


def start_join(process_set: ProcessSet | None = None, *, blocking: bool = False) -> Pending:
    """Say that this rank has no more data; done when all ranks have. The result is the rank that did so last.

    Until then it takes part in what the others ask for, with nothing: it adds zeros to a sum (an Average still divides
    by all ranks), leaves a minimum, maximum or product what it is, gives no rows to a gather or an exchange and drops
    what it gets. A broadcast from a rank that has joined is an error on all ranks.
    """
    coordinator = coordinator_of(process_set, "join")
    return coordinator.submit(Request("join", "join", repeats=False), blocking=blocking)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the root's picklable object on all ranks of the set. Unpickling runs code: trust your ranks."""
    coordinator, name = _prepare("broadcast_object", name, process_set)
    root = _root("broadcast_object", name, root_rank, process_set)
    here = root == coordinator.members[coordinator.comm.rank]
    data = pickle.dumps(obj) if here else None  # what cannot be pickled must fail before ranks meet
    request = Request("broadcast_object", name, (), (("root", root),))
    received = coordinator.submit(request, extra=data, blocking=True).wait()
    return obj if here else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Return the picklable objects of all ranks of the set, in rank order; of ranks that have joined, none.

    Unpickling runs code: trust your ranks.
    """
    coordinator, name = _prepare("allgather_object", name, process_set)
    request = Request("allgather_object", name)
    received = coordinator.submit(request, extra=pickle.dumps(obj), blocking=True).wait()
    return [pickle.loads(data) for data in received if data is not None]


# What they share


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
    """Return the arrays as operations take them, and the kind of device that they are on."""
    if set(map(type, (*inputs, *outputs))) <= _HOST:
        return inputs, outputs, device
    coordinator.take_devices()
    return placed(verb, name, inputs, outputs, device)


def _keep(coordinator: Coordinator, key: Hashable, request: Request) -> None:
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
        raise UsageError(f"{verb} {name!r}: root_rank is {root}, which is none of the ranks {members}")
    return root


def _reduction(
    verb: str, name: str, arrays: Sequence[Any], op: ReduceOp, prescale: float, postscale: float, device: str
) -> Options:
    """Check a reduction's arguments; return those that ranks must agree on."""
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


def _check_outputs(request: Request, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise UsageError unless results fit: found later, on one rank, it would put the ranks out of step."""
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


def _request(verb: str, name: str, arrays: Sequence[Any], options: Options, *, free_rows: bool) -> Request:
    if not arrays:
        raise UsageError(f"{verb} {name!r}: no tensors were given")
    for array in arrays:
        if not array.flags.c_contiguous:
            raise UsageError(f"{verb} {name!r}: the array of shape {array.shape} is not contiguous")
    tensors = tuple((name_of(array.dtype), _shape(array.shape) if free_rows else array.shape) for array in arrays)
    return Request(verb, name, tensors, options)


def _shape(shape: tuple[int, ...]) -> Shape:
    return (None, *shape[1:])
