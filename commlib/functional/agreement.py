"""Agreement: what one rank finds wrong is raised on all of them, so that none waits for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.data_parallel.parameter_check import Gathers, check_agreement
from commlib.errors import UsageError

_T = TypeVar("_T")


def together(comm: Gathers, run: Callable[[], _T]) -> _T:
    """Return what `run` returns here; if it raises UsageError on any rank, raise it on all. Collective.

    The message is that of the first rank that has one, and says which ranks do.
    """
    raised: UsageError | None = None
    try:
        result = run()
    except UsageError as error:
        raised = error
    everyone = comm.all_gather_object("" if raised is None else str(raised))
    text = next((said for said in everyone if said), "")
    if not text:
        return result
    ranks = [rank for rank, said in enumerate(everyone) if said == text]
    if raised is not None and len(ranks) == comm.size:
        raise raised
    raise UsageError(f"{text} (on ranks {ranks} of {comm.size})") from raised


def digest_of(lines: Sequence[str]) -> int:
    """Return 63 bits that tell texts apart."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8]) >> 1


def told(comm: Communicator, what: str, lines: Sequence[str], number: int) -> tuple[int, ...]:
    """Return the number that each rank gives. Collective: one small message.

    Raises MismatchError on all ranks if `lines`, what they are about to call, differ.
    """
    everyone = comm.all_gather(np.array([[digest_of(lines), number]], np.int64))
    if len(set(everyone[:, 0].tolist())) > 1:
        check_agreement(comm, what, lines)
    return tuple(everyone[:, 1].tolist())
