"""Load the lane modules with the first lane message: few jobs send any, and their kernels take time to load."""

from __future__ import annotations

import importlib
import threading

_MODULE = "commlib.p2p.lanes.lane_receive"  # which imports the others
_is_loaded = False


def load() -> None:
    """Load the modules once, in a separate thread: a signal handler's exception inside numba would leave it broken."""
    if not _is_loaded:
        thread = threading.Thread(target=_load, name="commlib-loading", daemon=True)
        thread.start()
        thread.join()
        importlib.import_module(_MODULE)  # raises an import error of the thread


def _load() -> None:
    global _is_loaded
    importlib.import_module(_MODULE)
    _is_loaded = True
