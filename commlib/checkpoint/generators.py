"""Random generators: the state of Python's and numpy's, so a resumed rank draws the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def state() -> dict[str, Any]:
    """Return their state in a form that `packed` can write."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def load(saved: dict[str, Any]) -> None:
    """Restore the state from `state`, as `packed` has read it."""
    random.setstate(saved["python"])
    numpy = saved["numpy"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].array()}})
