"""Shared buffers: find those that stages on several ranks have and change, each a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.pipeline.tied import on_several


class SharedBuffers:
    """The buffers of this rank that other ranks have, too: tables and masks may be such, running statistics not."""

    def __init__(self, parts: Sequence[nn.Module], placement: Sequence[int], rank: int) -> None:
        names = {id(buffer): name for part in reversed(parts) for name, buffer in part.named_buffers()}
        shared = on_several([part.buffers() for part in parts], placement)
        own = {id(buffer): (names[id(buffer)], ranks) for buffer, ranks in shared if rank in ranks}
        modules = {id(module): module for part in parts for module in part.modules()}.values()
        self._places = [
            (module, key, *own[id(buffer)])
            for module in modules
            for key, buffer in module._buffers.items()
            if id(buffer) in own
        ]

    def unchanged(self) -> AbstractContextManager[None]:
        """Raise UsageError if one is changed within: what the stages of other ranks do to it is not in it."""
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
                f"({', '.join(changed)}), of which each rank has its own: one process would change {name} in all of "
                "these uses. Give each use a layer of its own, or let split= put all uses into one stage"
            )


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None else buffer._version
