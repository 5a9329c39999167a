"""Agreement: what one rank finds wrong is raised on all of them, so that none waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from commlib.data_parallel.parameter_check import Gathers
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
