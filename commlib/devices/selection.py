"""Selection: choose a device of one kind on every rank, or refuse on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.config.settings import ranks_text
from commlib.devices.arrays import device_named
from commlib.errors import UsageError


def select_device(kind: str, purpose: str, local_rank: int, gather: Callable[[Any], list[Any]]) -> Any:
    """Return this rank's device: for "cuda" the GPU it uses already, or that of its place on the node. Collective.

    purpose: what needs it, for the error. gather: all-gathers picklable values. Raises UsageError on all ranks if any
    has no such device; the text names these ranks.
    """
    device, refusal = None, ""
    try:
        if kind == "cuda":
            from commlib.devices.cuda import process

            if process.find_used() is None:
                process.choose(local_rank)
        device = device_named(kind, purpose)
    except UsageError as error:
        refusal = str(error)
    refusals = gather(refusal)
    if any(refusals):
        texts = []
        for text in dict.fromkeys(filter(None, refusals)):
            texts.append(f"{ranks_text([rank for rank, other in enumerate(refusals) if other == text])}: {text}")
        raise UsageError("; ".join(texts))
    return device
