"""The contender 'commlib': a verb of this library on a case's arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

from commlib.bench.cases import Case
from commlib.bench.measure import Call


def call(comm: Any, case: Case, *, algorithm: str = "auto", plan: bool = False, asynchronous: bool = False) -> Call:
    """Return what runs the verb once and waits for it. asynchronous: on the progress thread."""
    arguments, options = _arguments(comm, case)
    if case.verb.has_algorithms:
        options["algorithm"] = algorithm
    if plan:
        prepared = comm.plan_all_reduce(*arguments, **options)
        return (lambda: prepared.start().wait()) if asynchronous else prepared
    if asynchronous:
        start = partial(getattr(comm, f"{case.verb.name}_async"), *arguments, **options)
        return lambda: start().wait()
    return partial(getattr(comm, case.verb.name), *arguments, **options)


def _arguments(comm: Any, case: Case) -> tuple[list[Any], dict[str, Any]]:
    if case.verb.name == "barrier":
        return [], {}
    if case.verb.name == "send_recv":
        return [case.x, (comm.rank + 1) % comm.size, case.out, (comm.rank - 1) % comm.size], {}
    arguments: list[Any] = [case.x]
    if case.verb.reduces:
        arguments.append(case.op)
    if case.verb.rooted:
        arguments.append(case.root)
    return arguments, {} if case.verb.name == "broadcast" else {"out": case.out}
