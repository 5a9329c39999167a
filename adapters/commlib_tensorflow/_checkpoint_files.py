"""Checkpoint files: warn if Keras' ModelCheckpoint may write the same file on several ranks, which corrupts it."""

from __future__ import annotations

import functools
import os
import re
import warnings
from typing import Any

from commlib import horovod as core
from commlib.horovod.callbacks import BestModel
from commlib_tensorflow._keras_reduction import DistributedMixin, replace


def watch_checkpoints(checkpoint: Any) -> None:
    """Make this ModelCheckpoint, of Keras 2 or 3, warn on ranks that train with others.

    A Keras without the hook only loses the warning.
    """
    if "_get_file_path" in vars(checkpoint):  # private
        replace(checkpoint, "_get_file_path", _wrap_get_file_path)


def _wrap_get_file_path(original: Any) -> Any:
    @functools.wraps(original)
    def _get_file_path(self: Any, *arguments: Any, **options: Any) -> Any:
        path = original(self, *arguments, **options)
        optimizer = getattr(self.model, "optimizer", None)
        trains_with_others = isinstance(getattr(optimizer, "inner_optimizer", optimizer), DistributedMixin)
        if trains_with_others and not isinstance(self, BestModel):
            _warn(os.fspath(path), str(self.filepath))
        return path

    return _get_file_path


def _warn(path: str, pattern: str) -> None:
    rank = core.require_world().rank
    # A path for each rank contains the rank's number; Keras' own fields ({epoch}) do not count.
    if rank and rank not in map(int, re.findall(r"\d+", re.sub(r"\{.*?\}", "", pattern))):
        warnings.warn(
            f"ModelCheckpoint writes {path} on rank {rank}: if several ranks write one file, they corrupt it. Use "
            "ModelCheckpoint on rank 0 alone, or give each rank a path with its number, or use BestModelCheckpoint",
            stacklevel=2,
        )
