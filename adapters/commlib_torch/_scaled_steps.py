"""Scaled steps: find the GradScaler of an optimizer's step, and check that it covers all necessary ranks.

If ranks have different weights, one rank alone may find an infinity: it skips the step and halves its scale, unless all
ranks do. This check does not run on a rank that skips, but on all others, so ranks cannot diverge silently.
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
"""The methods in which a scaler looks for infinities; a subclass may query other ranks in them."""


def scaler_of_step() -> torch.amp.GradScaler | None:
    """Return the GradScaler whose `step` is calling; None if there is none, or if it is disabled."""
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
    """Raise UsageError unless a scaler checks all of the given ranks (global) for infinities.

    what: the objects that differ among these ranks. advice: the right scaler.
    """
    if len(ranks) < 2:
        return
    if isinstance(scaler, GradScaler):
        covered = world_ranks(scaler.comm)
        if lacking := sorted(set(ranks) - set(covered)):
            raise UsageError(
                f"GradScaler: it queries global ranks {list(covered)} whether to skip a step, but ranks {lacking} have "
                f"other {what}: some would step and some not. Use {advice}"
            )
    elif all(getattr(type(scaler), name) is getattr(torch.amp.GradScaler, name) for name in _ASKS):
        raise UsageError(
            "torch.amp.GradScaler looks for infinities in this rank's gradients only, but global ranks "
            f"{sorted(ranks)} have different {what}: some would step and some not. Use {advice}"
        )
