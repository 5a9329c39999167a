"""ArgumentSlices: record the arguments of modules that a plan may slice, and slice them in one rank's run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from commlib.tensor_parallel.recording import StepRecording, replace_attribute
from commlib.tensor_parallel.styles import Slice
from commlib_torch.tensor import _arguments
from commlib_torch.tensor._arguments import SliceHook, slicings_in
from commlib_torch.tensor._trace_stack import CallStack


class ArgumentSlices:
    """Slices of a model's arguments. whole, ranks: as for `TraceRecorder`."""

    def __init__(
        self,
        recording: StepRecording,
        stack: CallStack,
        model: nn.Module,
        styles: Collection[str],
        *,
        whole: bool,
        ranks: tuple[int, int] | None,
    ) -> None:
        self._recording, self._stack, self._whole, self._ranks = recording, stack, whole, ranks
        divided = slicings_in(model)
        self._hooks = {id(slicing): name for name, slicing in divided.items()}
        named = styles if isinstance(styles, Mapping) else {}
        slices = {name: style for name, style in named.items() if isinstance(style, Slice)}
        self._styles = {name: style for name, style in slices.items() if name not in divided}
        """Arguments that the model does not shard itself."""
        self._has_styles = bool(styles)

    def watch(self) -> AbstractContextManager[None]:
        """Record the slices that the model's own hooks make, within the context."""
        return replace_attribute(_arguments, "part_of", self._part_of)

    def apply(self, name: str, module: nn.Module, args: Any, options: Any) -> Any:
        """Record arguments that a plan may slice, and slice them if this run is one rank's."""
        if self._stack.units or (self._has_styles and not self._styles):
            return None
        change: dict[str, Any] = {}
        for argument, tensor in _arguments.tensor_arguments(module, args, options).items():
            path = f"{name}.{argument}" if name else argument
            if path in self._styles or (not self._has_styles and self._is_fixed(tensor)):
                change[argument] = partial(self._slice, path, self._styles.get(path), self._ranks)
        return _arguments.replace_arguments(module, args, options, change) if change else None

    def _is_fixed(self, tensor: Tensor) -> bool:
        number = self._recording.number_of(tensor)
        learned = number is None or number in self._recording.learned
        return not learned and tensor.dim() > 2 and tensor.is_floating_point()

    def _slice(self, path: str, style: Slice | None, ranks: tuple[int, int] | None, tensor: Tensor) -> Tensor:
        """Return this rank's slice of an argument, or all of it, as a separate value."""
        if self._stack.units:
            return tensor if style is None or ranks is None else _arguments.own_part(tensor, style, *ranks, path)
        with self._stack.pause():
            if style is None or ranks is None:
                part = tensor.view_as(tensor)
            else:
                part = _arguments.own_part(tensor, style, *ranks, path)
                part = part.view_as(part)
        self._recording.add(path, "slice", [tensor], [part], text="an argument", place=self._recording.line())
        return part

    def _part_of(self, tensor: Tensor, slicing: SliceHook) -> Tensor:
        path, ranks = self._hooks[id(slicing)], (slicing.axis.rank, slicing.axis.size)
        return self._slice(path, None if self._whole else slicing.style, ranks, tensor)
