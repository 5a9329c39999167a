"""Shared buffers: find buffers that stages on several ranks have and change, each in a separate copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.pipeline.tied_weights import find_owners


class SharedBuffers:
    """The buffers of this rank that other ranks also have: tables and masks are allowed, running statistics are not."""

    def __init__(self, parts: Sequence[nn.Module], placement: Sequence[int], rank: int) -> None:
        names = {id(buffer): name for part in reversed(parts) for name, buffer in part.named_buffers()}
        shared = find_owners([part.buffers() for part in parts], placement)
        own = {id(buffer): (names[id(buffer)], ranks) for buffer, ranks in shared if rank in ranks}
        modules = {id(module): module for part in parts for module in part.modules()}.values()
        self._places = [
            (module, key, *own[id(buffer)])
            for module in modules
            for key, buffer in module._buffers.items()
            if id(buffer) in own
        ]

    def check_unchanged(self) -> AbstractContextManager[None]:
        """Raise UsageError if one changes within the context: changes by stages of other ranks do not reach it."""
        return self._unchanged() if self._places else nullcontext()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        before = [(module._buffers[key], _version(module._buffers[key])) for module, key, *_ in self._places]
        yield
        changed = {
            name: ranks
            for (module, key, name, ranks), (buffer, version) in zip(self._places, before, strict=True)
            if module._buffers.get(key) is not buffer or _version(buffer) != version
        }
        if changed:
            name, ranks = next(iter(changed.items()))
            raise UsageError(
                f"pipeline: stages on ranks {', '.join(map(str, ranks))} use the same layer and change its buffers "
                f"({', '.join(changed)}), of which each rank has a copy: one process would change {name} in all of "
                "these uses. Give each use a separate layer, or use split= to put all uses into one stage"
            )


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None else buffer._version
