"""Load what lanes are made of when the first message goes by one: few jobs send any, and it is compiled code."""

from __future__ import annotations

import importlib
import threading

_MODULE = "commlib.p2p.lanes.lane_receive"  # which imports the others
_is_loaded = False


def load() -> None:
    """Load it, once, in a thread of its own: a signal handler that raised in numba's midst would leave it broken."""
    if not _is_loaded:
        thread = threading.Thread(target=_load, name="commlib-loading", daemon=True)
        thread.start()
        thread.join()
        importlib.import_module(_MODULE)  # raises what may have gone wrong there


def _load() -> None:
    global _is_loaded
    importlib.import_module(_MODULE)
    _is_loaded = True
