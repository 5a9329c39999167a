"""Gate: what compiled calls must know of a group's launch order, in memory that compiled code reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.kernels.fields import gate as fields
from commlib.kernels.machine_code import address, builtin

_OBJECTS = np.zeros(fields.OBJECTS, np.int64)
_OBJECTS[fields.NONE], _OBJECTS[fields.TRUE], _OBJECTS[fields.FALSE] = id(None), id(True), id(False)
_OBJECTS[fields.NDARRAY], _OBJECTS[fields.NEW_ARRAY] = id(np.ndarray), id(np.empty)
_OBJECTS[fields.NOT_HERE] = id(NotImplemented)
OBJECTS_AT = address_of(_OBJECTS)


class _Fields(np.ndarray[Any, Any]):
    """The fields of a builtin, which also keeps the objects alive that they refer to."""

    keep: Any = ()

    @classmethod
    def of(cls, count: int, *keep: Any) -> _Fields:
        """Return blank fields."""
        result = np.zeros(count, np.int64).view(cls)
        result.keep = keep
        return result


class Gate:
    """One group's gate. `running` is the lock of the launch order; `note` notes the text of a call that begins."""

    def __init__(self, running: Any, note: Callable[[str], None]) -> None:
        self._keep = running.acquire, running.release, note
        self._fields = np.zeros(fields.GATE_FIELDS, np.int64)
        self._fields[fields.TAKE], self._fields[fields.GIVE_BACK], self._fields[fields.NOTE] = map(id, self._keep)
        self.at = address_of(self._fields)
        self.pending = ctypes.c_int64.from_address(self.at + 8 * fields.PENDING)
        """See `Progress.pending`. It must not outlive the gate."""

    @property
    def is_lost(self) -> bool:
        """Whether an exception of a signal handler has lost the lock."""
        return bool(self._fields[fields.LOST])

    def resumed(self) -> None:
        """Note that Python has given back the lock that compiled code had taken."""
        self._fields[fields.HELD] = 0


def _leave_to_python(*arguments: Any) -> Any:
    return NotImplemented


class GatedVerb:
    """The builtin `call(x, out, *others)` of a verb. It returns NotImplemented for calls that Python must handle.

    The rows of its table are the kinds of call that it knows; others with the same row replace them.
    """

    def __init__(self, gate: Gate, name: str) -> None:
        self.call: Callable[..., Any] = _leave_to_python
        self._gate, self._name = gate, name
        self._kinds: Any = None  # until the first kind
        self._added: dict[int, tuple[Any, ...]] = {}

    def add(self, compiled: Any, key: tuple[Any, ...], result_shape: tuple[int, ...], result: int) -> None:
        """Add a kind of call: its dtype and shape, and then the other arguments. result: see `fields`.

        Does nothing if the call has no compiled function for any arrays.
        """
        dtype, shape, *others = key
        dimensions = max(len(shape), len(result_shape))
        if not compiled.kernel or dimensions > fields.MOST_DIMENSIONS or len(others) > fields.MOST_KEYS:
            return
        if self._kinds is None:
            self._kinds = np.zeros((fields.KINDS, fields.KIND_FIELDS), np.int64)
            verb = _Fields.of(fields.VERB_FIELDS, self._kinds, self._gate, self._added)
            verb[:] = self._gate.at, OBJECTS_AT, address_of(self._kinds)
            self.call = builtin(address("gate.run_verb"), verb, self._name)
        keys = [id(other) for other in others]
        number = 0
        for value in (id(dtype), *shape, *keys):
            number = fields.mix(number, value)
        number &= fields.KINDS - 1
        if number in self._added and self._added[number][:2] == (compiled, key):
            return  # the group was busy
        resume = compiled.resume
        row = np.zeros(fields.KIND_FIELDS, np.int64)
        row[fields.K_DTYPE], row[fields.K_DIMENSIONS] = id(dtype), len(shape)
        row[fields.K_SHAPE : fields.K_SHAPE + len(shape)] = shape
        row[fields.K_KEYS : fields.K_KEYS + len(keys)] = keys
        row[fields.K_RESULT], row[fields.K_RESULT_DIMENSIONS] = result, len(result_shape)
        row[fields.K_RESULT_SHAPE : fields.K_RESULT_SHAPE + len(result_shape)] = result_shape
        row[fields.K_EMPTY : fields.K_ITEM_BYTES + 1] = id(result_shape), id(dtype), dtype.itemsize
        row[fields.K_KERNEL], row[fields.K_ADDRESS] = compiled.kernel, compiled.address
        row[fields.K_TEXT], row[fields.K_RESUME] = id(compiled.text), id(resume)
        replaced = self._added.get(number)
        self._added[number] = compiled, key, result_shape, resume
        self._kinds[number] = row
        del replaced  # only now: the row referred to it

    def clear(self) -> None:
        """Forget all kinds."""
        if self._kinds is not None:
            self._kinds[:] = 0
        self._added.clear()


def gate_plan(gate: Gate, compiled: Any, kernel: int, x: Any, target: Any, value: Any) -> Callable[[], Any]:
    """Return the builtin of a plan, which runs a compiled call on fixed arrays and returns `value`.

    kernel: the address of a compiled function that takes the call's address.
    """
    plan = _Fields.of(fields.PLAN_FIELDS, gate, compiled, compiled.text, x, target, value)
    resume, otherwise = compiled.resume, compiled.now
    plan.keep = *plan.keep, resume, otherwise
    plan[fields.P_GATE], plan[fields.P_OBJECTS] = gate.at, OBJECTS_AT
    plan[fields.P_KERNEL], plan[fields.P_ADDRESS] = kernel, compiled.address
    plan[fields.P_TEXT : fields.P_OTHERWISE + 1] = list(map(id, (compiled.text, x, target, value, resume, otherwise)))
    return builtin(address("gate.run_plan"), plan, "plan")
