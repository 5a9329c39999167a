"""Gate: what compiled calls must know of a group's launch order, in memory that compiled code reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.kernels.fields import gate as fields
from commlib.kernels.machine_code import HAS_BUILTINS, address, builtin

_OBJECTS = np.zeros(fields.OBJECTS, np.int64)
_OBJECTS[fields.NONE], _OBJECTS[fields.TRUE], _OBJECTS[fields.FALSE] = id(None), id(True), id(False)
_OBJECTS[fields.NDARRAY], _OBJECTS[fields.NEW_ARRAY] = id(np.ndarray), id(np.empty)
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


class GatedVerb:
    """The builtin `call(x, out, *others)` of a verb. `otherwise` is the Python function for calls of unknown kinds."""

    def __init__(self, gate: Gate, otherwise: Callable[..., Any], name: str) -> None:
        self.call = otherwise
        self._kinds = np.zeros((fields.MOST_KINDS, fields.KIND_FIELDS), np.int64)
        self._fields = _Fields.of(fields.VERB_FIELDS, self._kinds, gate, otherwise)
        self._added: list[Any] = [None] * fields.MOST_KINDS
        self._next = 0
        for field, value in (
            (fields.V_GATE, gate.at),
            (fields.V_OBJECTS, OBJECTS_AT),
            (fields.V_OTHERWISE, id(otherwise)),
            (fields.V_KINDS, address_of(self._kinds)),
        ):
            self._fields[field] = value
        if HAS_BUILTINS:
            self.call = builtin(address("gate.run_verb"), self._fields, name)

    def add(
        self,
        compiled: Any,
        kernel: int,
        dtype: Any,
        shape: tuple[int, ...],
        keys: tuple[Any, ...],
        result: int,
        result_shape: tuple[int, ...],
    ) -> None:
        """Add a kind of call: arrays of a dtype and shape, and the other arguments. The oldest of too many is dropped.

        kernel: the address of the compiled function that runs it, as `CompiledCall._step`. result: see the fields.
        """
        if max(len(shape), len(result_shape)) > fields.MOST_DIMENSIONS or len(keys) > fields.MOST_KEYS:
            return
        row = np.zeros(fields.KIND_FIELDS, np.int64)
        resume, new_shape = compiled.resume, tuple(result_shape)
        row[fields.K_DTYPE], row[fields.K_DIMENSIONS] = id(dtype), len(shape)
        row[fields.K_SHAPE : fields.K_SHAPE + len(shape)] = shape
        row[fields.K_KEYS : fields.K_KEYS + len(keys)] = [id(key) for key in keys]
        row[fields.K_RESULT], row[fields.K_RESULT_DIMENSIONS] = result, len(result_shape)
        row[fields.K_RESULT_SHAPE : fields.K_RESULT_SHAPE + len(result_shape)] = result_shape
        row[fields.K_EMPTY], row[fields.K_EMPTY + 1], row[fields.K_ITEM_BYTES] = (
            id(new_shape),
            id(dtype),
            dtype.itemsize,
        )
        row[fields.K_KERNEL], row[fields.K_ADDRESS] = kernel, compiled.address
        row[fields.K_TEXT], row[fields.K_RESUME] = id(compiled.text), id(resume)
        self._added[self._next] = resume, new_shape, dtype, keys, compiled.text
        self._kinds[self._next] = row
        self._fields[fields.V_COUNT] = max(self._fields[fields.V_COUNT], self._next + 1)
        self._next = (self._next + 1) % fields.MOST_KINDS

    def clear(self) -> None:
        """Forget all kinds."""
        self._fields[fields.V_COUNT] = self._next = 0
        self._added = [None] * fields.MOST_KINDS


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
