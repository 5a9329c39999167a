"""Gaps: clear the elements between the parts of a bucket, which must not influence how the parts are encoded.

Parts begin on cache lines. The zeros between them need not decode to zeros (a sign is not zero), and the decoded values
would enter the next step's blocks. No state saves them, so a resumed run would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.compress.scheme import BucketPart
from commlib.devices.array import DeviceArray
from commlib.kernels.protocol import Kernels


class Gaps:
    """The elements from `start` to `stop` of a bucket outside all of its parts, counted from `start`."""

    def __init__(self, parts: Sequence[BucketPart], start: int, stop: int) -> None:
        ordered = sorted(parts, key=lambda part: part.start)
        ends = [0, *(part.stop for part in ordered)]
        begins = [*(part.start for part in ordered), max(stop, ends[-1])]
        within = [(max(end, start), min(begin, stop)) for end, begin in zip(ends, begins, strict=True)]
        self.spans = [(first - start, last - start) for first, last in within if first < last]
        """(first element, end) of each gap."""
        self._places = np.concatenate([np.arange(*span) for span in self.spans]) if self.spans else None

    def clear(self, values: Any, kernels: Kernels) -> None:
        """Fill the gaps with zeros."""
        if self._places is None:
            return
        if type(values) is DeviceArray:
            for first, last in self.spans:
                kernels.fill(values[first:last], 0)
        else:
            values[self._places] = 0
