"""A device for tests, in host memory: queued work runs late, and until then its result is poison.

A copy or kernel reads its sources while it runs, not when it is queued; if they change meanwhile, its result is poison.
What it writes is poison from the time it is queued, unless earlier queued work needs it, or else from its start. New
memory is poison, and so is freed memory, once its stream gets there. Reading on the host (`LateArray.peek`) waits for
nothing: a test that forgets a wait gets poison. Floats are then NaN, all else is 0xA5.
"""

from tests.late.device import LATE, LateArray, LateDevice
from tests.late.on_device import OnDevice

__all__ = ["LATE", "LateArray", "LateDevice", "OnDevice"]
