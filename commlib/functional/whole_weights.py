"""Whole weights beside divided ones: their gradients are the same on all ranks of the axis, or ranks part.

What comes of that is seen by nobody: each rank trains another model. A norm of this rank's gradients alone by which all
are clipped, other batches or seeds along the axis, values from outside of which a rank has a part of the gradient: all
of it shows here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.functional.axis import Axis

EVERY = 64
"""Steps from one comparison to the next, after that many; those before are the first, and powers of two."""
_TOLERANCES = {"float64": 1e-7, "float32": 1e-3}
_OF_HALVES, _OF_A_CODEC = 5e-2, 0.2
MOST = 2**16
"""Elements of one gradient that are looked at."""


def is_due(step: int) -> bool:
    """Return whether gradients are compared before a step, of those from 1 on: seldom, so that it costs nothing."""
    return step % EVERY == 0 if step > EVERY else step & (step - 1) == 0


def check_whole(what: str, axis: Axis, names: Sequence[str], squares: Sequence[float], dtypes: Sequence[str]) -> None:
    """Compare the gradients of whole weights by their sums of squares. Collective over the axis: one small message.

    what: steps. names, squares, dtypes: of each, the same weights in the same order on all ranks. Nothing is said of
    what is not finite. Raises MismatchError on all ranks, with the weight that differs most.
    """
    if axis.size == 1 or not names:
        return
    everyone: Array = axis.comm.all_gather(np.array([squares], np.float64))
    if (found := worst_of(everyone, dtypes, axis.codec is not None)) is None:
        return
    worst, least, most = found
    norms = np.sqrt(everyone[:, worst])
    raise MismatchError(
        f"{what} on rank {axis.rank} of {axis.comm.name}: ranks have different gradients of a weight that is whole on "
        f"each, and would part: that of {names[worst]} has norm {norms[least]:.3g} on rank {least} and "
        f"{norms[most]:.3g} on rank {most}. Ranks of an axis of divided layers need the same batches and seeds; "
        "clip by the norm of whole weights (clip_grad_norm, clip_by_global_norm with variables=), not by one of this "
        "rank's parts; and let values of which gradients are needed enter divided layers through a Column, or "
        "Replicate(into_sharded=True)"
    )


def worst_of(squares: Array, dtypes: Sequence[str], has_codec: bool = False) -> tuple[int, int, int] | None:
    """Return which gradient differs most, and the ranks with the least and the largest; None if all are the same.

    squares: [ranks, gradients]. Nothing is said of what is not finite.
    """
    if not squares.size or not np.isfinite(squares).all():
        return None
    norms = np.sqrt(squares)
    low, high = norms.min(0), norms.max(0)
    tolerance = _OF_A_CODEC if has_codec else max(_TOLERANCES.get(dtype, _OF_HALVES) for dtype in dtypes)
    # What is zero but for rounding differs by as much as it has.
    apart = (high - low) / np.maximum(high, max(high.max() / 100, np.finfo(np.float64).tiny))
    worst = int(apart.argmax())
    if apart[worst] <= tolerance:
        return None
    return worst, int(norms[:, worst].argmin()), int(norms[:, worst].argmax())
