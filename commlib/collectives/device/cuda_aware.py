"""CUDA-aware path: send device memory in messages, if the transport accepts it.

The name of a schedule, or of a host path that takes device arrays, selects it, too.
"""

from __future__ import annotations

from dataclasses import replace

from commlib.collectives.call import Call
from commlib.collectives.device.staging_queue import OnWait, Run
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.paths import Path, Verb, compile_call
from commlib.devices.protocol import Device
from commlib.group.group import Group
from commlib.runtime.compiled_call import CompiledCall
from commlib.schedule import algorithms


class CudaAware:
    """The device path of messages from device memory."""

    name, only_queues = "messages", False

    def __init__(self, paths: tuple[Path, ...], group: Group, device: Device) -> None:
        self._paths, self._group, self._device = paths, group, device

    @property
    def is_open(self) -> bool:
        return self._group.transport.accepts(self._device.name)

    @property
    def refusal(self) -> str:
        kind = self._device.name
        return "" if self.is_open else f"{kind}: MPI does not accept memory of this device (see COMMLIB_CUDA_AWARE)"

    def takes(self, verb: Verb, call: Call) -> bool:
        named = self._named(call)
        return self.is_open and (named is None or named.takes_devices)

    def does(self, verb: Verb, call: Call) -> bool:
        """Return whether it can run a call by exactly the algorithm that the call names."""
        named = self._named(call)
        if named is None:
            return call.algorithm in algorithms(verb.name)
        return named.takes_devices and not named.refusal(self._group, verb, call)

    def open(self, text: str, on_wait: OnWait) -> bool:
        return self.is_open

    def run(self, verb: Verb, call: Call) -> Run:
        group = self._group
        call = replace(call, algorithm="auto") if call.algorithm == self.name else call
        if self._named(call) is None:
            direct: CompiledCall = MessageCall(group, call.text, verb.messages(group, call))
        else:
            direct = compile_call(self._paths, group, verb, call)
        return lambda x, target, _: direct.perform(x, target)

    def _named(self, call: Call) -> Path | None:
        return next((path for path in self._paths if path.name and path.name == call.algorithm), None)
