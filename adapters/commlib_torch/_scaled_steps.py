"""Scaled steps: which GradScaler an optimizer's step comes from, and whether it has asked all ranks that it must.

Where ranks have different weights, one alone may find an infinity: it skips the step, and halves its scale, unless all
do. A rank that skips is not seen here. But all that do not are, so ranks cannot part without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType

import torch

from commlib.errors import UsageError
from commlib.sharding.shards import world_ranks
from commlib_torch.loss_scale import GradScaler

_STEP = torch.amp.GradScaler.step.__code__
_ASKS = ("_unscale_grads_", "unscale_")
"""With these a scaler looks for infinities: one of another class may ask other ranks there."""


def scaler_of_step() -> torch.amp.GradScaler | None:
    """Return the scaler in whose `step` the caller runs, None if there is none, or if it does nothing."""
    if torch.compiler.is_compiling():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None


def check_scaler(scaler: torch.amp.GradScaler, ranks: Collection[int], what: str, advice: str) -> None:
    """Raise UsageError unless a scaler asks all of some ranks, numbers of the world, whether one found an infinity.

    what: these ranks have that is different. advice: the scaler that is right.
    """
    if len(ranks) < 2:
        return
    if isinstance(scaler, GradScaler):
        asked = world_ranks(scaler.comm)
        if lacking := sorted(set(ranks) - set(asked)):
            raise UsageError(
                f"GradScaler: it asks ranks {list(asked)} of the world whether a step is skipped, but ranks {lacking} "
                f"have other {what}: some would step and some not. Use {advice}"
            )
    elif all(getattr(type(scaler), name) is getattr(torch.amp.GradScaler, name) for name in _ASKS):
        raise UsageError(
            f"torch.amp.GradScaler looks for infinities in this rank's gradients alone, but ranks {sorted(ranks)} of "
            f"the world have different {what}: some would step and some not. Use {advice}"
        )
