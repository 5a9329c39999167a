"""commlib: MPI-style communication for training neural networks, with thin adapters for PyTorch and TensorFlow.

    import commlib

    comm = commlib.init()
    mean = comm.all_reduce(gradient, "mean")

Importing it loads neither MPI nor a framework; `init` does.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from commlib.arguments import missing_attribute, nearest
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, StallError, TransportError, UsageError
from commlib.observing import mark_step, recorded, start_recording, statistics, stop_recording, timeline
from commlib.world import init, is_initialized, shutdown, world

if TYPE_CHECKING:
    from commlib import metrics
    from commlib.communicator import Communicator
    from commlib.mesh_groups import Mesh
    from commlib.observe.counters import Stats
    from commlib.preemption import Preemption
    from commlib.runtime.compiled_call import Plan
    from commlib.runtime.work import Work

__version__ = "0.1.0.dev0"

__all__ = [
    "CommlibError",
    "Communicator",
    "Mesh",
    "MismatchError",
    "PeerError",
    "Plan",
    "Preemption",
    "ShutdownError",
    "StallError",
    "Stats",
    "TransportError",
    "UsageError",
    "Work",
    "__version__",
    "init",
    "is_initialized",
    "mark_step",
    "metrics",
    "recorded",
    "shutdown",
    "start_recording",
    "statistics",
    "stop_recording",
    "timeline",
    "world",
]

# Loaded on first use: they import numpy and numba.
_LAZY = {
    "Communicator": "commlib.communicator",
    "Stats": "commlib.observe.counters",
    "Mesh": "commlib.mesh_groups",
    "Plan": "commlib.runtime.compiled_call",
    "Preemption": "commlib.preemption",
    "Work": "commlib.runtime.work",
}

if not TYPE_CHECKING:  # type checkers know the names

    def __getattr__(name: str) -> Any:
        if name == "metrics":
            return import_module("commlib.metrics")
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        raise _missing(name)


def _missing(name: str) -> AttributeError:
    if name.startswith("__") or any(map(os.path.exists, (f"{__path__[0]}/{name}{end}" for end in ("", ".py")))):
        # Python asks before it imports a submodule.
        return missing_attribute("module 'commlib'", name, ())
    from commlib.schedule.registry import verbs

    if verb := nearest(name, verbs()):
        return AttributeError(
            f"module 'commlib' has no attribute {name!r}: the verbs are methods of the communicator, "
            f"commlib.init().{verb}(...)"
        )
    return missing_attribute("module 'commlib'", name, __all__)
