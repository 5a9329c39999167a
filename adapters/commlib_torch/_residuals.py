"""What compression remembers of each gradient, in an optimizer's `state_dict`.

It is this rank's own. Another rank's would help nobody, so a state that was saved by another rank, or in a job of
another size, is left aside with a warning.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from commlib_torch._bridge import to_array
from commlib_torch._gradients import Gradients

log = logging.getLogger("commlib")

KEY = "commlib"
"""Where it is in a `state_dict`; plain optimizers ignore that."""


def save_compression(gradients: Gradients) -> dict[str, Any]:
    """Return what is remembered on this rank as tensors, or {} if there is nothing."""
    state = gradients.compression.state()
    if not state:
        return {}
    return {
        "rank": gradients.comm.rank,
        "size": gradients.comm.size,
        "compression": gradients.options.describe(),
        "parameters": {
            name: {what: torch.from_numpy(array) for what, array in known.items()} for name, known in state.items()
        },
    }


def load_compression(gradients: Gradients, saved: dict[str, Any]) -> None:
    """Take over what `save_compression` returned on this rank."""
    mine = gradients.comm.rank, gradients.comm.size
    theirs = saved["rank"], saved["size"]
    if mine != theirs:
        log.warning(
            "compression starts without residuals: those in the state are of rank %d of %d, this is rank %d of %d; "
            "save and load the optimizer's state on every rank to keep them",
            *theirs,
            *mine,
        )
        return
    if saved["compression"] != gradients.options.describe():
        log.warning("compression starts without residuals: they are of %s", saved["compression"])
        return
    parameters = saved["parameters"].items()
    gradients.compression.load(
        {name: {what: to_array(tensor) for what, tensor in known.items()} for name, known in parameters}
    )
