"""Save and load the compression state of each gradient, and the point from which compression resumes.

Residuals belong to this rank, and are useless on another. Residuals that another rank saved, or a job of another size,
are dropped with a warning. State that is the same on all ranks is loaded from any of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from commlib.compress.scheme import COMMON
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.resume_point import ResumePoint
from commlib.dtypes import Array

log = logging.getLogger("commlib")


def save_compression(reducer: GradientReducer, convert: Callable[[Array], Any]) -> dict[str, Any]:
    """Return this rank's compression state, with arrays converted by `convert`; {} if there is none."""
    state, point = reducer.compression.state(), reducer.resume_point
    if not state and point is None:
        return {}
    return {
        "course": None if point is None else point.save(),
        "rank": reducer.ranks.rank,
        "size": reducer.ranks.size,
        "compression": reducer.options.describe(),
        "parameters": {name: {what: convert(array) for what, array in known.items()} for name, known in state.items()},
    }


def load_compression(reducer: GradientReducer, saved: dict[str, Any], convert: Callable[[Any], Array]) -> None:
    """Load what `save_compression` returned on this rank; `convert` makes arrays again."""
    if saved["compression"] != reducer.options.describe():
        log.warning("compression starts without residuals: the saved ones belong to %s", saved["compression"])
        return
    mine = reducer.ranks.rank, reducer.ranks.size
    theirs = saved["rank"], saved["size"]
    if mine != theirs:
        log.warning(
            "compression starts without residuals: rank %d of %d saved the state, but this is rank %d of %d; save and "
            "load the optimizer's state on every rank to keep them",
            *theirs,
            *mine,
        )
    if mine[1] != theirs[1]:
        return
    reducer.compression.load(
        {
            name: {what: convert(value) for what, value in known.items() if mine == theirs or what in COMMON}
            for name, known in saved["parameters"].items()
        }
    )
    course = saved.get("course")  # states of earlier versions have none
    if course is not None and reducer.compression.scheme is not None:
        resume_point = ResumePoint.load(course)
        if resume_point.scheme == reducer.compression.scheme.name:
            reducer.resume(resume_point)
