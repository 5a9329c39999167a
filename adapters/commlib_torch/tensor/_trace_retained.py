"""RetainedValues: find the values that a model still holds after its call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from commlib.tensor_parallel.recording import StepRecording
from commlib_torch.tensor._held_tensors import find_held
from commlib_torch.tensor._nested_tensors import tensors_in


class RetainedValues:
    """The values of a recording that something other than the model's results holds, also those made inside leaves."""

    def __init__(self, recording: StepRecording) -> None:
        self._recording = recording
        self.looks_inside = False
        """Whether the running leaf has a user-defined forward, which is not traced but may store values."""
        self.inner: list[Tensor] = []
        """Tensors made inside such leaves."""
        self._calls: list[tuple[list[int], str, str]] = []
        """For each of these: the input values of its leaf, the operation, and the line."""
        self._written: dict[int, set[int]] = {}
        """Values written into the memory of others, by memory."""

    def note_call(self, text: str, inputs: list[Tensor]) -> None:
        """Record the leaf call that made a tensor inside, except its inputs and outputs."""
        known = len(self._calls)
        self.inner[known:] = [one for one in self.inner[known:] if not self._recording.has_number(one)]
        if more := len(self.inner) - known:
            self._calls += [(list(map(self._recording.number, inputs)), text, self._recording.line())] * more

    def note_written(self, tensor: Tensor) -> None:
        """Note that the current value of a tensor was written into its memory."""
        self._written.setdefault(_storage(tensor), set()).add(self._recording.number(tensor))

    def clear(self) -> None:
        """Drop all tensors."""
        self.inner.clear()
        self._calls.clear()

    def find(self, model: nn.Module, args: Any, options: Any, result: Any) -> set[int]:
        """Return the values that are still referenced after the call, including those written into memory."""
        tensors = self._recording.tensors
        values = {id(tensor): self._values(tensor) for tensor in tensors}
        returned = set(map(id, tensors_in(result)))
        wanted = {key for key, is_wanted in values.items() if is_wanted and key not in returned}
        roots = (vars(model), args, options, result)
        outside = {id(one) for one in tensors if self._recording.is_from_outside(one)}
        held = find_held(tensors, wanted, outside, roots)
        return {value for key in held for value in values[key]} | self._held_inside(roots)

    def _held_inside(self, roots: Any) -> set[int]:
        """Return the values made inside leaves that are still referenced; they are recorded only now."""
        held = find_held(self.inner, set(map(id, self.inner)), set(), roots)
        for at in [at for at, one in enumerate(self.inner) if id(one) in held]:
            numbers, text, place = self._calls[at]
            inputs = [self._recording.tensors[number] for number in numbers]
            self._recording.add("", "unknown", inputs, [self.inner[at]], text=f"what {text} makes", place=place)
        return {self._recording.number(one) for one in self.inner if id(one) in held}

    def _values(self, tensor: Tensor) -> set[int]:
        """Return the values in a tensor's memory: the tensor, and those written into it."""
        own = set() if self._recording.is_from_outside(tensor) else {self._recording.number(tensor)}
        if self._written:
            own |= self._written.get(_storage(tensor), set())
        return self._recording.produced.intersection(own)


def _storage(tensor: Tensor) -> int:
    """Return an identity of a tensor's memory; 0 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # for example a sparse tensor
        return 0
