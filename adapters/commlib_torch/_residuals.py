"""What compression remembers of each gradient, in an optimizer's `state_dict`, and where it goes on.

Residuals are this rank's own. Another rank's would help nobody, so those that were saved by another rank, or in a job
of another size, are left aside with a warning. What is the same on all ranks is taken from any rank's state.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from commlib.compress.scheme import COMMON
from commlib_torch._bridge import to_array
from commlib_torch._course import Course
from commlib_torch._gradients import Gradients

log = logging.getLogger("commlib")

KEY = "commlib"
"""Where it is in a `state_dict`; plain optimizers ignore that."""


def save_compression(gradients: Gradients) -> dict[str, Any]:
    """Return what is remembered on this rank as tensors, or {} if there is nothing."""
    state, course = gradients.compression.state(), gradients.course
    if not state and course is None:
        return {}
    return {
        "course": None if course is None else course.save(),
        "rank": gradients.comm.rank,
        "size": gradients.comm.size,
        "compression": gradients.options.describe(),
        "parameters": {
            name: {what: torch.from_numpy(array) for what, array in known.items()} for name, known in state.items()
        },
    }


def load_compression(gradients: Gradients, saved: dict[str, Any]) -> None:
    """Take over what `save_compression` returned on this rank."""
    if saved["compression"] != gradients.options.describe():
        log.warning("compression starts without residuals: they are of %s", saved["compression"])
        return
    mine = gradients.comm.rank, gradients.comm.size
    theirs = saved["rank"], saved["size"]
    if mine != theirs:
        log.warning(
            "compression starts without residuals: those in the state are of rank %d of %d, this is rank %d of %d; "
            "save and load the optimizer's state on every rank to keep them",
            *theirs,
            *mine,
        )
    if mine[1] != theirs[1]:
        return
    gradients.compression.load(
        {
            name: {what: to_array(tensor) for what, tensor in known.items() if mine == theirs or what in COMMON}
            for name, known in saved["parameters"].items()
        }
    )
    course = saved.get("course")  # states of earlier versions have none
    if course is not None and gradients.compression.scheme is not None:
        found = Course.load(course)
        if found.scheme == gradients.compression.scheme.name:
            gradients.resume(found)
