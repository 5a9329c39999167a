"""LateSignals: streams of several ranks synchronise by words of memory that all of them map."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any


def write(words: Sequence[int], number: int) -> None:
    """Write a number to words."""
    for word in words:
        ctypes.c_uint32.from_address(word).value = number


def wait_for_words(words: Sequence[int], number: int) -> None:
    """Wait until each word has a number, or a later one."""
    deadline = time.monotonic() + 20
    for word in words:
        while (ctypes.c_uint32.from_address(word).value - number) % (1 << 32) >= 1 << 31:
            if time.monotonic() > deadline:
                raise TimeoutError("a stream waited 20 s for that of another rank")
            time.sleep(20e-6)


class LateSignals:
    """See `devices.protocol.Signals`."""

    def __init__(self, device: Any, memory: Any, written: Sequence[int], awaited: Sequence[int]) -> None:
        self._device, self._memory, self._written, self._awaited = device, memory, tuple(written), tuple(awaited)
        self._mappings = [memory, *getattr(memory, "mappings", ())]

    def queue(self, number: int) -> None:
        words = self._written, self._awaited, self._mappings  # mapped until that has run

        def run() -> None:
            write(words[0], number)
            wait_for_words(words[1], number)

        self._device.current().queue.put(run)

    def close(self) -> None:
        self._memory.close()
