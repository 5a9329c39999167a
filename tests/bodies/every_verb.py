"""Every verb of a communicator in every way to call it, each on its own small arrays; and a check of the recorder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from commlib.observe.recorder import Event, Phase, Record

SIGNATURES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "all_reduce": lambda comm: (np.ones(3, np.float32),),
    "reduce_scatter": lambda comm: (np.ones((2 * comm.size, 2), np.float32),),
    "reduce": lambda comm: (np.ones(3, np.float32),),
    "broadcast": lambda comm: (np.ones(3, np.float32),),
    "all_gather": lambda comm: (np.ones(3, np.float32),),
    "all_gather_v": lambda comm: (np.ones(comm.rank + 1, np.float32),),
    "gather": lambda comm: (np.ones(3, np.float32),),
    "scatter": lambda comm: (np.ones(2 * comm.size, np.float32),),
    "all_to_all": lambda comm: (np.ones(2 * comm.size, np.float32),),
    "all_to_all_v": lambda comm: (np.ones(comm.size, np.float32), [1] * comm.size),
    "barrier": lambda comm: (),
}
OBJECTS = {"broadcast_object": lambda comm: ("x",), "all_gather_object": lambda comm: ("x",)}

Call = Callable[[], Any]


def _waited(start: Callable[..., Any], *arguments: Any) -> Any:
    return start(*arguments).wait()


def calls(comm: Any) -> list[tuple[str, str, Call]]:
    """Return (verb, way, call) of all collectives; the same on all ranks. Large ones too: they take other paths."""
    result: list[tuple[str, str, Call]] = []
    for verb, arguments in SIGNATURES.items():
        values = arguments(comm)
        plan = None if verb == "all_to_all_v" else getattr(comm, f"plan_{verb}")(*values)
        result.append((verb, "blocking", partial(getattr(comm, verb), *values)))
        result.append((verb, "async", partial(_waited, getattr(comm, f"{verb}_async"), *values)))
        if plan is not None:
            result += [(verb, "plan", plan), (verb, "started plan", partial(_waited, plan.start))]
    for verb, arguments in OBJECTS.items():
        values = arguments(comm)
        result.append((verb, "blocking", partial(getattr(comm, verb), *values)))
        result.append((verb, "async", partial(_waited, getattr(comm, f"{verb}_async"), *values)))
    large = np.ones(100_000, np.float32)
    result.append(("all_reduce", "large", lambda: comm.all_reduce(large)))
    result.append(("split", "blocking", lambda: comm.split(0)))
    result.append(("empty", "blocking", lambda: comm.empty(4)))
    return result


def phases(events: list[Event]) -> dict[Record, list[Phase]]:
    """Return the phases of each operation, in order."""
    result: dict[Record, list[Phase]] = {}
    for event in events:
        result.setdefault(event.record, []).append(event.phase)
    return result


def check_one_call(comm: Any, events: list[Event], verb: str, way: str, number: int) -> None:
    """Check the events of one call in its group: one operation, from its start to its end, with its number."""
    operations = phases([event for event in events if event.group == comm.group.name])
    assert len(operations) == 1, (verb, way, events)
    ((record, recorded),) = operations.items()
    assert (record.verb, record.group, record.sequence) == (verb, comm.group.name, number), (way, record)
    assert recorded[-1] is Phase.END and record.error == "", (way, recorded)
    started = [phase for phase in recorded if phase not in (Phase.ROUND, Phase.END)]
    allowed = {
        "blocking": [[Phase.RUN], [Phase.QUEUED, Phase.RUN]],  # calls that block in MPI run on the thread
        "large": [[Phase.RUN]],
        "plan": [[Phase.RUN]],
        "async": [[Phase.QUEUED, Phase.RUN], [Phase.BEGUN], [Phase.BEGUN, Phase.RUN]],
        "started plan": [[Phase.QUEUED, Phase.RUN], [Phase.BEGUN], [Phase.BEGUN, Phase.RUN]],
    }
    assert started in allowed[way], (verb, way, recorded)
    times = [event.time for event in events if event.record is record]
    assert times == sorted(times)
    assert (record.queued or record.began) <= record.began <= record.ended
