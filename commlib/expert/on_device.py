"""OnDevice: rows stay in the memory of a device, and travel by the communicator's exchange of uneven rows.

What is small stays on the host: which tokens go where, how many rows each rank gets, and the gates on their way there.
The rows of a rank's own tokens do not travel. Sums are made in the order and with the roundings of `OnNode`, whatever
way the rows go and on however many nodes, so they have its bits (unless there is a codec).

All is queued on the current stream, and nothing here waits for that. Results are memory of the stream from which rows
came, which is another one where exchanges run beside the caller's (`beside`).
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
from commlib.expert.device_moves import DeviceMoves
from commlib.expert.device_passage import DevicePassage, Passages
from commlib.expert.made import made_for
from commlib.expert.passage import Assigned
from commlib.expert.placement import Placement
from commlib.expert.regions import Meeting, digest_for, lines

_digest = lru_cache(4096)(lambda *what: digest_for(what))


class OnDevice:
    """See `commlib.expert.exchange.Exchange`; rows are on a device, that of `x`, and so are the numbers of a passage.

    comm: nothing else uses it, but other exchanges between experts. codec: how floats travel, of a fixed length, or as
    they are. The gates given to `dispatch` are the host's; those that it returns are the device's, and so are numbers.
    """

    def __init__(self, comm: Communicator, placement: Placement, *, codec: Codec | None = None) -> None:
        self.placement, self._comm = placement, comm
        self._passages, self._moves = Passages(comm, placement), DeviceMoves(comm, codec)
        self._counting, self._going_on = (Meeting(comm, count) for count in (len(placement.owners), 0))

    def dispatch(self, what: str, assigned: Assigned, x: Any, gates: Array) -> tuple[Any, Any, Any, Any]:
        rows = _checked(x, what)
        self._counting.own[2:] = assigned.counts
        self._meet(self._counting, what, "dispatch", rows)
        passage, row_gates, counts = self._passages.make(rows, self._counting.told.copy(), assigned, gates)
        return passage, self._sent(passage, rows), row_gates, counts

    def combine_back(self, what: str, passage: Any, x: Any) -> Any:
        rows = _checked(x, what)
        self._meet(self._going_on, what, "combine, backward", rows)
        return self._sent(passage, rows)

    def combine(self, what: str, passage: Any, rows: Any, gates: Any) -> Any:
        given, by = _checked(rows, what), _checked(gates, what)
        self._meet(self._going_on, what, "combine", given)
        return self._sums(passage, given, by)

    def dispatch_back(self, what: str, passage: Any, rows: Any, numbers: Any) -> tuple[Any, Any]:
        given, own = _checked(rows, what), _checked(numbers, what)
        self._meet(self._going_on, what, "dispatch, backward", given)
        return self._sums(passage, given, None), self._returned(passage, own)

    def _meet(self, meeting: Meeting, what: str, step: str, rows: DeviceArray) -> None:
        """Let all ranks know what the meeting tells; raise MismatchError on all unless they mean the same."""
        self._comm.group.purpose = f"{what}, {step}"
        call = what, step, rows.shape[1], rows.dtype, f"on {rows.device.name}"
        meeting.own[0] = _digest(*call)
        meeting.gather()
        if (meeting.every[:, 0] != meeting.own[0]).any():
            check_agreement(self._comm, "experts", lines(call))

    def _sent(self, passage: DevicePassage, x: DeviceArray) -> DeviceArray:
        """Send rows of tokens; return those that came, and this rank's own, in the order of the experts here."""
        came = self._moves.move(_message(x, None, passage.sent), passage.sends, passage.takes)
        rows = made_for(x, (len(passage.came), x.shape[1]), x.dtype)
        _take(x, came, None, passage.came, rows)
        return rows

    def _sums(self, passage: DevicePassage, rows: DeviceArray, gates: DeviceArray | None) -> DeviceArray:
        """Send rows back, times gates if there are any; return the sum for each token of this rank."""
        came = self._moves.move(_message(rows, gates, passage.returned), passage.takes, passage.sends)
        sums = made_for(rows, (len(passage.starts) - 1, rows.shape[1]), rows.dtype)
        places = passage.starts, passage.members
        rows.device.kernels.sum_rows(_flat(rows), _flat(came), gates, *places, rows.shape[1], _flat(sums))
        return sums

    def _returned(self, passage: DevicePassage, numbers: DeviceArray) -> DeviceArray:
        """Send the number of each row back; return that of each assignment."""
        rows = numbers.reshape(len(numbers), 1)
        came = self._moves.exchange(_message(rows, None, passage.returned), passage.takes, passage.sends)
        found = made_for(numbers, (len(passage.found), 1), numbers.dtype)
        _take(rows, came, None, passage.found, found)
        return _flat(found)


def _checked(x: Any, what: str) -> DeviceArray:
    """Return an array of a device. Raises UsageError for one of the host."""
    if type(x) is not DeviceArray:
        raise UsageError(
            f"{what}: {name_of(x.dtype)}{list(x.shape)} is on the host, but the tokens of this call were sent from a "
            "device: experts must leave their rows there"
        )
    return x


def _message(rows: DeviceArray, factors: DeviceArray | None, places: DeviceArray) -> DeviceArray:
    """Return rows of this rank by their places, times factors if there are any."""
    found = rows.empty((len(places), rows.shape[1]), rows.dtype)
    _take(rows, None, factors, places, found)
    return found


def _take(
    here: DeviceArray, there: DeviceArray | None, factors: DeviceArray | None, places: DeviceArray, target: DeviceArray
) -> None:
    """Take rows by their places: see `kernels.protocol.Kernels.take_rows`."""
    others = None if there is None else _flat(there)
    here.device.kernels.take_rows(_flat(here), others, factors, places, here.shape[1], _flat(target))


def _flat(x: DeviceArray) -> DeviceArray:
    return x.reshape(-1)
