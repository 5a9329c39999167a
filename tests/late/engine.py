"""Engine: the memory operations of a late device. Work is queued, and what it writes is poison meanwhile."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from tests.late.memory import Place, overlap
from tests.late.stream import LateStream

EVERYWHERE: Place = (0, 1 << 64, 0)
"""What work may use of which nobody knows what it uses."""


class Engine:
    """See above. delay: seconds that every copy and kernel takes."""

    before: ClassVar[Callable[[], None] | None] = None
    """What whoever is about to queue work does first, in all engines."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._lock = threading.Lock()
        self._pending: dict[int, list[Place]] = {}  # memory that queued work reads and writes
        self._shared: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # mappings, and their bytes
        self._numbers = itertools.count()
        self.queued = 0  # copies and kernels so far
        self.races = 0  # changes to memory that was being read

    def note_shared(self, mappings: Iterable[Any], nbytes: int) -> None:
        """Keep ranks' shared memory mapped while queued work uses it, as a driver does. A mapping has an address."""
        with self._lock:
            self._shared.update(dict.fromkeys(mappings, nbytes))

    def submit(
        self,
        stream: LateStream,
        targets: Sequence[Place],
        sources: Sequence[Place],
        run: Callable[[], Any],
        *,
        used: Sequence[Place] = (),
        whole: bool = False,
        objects: Sequence[Any] = (),
    ) -> None:
        """Queue work. whole: it writes all of `targets` without reading it, unless that is in `sources` too.

        used: other memory that it may read or write. objects: they stay alive until it has run.
        """
        if Engine.before is not None:
            Engine.before()
        held = list(objects)
        with self._lock:
            number = next(self._numbers)
            busy = [place for places in self._pending.values() for place in places]
            # Other processes may read shared memory until this runs, in an order that is unknown here.
            busy += [(mapping.address, nbytes, 0) for mapping, nbytes in self._shared.items()]
            if whole and not any(overlap(target, other) for target in targets for other in [*busy, *sources]):
                for target in targets:
                    ctypes.memset(target[0], target[2], target[1])
            self._pending[number] = [*targets, *sources, *used]
            self.queued += 1
            held += [
                mapping
                for mapping, nbytes in self._shared.items()
                if any(overlap((mapping.address, nbytes, 0), place) for place in self._pending[number])
            ]

        def work() -> None:
            before = [ctypes.string_at(at, nbytes) for at, nbytes, _ in targets]
            read = [place for place in sources if not any(overlap(place, target) for target in targets)]
            values = [ctypes.string_at(at, nbytes) for at, nbytes, _ in read]
            for at, nbytes, poison in targets:
                ctypes.memset(at, poison, nbytes)
            time.sleep(self.delay)
            if values == [ctypes.string_at(at, nbytes) for at, nbytes, _ in read]:
                for (at, nbytes, _), was in zip(targets, before, strict=True):
                    ctypes.memmove(at, was, nbytes)
                run()
            else:
                self.races += 1  # the source was written while being read: the result remains poison
            with self._lock:
                del self._pending[number]
            held.clear()

        stream.queue.put(work)

    def mark(self) -> int:
        """Return a mark that separates later work from earlier work."""
        with self._lock:
            return next(self._numbers)

    def drain(self, mark: int) -> None:
        """Wait for the work queued since `mark`. Other tests may have left some that never ends."""
        while self._is_busy_since(mark):
            time.sleep(1e-3)

    def _is_busy_since(self, mark: int) -> bool:
        with self._lock:
            return any(number > mark for number in self._pending)
