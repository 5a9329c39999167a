"""Arguments of verbs that have two forms: ordered with `ranks=`, and by name without."""

from __future__ import annotations

from typing import Any

from commlib.errors import UsageError


def choose_root(root_rank: int | None, root: int | None) -> int:
    """Return the root passed as `root_rank` or `root`, 0 by default."""
    if root_rank is not None and root is not None:
        raise UsageError(f"root_rank={root_rank} and root={root} are two names of one argument: give only one")
    return root_rank if root_rank is not None else root or 0


def check_named(algorithm: str) -> None:
    """Raise UsageError for an argument that only ordered verbs accept."""
    if algorithm != "auto":
        raise UsageError("algorithm= selects an algorithm of the ordered verb: give ranks= too")


def check_ordered(name: str | None, process_set: Any) -> None:
    """Raise UsageError for arguments that only operations by name accept."""
    if name is not None or process_set is not None:
        raise UsageError("ranks= selects the ordered verb on those ranks: give neither name nor process_set")
