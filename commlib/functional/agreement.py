"""Agreement: what one rank finds wrong is raised on all of them, so that none waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from commlib.data_parallel.parameter_check import Gathers
from commlib.errors import CommlibError, UsageError

_T = TypeVar("_T")


def together(comm: Gathers, run: Callable[[], _T]) -> _T:
    """Return what `run` returns here; if it raises on any rank, raise on all. Collective.

    All raise UsageError, with the message of the first rank that has one, and the ranks that do; but a rank on which
    something else was raised raises that. What a group itself has raised, as MismatchError, is raised at once.
    """
    raised: Exception | None = None
    try:
        result = run()
    except Exception as error:
        if isinstance(error, CommlibError) and not isinstance(error, UsageError):
            raise
        raised = error
    everyone = comm.all_gather_object("" if raised is None else _said(raised))
    text = next((said for said in everyone if said), "")
    if not text:
        return result
    ranks = [rank for rank, said in enumerate(everyone) if said == text]
    if raised is not None and (len(ranks) == comm.size or not isinstance(raised, UsageError)):
        raise raised
    raise UsageError(f"{text} (on ranks {ranks} of {comm.size})") from raised


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
