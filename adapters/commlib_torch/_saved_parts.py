"""Parts in state dicts: each knows of which weight it is, and in a file it still says so in words.

No communicator goes into a file. What a rank saves by itself is for the same rank of as many: another one would take it
for its own part, which is of the same shape.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from commlib.errors import UsageError
from commlib.sharding.shards import Shard

MARK = "commlib_shard"
"""The attribute of tensors that says what they are parts of."""


class Part:
    """What a tensor of a state dict is a part of. A file has words of it, that `torch.load` takes."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __deepcopy__(self, memo: Any) -> Part:
        return self

    def __reduce__(self) -> Any:
        axis = self.shard.axis
        if axis.size > 1:
            warnings.warn(
                f"rank {axis.rank} of {axis.comm.name} saves its own parts of weights, for the same rank of as many "
                "alone: gather_state_dict(model) returns them whole",
                stacklevel=2,
            )
        return OrderedDict, (list(_words(self.shard).items()),)


@functools.cache
def watch_files() -> None:
    """Let safetensors refuse parts, from now on: its files have no place for what they are parts of."""
    if importlib.util.find_spec("safetensors") is None:
        return
    files = importlib.import_module("safetensors.torch")
    for name in ("_evaluate_tensors_for_save", "_flatten", "save", "save_file"):  # who has the last has not these
        if hasattr(files, name):
            setattr(files, name, _refusing_parts(getattr(files, name)))


def _refusing_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(tensors: Any, *args: Any, **options: Any) -> Any:
        for name, value in tensors.items() if isinstance(tensors, Mapping) else ():
            mark = getattr(value, MARK, None)
            shard = mark.shard if isinstance(mark, Part) else mark
            if isinstance(shard, Shard) and shard.axis.size > 1:
                raise UsageError(
                    f"{name} on rank {shard.axis.rank} of {shard.axis.comm.name} is a part of "
                    f"{list(shard.sharding.shape)}, which a file of safetensors does not say: let all ranks call "
                    "state = gather_state_dict(model), and one of them save that, as by save_pretrained(folder, "
                    "state_dict=state)"
                )
        return function(tensors, *args, **options)

    return called


def mark_part(value: Tensor, shard: Shard) -> None:
    """Let a tensor that is saved know what it is a part of."""
    setattr(value, MARK, Part(shard))


def check_part(name: str, value: Tensor, shard: Shard) -> None:
    """Raise UsageError for a value that is loaded and says that it is another part than the one of `shard`."""
    mark = getattr(value, MARK, None)
    saved = _words(mark.shard) if isinstance(mark, Part) else mark if isinstance(mark, dict) else None
    expected = _words(shard)
    if saved is None or saved == expected or saved.get("size") == 1:
        return
    raise UsageError(
        f"{name} on rank {shard.axis.rank} of {shard.axis.comm.name}: the state has {_text(saved)}, expected "
        f"{_text(expected)}: load what this rank saved, or what gather_state_dict() returned, which any rank takes"
    )


def _words(shard: Shard) -> dict[str, Any]:
    return {"rank": shard.axis.rank, "size": shard.axis.size, "sharding": repr(shard.sharding)}


def _text(words: Any) -> str:
    return f"the part of rank {words.get('rank')} of {words.get('size')} by {words.get('sharding')}"
