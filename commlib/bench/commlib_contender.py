"""The contender 'commlib': a verb of this library on a case's arrays."""

from __future__ import annotations

from typing import Any

from commlib.bench.cases import Case
from commlib.bench.measure import Call


def call(comm: Any, case: Case, *, algorithm: str = "auto", plan: bool = False, asynchronous: bool = False) -> Call:
    """Return a function that runs the verb once and waits for it. asynchronous: on the progress thread."""
    if plan:
        prepared = _written_out(getattr(comm, f"plan_{case.verb.name}"), case, algorithm)()
        return (lambda: prepared.start().wait()) if asynchronous else prepared
    if asynchronous:
        start = _written_out(getattr(comm, f"{case.verb.name}_async"), case, algorithm)
        return lambda: start().wait()
    return _written_out(getattr(comm, case.verb.name), case, algorithm)


def _written_out(verb: Any, case: Case, algorithm: str) -> Call:
    """Return the call as users write it: `partial` or `**options` would make the smallest call a tenth slower."""
    x, out, op, root, name = case.x, case.out, case.op, case.root, case.verb.name
    if name == "barrier":
        return verb  # type: ignore[no-any-return]
    if name == "send_recv":
        right, left = (case.rank + 1) % case.size, (case.rank - 1) % case.size
        return lambda: verb(x, right, out, left)
    if name == "all_to_all_v":
        splits, takes = case.splits, case.takes
        return lambda: verb(x, splits, takes=takes, out=out)
    if name == "all_gather_v":
        return lambda: verb(x)
    if name in ("scan", "exscan"):
        return lambda: verb(x, op, out=out)
    if name == "reduce_scatter_v":
        counts = case.parts
        return lambda: verb(x, counts, op, out=out)
    if name == "broadcast":
        return lambda: verb(x, root, algorithm=algorithm)
    if name == "reduce":
        return lambda: verb(x, op, root, out=out, algorithm=algorithm)
    if case.verb.reduces:
        return lambda: verb(x, op, out=out, algorithm=algorithm)
    if case.verb.rooted:
        return lambda: verb(x, root, out=out, algorithm=algorithm)
    return lambda: verb(x, out=out, algorithm=algorithm)
