"""Shard marks in state dicts: each tensor has a mark of its shard, and a file stores a description of it.

A file contains no communicator. Values that a rank saves by itself are for the same rank of an equally large group:
another rank would mistake the shard for its own, which has the same shape.
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
"""The attribute of tensors that identifies their shard."""


class ShardMark:
    """The shard in a tensor of a state dict. A file has a description of it that `torch.load` accepts."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __deepcopy__(self, memo: Any) -> ShardMark:
        return self

    def __reduce__(self) -> Any:
        axis = self.shard.axis
        if axis.size > 1:
            warnings.warn(
                f"rank {axis.rank} of {axis.comm.name} saves its own shards of weights, which only the same rank of "
                "an equally large group can load: gather_state_dict(model) returns full weights",
                stacklevel=2,
            )
        return OrderedDict, (list(_words(self.shard).items()),)


@functools.cache
def watch_files() -> None:
    """Make safetensors refuse shards from now on: its file format cannot describe them."""
    if importlib.util.find_spec("safetensors") is None:
        return
    files = importlib.import_module("safetensors.torch")
    for name in ("_evaluate_tensors_for_save", "_flatten", "save", "save_file"):  # a later version may lack some
        if hasattr(files, name):
            setattr(files, name, _refusing_parts(getattr(files, name)))


def _refusing_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(tensors: Any, *args: Any, **options: Any) -> Any:
        for name, value in tensors.items() if isinstance(tensors, Mapping) else ():
            mark = getattr(value, MARK, None)
            shard = mark.shard if isinstance(mark, ShardMark) else mark
            if isinstance(shard, Shard) and shard.axis.size > 1:
                raise UsageError(
                    f"{name} on rank {shard.axis.rank} of {shard.axis.comm.name} is a shard of "
                    f"{list(shard.sharding.shape)}, which a safetensors file cannot describe: call state = "
                    "gather_state_dict(model) on all ranks, and save it on one of them, for example with "
                    "save_pretrained(folder, state_dict=state)"
                )
        return function(tensors, *args, **options)

    return called


def mark_part(value: Tensor, shard: Shard) -> None:
    """Mark a saved tensor with its shard."""
    setattr(value, MARK, ShardMark(shard))


def check_part(name: str, value: Tensor, shard: Shard) -> None:
    """Raise UsageError for a loaded value that is marked as another shard than `shard`."""
    mark = getattr(value, MARK, None)
    saved = _words(mark.shard) if isinstance(mark, ShardMark) else mark if isinstance(mark, dict) else None
    expected = _words(shard)
    if saved is None or saved == expected or saved.get("size") == 1:
        return
    raise UsageError(
        f"{name} on rank {shard.axis.rank} of {shard.axis.comm.name}: the state has {_text(saved)}, expected "
        f"{_text(expected)}: load the state that this rank saved, or the result of gather_state_dict(), which any "
        "rank can load"
    )


def _words(shard: Shard) -> dict[str, Any]:
    return {"rank": shard.axis.rank, "size": shard.axis.size, "sharding": repr(shard.sharding)}


def _text(words: Any) -> str:
    return f"the shard of rank {words.get('rank')} of {words.get('size')} by {words.get('sharding')}"
