"""A device for tests, in host memory: what is queued happens late, and until then the result is poison.

A copy or kernel reads its sources while it runs, not when it is queued; if they change meanwhile its result is poison.
What it writes is poison from when it is queued, where that disturbs nothing queued before it, or else from when it
begins. New memory is poison, and so is memory that is given up, once its stream has come to that. Reading on the host
(`LateArray.peek`) waits for nothing: whoever forgets a wait gets poison. Floats are then NaN, all else is 0xA5.
"""

from tests.late.device import LATE, LateArray, LateDevice
from tests.late.on_device import OnDevice

__all__ = ["LATE", "LateArray", "LateDevice", "OnDevice"]
