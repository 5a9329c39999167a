"""The state of the random generators of Python and numpy: a resumed rank draws what it would have drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def state() -> dict[str, Any]:
    """Return their state, as `packed` takes it."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def load(saved: dict[str, Any]) -> None:
    """Take back what `state` has returned, and `packed` has kept."""
    random.setstate(saved["python"])
    numpy = saved["numpy"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].array()}})
