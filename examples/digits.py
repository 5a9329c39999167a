"""1797 handwritten digits of 8 x 8 pixels, for the examples that classify them.

They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, under CC BY 4.0, in the order of the original.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def load_digits() -> tuple[Any, Any]:
    """Return the images, (1797, 8, 8) in float32 from 0 to 1, and their labels, 1797 numbers in int64."""
    with np.load(Path(__file__).with_suffix(".npz")) as data:
        return data["images"].astype(np.float32) / 16, data["labels"].astype(np.int64)
