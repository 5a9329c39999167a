"""Data of the examples that classify digits, 1797 images of 8 x 8 pixels, and why several ranks may be slower than one.

The images are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, under CC BY 4.0, in the order of the original.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np


def load_digits() -> tuple[Any, Any]:
    """Return the images, (1797, 8, 8) in float32 from 0 to 1, and their labels, 1797 numbers in int64."""
    with np.load(Path(__file__).with_suffix(".npz")) as data:
        return data["images"].astype(np.float32) / 16, data["labels"].astype(np.int64)


def explain_slowdown(ranks: int, seconds: float, alone: float, *, load: float, cores: int) -> str:
    """Return why `ranks` took `seconds`, longer than one process alone; "" if they did not.

    load: the machine's load average (processes that run or wait for a core). cores: those that the ranks may use.
    """
    if seconds <= alone:
        return ""
    slower = f"{ranks} ranks took {seconds / alone:.2f} times as long as one process"
    if ranks > cores:
        return (
            f"{slower}, because they share {cores} {'core' if cores == 1 else 'cores'}: start at most one rank a core."
        )
    if load > cores:
        return (
            f"{slower}, because the cores are busy: the load is {load:.1f} on {cores} cores, so other programs take "
            "turns with the ranks. In each step all ranks wait for the one that was interrupted; one process alone "
            f"waits for nobody. Run it again when the load is below {cores}."
        )
    return (
        f"{slower}, although the load is only {load:.1f} on {cores} cores: this network is small, and each step waits "
        "for communication longer than it saves computation."
    )


def find_load() -> tuple[float, int]:
    """Return this machine's load average over a minute, and the number of cores that the ranks may use."""
    return os.getloadavg()[0], len(os.sched_getaffinity(os.getppid()))  # a rank itself may be bound to one core
