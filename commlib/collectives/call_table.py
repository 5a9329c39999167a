"""PreparedCall: one checked, compiled call of a verb with its arrays. Calls: the compiled calls of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.nccl import NcclPath
from commlib.collectives.device.node import HierarchicalDevicePath, NodeDevicePath
from commlib.collectives.device.staged_path import StagedPath
from commlib.collectives.host.hierarchical import HierarchicalPath
from commlib.collectives.host.native import NativePath
from commlib.collectives.host.node import NodePath, Opening
from commlib.collectives.host.schedule_path import SchedulePath
from commlib.collectives.operands import Result
from commlib.collectives.paths import Path, Verb, find_paths
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import as_view, is_contiguous, overlap
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.devices.registry import find_named, lookup
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.kernels.fields.gate import ANY_ARRAY, SAME_ARRAY
from commlib.node.uneven_exchange import UnevenExchange
from commlib.runtime.compiled_call import CompiledCall, Plan, Task
from commlib.runtime.gate import GatedVerb
from commlib.runtime.work import Work

_HOST_PATHS: tuple[Path, ...] = (NativePath(), NodePath(), HierarchicalPath(), SchedulePath())

PATHS: tuple[Path, ...] = (
    NodeDevicePath(),
    NcclPath(),
    HierarchicalDevicePath(),
    NodeDevicePath(by_host=True),
    *_HOST_PATHS,
    StagedPath(_HOST_PATHS),
)
"""All paths; "auto" uses the first that accepts the call: see `paths.find_paths`."""

_GATED = "all_reduce", "reduce", "broadcast", "gather", "all_gather", "reduce_scatter", "all_to_all", "scan", "exscan"

# The most compiled calls to keep for each verb.
_MOST_KINDS = 256


class Calls:
    """The compiled calls of one group: a table for each verb, by the key that distinguishes its calls.

    label: part of the text of every call.
    """

    def __init__(self, group: Group, label: str = "") -> None:
        self.group, self.label = group, label
        self.all_reduces: dict[Hashable, CompiledCall] = {}
        self.uneven: dict[Hashable, UnevenExchange] = {}
        self._tables: defaultdict[str, dict[Hashable, CompiledCall]] = defaultdict(dict)
        self.gated = {name: GatedVerb(group.progress.gate, name) for name in _GATED}
        """By verb: what runs small calls on plain arrays without Python."""
        self._contexts: dict[Any, PathContext] = {}

    def labelled(self, label: str) -> Calls:
        """Return a table of calls with a label. It shares this one's contexts."""
        other = Calls(self.group, label)
        other._contexts = self._contexts
        return other

    def find(
        self,
        verb: Verb,
        call: Call,
        key: tuple[Any, ...],
        shape: tuple[int, ...] = (),
        result: int = SAME_ARRAY,
    ) -> CompiledCall:
        """Return the compiled call for `key`; compile it if it is new.

        key: the dtype and shape of the array, and the verb's other arguments in the order of its builtin. shape: that
        of the result. result: see `kernels.fields.gate`.
        """
        table = self._tables[verb.name]
        full_key = (key, call.device) if call.device else key
        compiled = table.get(full_key)
        if compiled is None:
            compiled = self._compile(verb, call)
            if isinstance(compiled, Opening):
                return compiled
            if len(table) >= _MOST_KINDS:
                table.clear()
            table[full_key] = compiled
        if not call.device and (gated := self.gated.get(verb.name)) is not None:
            gated.add(compiled, key, shape, result)
        return compiled

    def on_device(
        self, x: Any, out: Any, op: str, algorithm: str
    ) -> tuple[CompiledCall, DeviceArray, DeviceArray] | None:
        """Return a compiled all-reduce of a device array, with its source and target as 1-D arrays.

        None if none is compiled yet, or if the arrays need the full checks first.
        """
        device = lookup(x)
        if device is None or not (out is x or lookup(out) is device):
            return None
        target = device.wrap(out, "all_reduce", "out", written=True)
        source = target if out is x else device.wrap(x, "all_reduce")
        call = self.all_reduces.get(((source.dtype, source.size, op, algorithm), device.name))
        if call is None:
            return None
        if source is not target and (
            source.dtype != target.dtype or source.shape != target.shape or overlap(source, target)
        ):
            return None
        return call, source.reshape(-1), target.reshape(-1)

    def gate_all_reduce(self, compiled: CompiledCall, x: Array, op: str, algorithm: str) -> None:
        """Let later all-reduces of such a plain array run without Python."""
        if not isinstance(compiled, Opening):
            self.gated["all_reduce"].add(compiled, (x.dtype, x.shape, op, algorithm), x.shape, ANY_ARRAY)

    def new_all_reduce(self, verb: Verb, call: Call, key: Hashable) -> CompiledCall:
        """Compile an all-reduce and add it to the table. Callers have looked `key` up in `all_reduces` before."""
        compiled = self._compile(verb, call)
        if not isinstance(compiled, Opening):
            if len(self.all_reduces) >= _MOST_KINDS:
                self.all_reduces.clear()
            self.all_reduces[key] = compiled
        return compiled

    def _compile(self, verb: Verb, call: Call) -> CompiledCall:
        if self.label:
            call = replace(call, label=self.label)
        context = self.context(find_named(call.device) if call.device else HOST)
        choices = find_paths(PATHS, context, verb, call)
        if context.on_host:
            return choices[0].compile(context)
        return DeviceCall(context, call.text, choices=choices)

    def context(self, device: Device) -> PathContext:
        """Return the context of calls on a device, or on the host."""
        context = self._contexts.get(device)
        if context is None:
            context = self._contexts[device] = PathContext(self.group, device)
        return context

    def open_paths(self, device: Device) -> tuple[str, ...]:
        """Open all paths of a device; return the names of the available ones, in the table's order. Collective."""
        context, text = self.context(device), f"paths of {device.name}"
        rows = [path for path in PATHS if path.takes_devices and path.is_automatic]
        opening = Task(self.group.progress, text, lambda: [path.name for path in rows if path.open(context, text)])
        return tuple(dict.fromkeys(DeviceCall(context, text, opening).now(None, None)))

    def clear(self) -> None:
        """Drop all compiled calls, after the devices have finished the queued work."""
        for context in self._contexts.values():
            context.queue.close()
        self.all_reduces.clear()
        self.uneven.clear()
        self._tables.clear()
        for gated in self.gated.values():
            gated.clear()


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One call that is ready to run: the compiled call, its source and target, and the conversion of its value.

    deliver: converts the value to the verb's return value. is_known: whether the return value is known before the call
    runs. x: the array as the user passed it.
    """

    compiled: CompiledCall
    source: Any
    target: Any
    deliver: Callable[[Any], Any]
    is_known: bool = False
    x: Any = None

    @classmethod
    def into(cls, compiled: CompiledCall, source: Any, result: Result | None, x: Any) -> PreparedCall:
        """Make a PreparedCall for a call that writes into `result`; None means this rank gets no result."""
        if result is None:
            return cls(compiled, source, source, _nothing, True, x)
        return cls(compiled, source, result.flat, lambda _: result.deliver(), not result.staged, x)

    def run(self) -> Any:
        """Run the call now and return its result."""
        return self.deliver(self.compiled.now(self.source, self.target))

    def start(self) -> Work:
        """Start the call and return its work."""
        if self.is_known:
            return self.compiled.start(self.source, self.target, value=self.deliver(None))
        return self.compiled.start(self.source, self.target, deliver=self.deliver)

    def plan(self, verb: str) -> Plan:
        """Bind the call to its arrays. Raises UsageError if it works on a copy, which would not see later changes."""
        check_bound(self.source, self.x, verb)
        check_bound(self.target, self.target, verb)
        if not self.is_known and self.target is not self.source:
            raise UsageError(f"plan_{verb}: x and out must be contiguous: a copy would not see later changes of them")
        if self.is_known:
            return self.compiled.bind(self.source, self.target, value=self.deliver(None))
        return self.compiled.bind(self.source, self.target, deliver=self.deliver)


def check_bound(array: Any, given: Any, verb: str) -> None:
    """Raise UsageError if `array`, which a plan uses, is a copy of the array that the user gave."""
    given = array if given is None else as_view(given, f"plan_{verb}")
    if not is_contiguous(given):
        raise UsageError(f"plan_{verb}: x and out must be contiguous: a copy would not see later changes of them")
    if array.size and not overlap(array, given):
        raise UsageError(f"plan_{verb}: x and out overlap: pass the same array twice, or arrays that share no memory")


def return_value(value: Any) -> Any:
    """Return the value unchanged: the verb returns the call's value."""
    return value


def _nothing(value: Any) -> None:
    pass
