"""Agreement: what one rank finds wrong is raised on all of them, so that none waits for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.data_parallel.parameter_check import Gathers, check_agreement
from commlib.errors import CommlibError, MismatchError, UsageError

_T = TypeVar("_T")


def together(comm: Gathers, run: Callable[[], _T]) -> _T:
    """Return what `run` returns here; if it raises on any rank, raise on all. Collective.

    All raise UsageError, with the message of the first rank that has one, and the ranks that do; but a rank on which
    something else was raised raises that. What a group itself has raised, as MismatchError, is raised at once,
    and so is what `run` raised here while other ranks made other calls.
    """
    raised: Exception | None = None
    try:
        result = run()
    except Exception as error:
        if isinstance(error, CommlibError) and not isinstance(error, UsageError):
            raise
        raised = error
    try:
        everyone = comm.all_gather_object("" if raised is None else _said(raised))
    except MismatchError as error:  # a rank on which nothing was wrong had other calls to make first
        raise error if raised is None else raised from None
    text = next((said for said in everyone if said), "")
    if not text:
        return result
    ranks = [rank for rank, said in enumerate(everyone) if said == text]
    if raised is not None and (len(ranks) == comm.size or not isinstance(raised, UsageError)):
        raise raised
    raise UsageError(f"{text} (on ranks {ranks} of {comm.size})") from raised


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"


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
