"""One file: warn where Keras' ModelCheckpoint may write the same one on several ranks, which destroy it."""

from __future__ import annotations

import functools
import os
import re
import warnings
from typing import Any

from commlib import horovod as core
from commlib.horovod.callbacks import BestModel
from commlib_tensorflow._keras_reduction import Distributed, replace


def watch_checkpoints(checkpoint: Any) -> None:
    """Let this ModelCheckpoint, of either Keras, warn on ranks that train with others. Nothing is lost without."""
    if "_get_file_path" in vars(checkpoint):  # private
        replace(checkpoint, "_get_file_path", _warning)


def _warning(original: Any) -> Any:
    @functools.wraps(original)
    def _get_file_path(self: Any, *arguments: Any, **options: Any) -> Any:
        path = original(self, *arguments, **options)
        optimizer = getattr(self.model, "optimizer", None)
        trains_with_others = isinstance(getattr(optimizer, "inner_optimizer", optimizer), Distributed)
        if trains_with_others and not isinstance(self, BestModel):
            _warn(os.fspath(path), str(self.filepath))
        return path

    return _get_file_path


def _warn(path: str, pattern: str) -> None:
    rank = core.running().rank
    # What each rank calls otherwise has the rank's number in it, which Keras' own fields ({epoch}) have not.
    if rank and rank not in map(int, re.findall(r"\d+", re.sub(r"\{.*?\}", "", pattern))):
        warnings.warn(
            f"ModelCheckpoint writes {path} on rank {rank}: if other ranks write the same file, they destroy it. Give "
            "it to rank 0 alone, or a path with its number to each rank, or take BestModelCheckpoint, which does so",
            stacklevel=2,
        )
