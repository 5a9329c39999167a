"""Device dispatcher: rows stay in device memory, and travel through the communicator's uneven all-to-all.

Small data stays on the host: the routing of tokens, the number of rows for each rank, and the gates while they are
sent. Rows of a rank's own tokens are not sent. Sums are made in the order and with the roundings of
`SharedMemoryDispatcher`, on any path and any number of nodes, so the results are bitwise equal (unless there is a
codec).

All work is queued on the current stream, and no call here waits for it. Results are memory of the stream that owns
the rows. That stream differs from the current one if exchanges run on a side stream.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.compress.codec import Codec
from commlib.devices.array import DeviceArray
from commlib.dtypes import Array, name_of
from commlib.errors import UsageError
from commlib.expert.device_exchange import DeviceExchange
from commlib.expert.device_plan import DeviceDispatchPlan, DevicePlanBuilder, stream_alloc
from commlib.expert.dispatch_plan import Assignments
from commlib.expert.placement import ExpertPlacement
from commlib.expert.token_buffers import CountExchange, digest_for, lines

_digest = lru_cache(4096)(lambda *what: digest_for(what))


class DeviceDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`. Rows and the arrays of a plan are on the device of `x`.

    comm: used only by dispatchers between experts. codec: fixed-length codec for floats on the network; None: no
    encoding. The gates passed to `dispatch` are on the host; those that it returns are on the device, and so are
    numbers.
    """

    def __init__(self, comm: Communicator, placement: ExpertPlacement, *, codec: Codec | None = None) -> None:
        self.placement, self._comm = placement, comm
        self._plans, self._exchange = DevicePlanBuilder(comm, placement), DeviceExchange(comm, codec)
        self._counting, self._no_counts = (CountExchange(comm, count) for count in (len(placement.owners), 0))

    def dispatch(self, what: str, assigned: Assignments, x: Any, gates: Array) -> tuple[Any, Any, Any, Any]:
        rows = _check_device(x, what)
        self._counting.own[2:] = assigned.counts
        self._compare_calls(self._counting, what, "dispatch", rows)
        plan, row_gates, counts = self._plans.make(rows, self._counting.counts.copy(), assigned, gates)
        return plan, self._send_tokens(plan, rows), row_gates, counts

    def combine_back(self, what: str, plan: Any, x: Any) -> Any:
        rows = _check_device(x, what)
        self._compare_calls(self._no_counts, what, "combine, backward", rows)
        return self._send_tokens(plan, rows)

    def combine(self, what: str, plan: Any, rows: Any, gates: Any) -> Any:
        given, by = _check_device(rows, what), _check_device(gates, what)
        self._compare_calls(self._no_counts, what, "combine", given)
        return self._send_sums(plan, given, by)

    def dispatch_back(self, what: str, plan: Any, rows: Any, numbers: Any) -> tuple[Any, Any]:
        given, own = _check_device(rows, what), _check_device(numbers, what)
        self._compare_calls(self._no_counts, what, "dispatch, backward", given)
        return self._send_sums(plan, given, None), self._send_numbers(plan, own)

    def _compare_calls(self, counting: CountExchange, what: str, step: str, rows: DeviceArray) -> None:
        """All-gather the ranks' numbers and digests; raise MismatchError on all ranks unless all make the same call."""
        self._comm.group.waits.purpose = f"{what}, {step}"
        call = what, step, rows.shape[1], rows.dtype, f"on {rows.device.name}"
        counting.own[0] = _digest(*call)
        counting.gather()
        if (counting.every[:, 0] != counting.own[0]).any():
            check_agreement(self._comm, "experts", lines(call))

    def _send_tokens(self, plan: DeviceDispatchPlan, x: DeviceArray) -> DeviceArray:
        """Send rows of tokens; return the received rows and this rank's own, in the order of the local experts."""
        received = self._exchange.move(_message(x, None, plan.sent), plan.sends, plan.takes)
        rows = stream_alloc(x, (len(plan.received), x.shape[1]), x.dtype)
        _take(x, received, None, plan.received, rows)
        return rows

    def _send_sums(self, plan: DeviceDispatchPlan, rows: DeviceArray, gates: DeviceArray | None) -> DeviceArray:
        """Send rows back, weighted by gates if given; return the sum for each token of this rank."""
        received = self._exchange.move(_message(rows, gates, plan.returned), plan.takes, plan.sends)
        sums = stream_alloc(rows, (len(plan.starts) - 1, rows.shape[1]), rows.dtype)
        places = plan.starts, plan.members
        rows.device.kernels.sum_rows(_flat(rows), _flat(received), gates, *places, rows.shape[1], _flat(sums))
        return sums

    def _send_numbers(self, plan: DeviceDispatchPlan, numbers: DeviceArray) -> DeviceArray:
        """Send the number of each row back; return the number of each assignment."""
        rows = numbers.reshape(len(numbers), 1)
        received = self._exchange.exchange(_message(rows, None, plan.returned), plan.takes, plan.sends)
        result = stream_alloc(numbers, (len(plan.positions), 1), numbers.dtype)
        _take(rows, received, None, plan.positions, result)
        return _flat(result)


def _check_device(x: Any, what: str) -> DeviceArray:
    """Return the array if it is on a device. Raises UsageError for a host array."""
    if type(x) is not DeviceArray:
        raise UsageError(
            f"{what}: {name_of(x.dtype)}{list(x.shape)} is on the host, but the tokens of this call were sent from a "
            "device. Leave the experts' rows on that device"
        )
    return x


def _message(rows: DeviceArray, factors: DeviceArray | None, places: DeviceArray) -> DeviceArray:
    """Return rows of this rank by their indices, weighted by factors if given."""
    message = rows.empty((len(places), rows.shape[1]), rows.dtype)
    _take(rows, None, factors, places, message)
    return message


def _take(
    here: DeviceArray, there: DeviceArray | None, factors: DeviceArray | None, places: DeviceArray, target: DeviceArray
) -> None:
    """Gather rows by their indices: see `kernels.protocol.Kernels.take_rows`."""
    others = None if there is None else _flat(there)
    here.device.kernels.take_rows(_flat(here), others, factors, places, here.shape[1], _flat(target))


def _flat(x: DeviceArray) -> DeviceArray:
    return x.reshape(-1)
