"""A second rank in a process of its own, for tests that end it. As a program it shares memory, and does as it is told.

Ranks tell each other values by lines on its standard input and output.
"""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

Gather = Callable[[Any], list[Any]]


def written(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode() + "\n"


def read(line: str) -> Any:
    return pickle.loads(base64.b64decode(line))


class Peer:
    """Starts that process. `gather` is rank 0's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._of = self.process.stdin, self.process.stdout

    def tell(self, value: Any) -> None:
        self._to.write(written(value))
        self._to.flush()

    def hear(self) -> Any:
        return read(self._of.readline())

    def gather(self, value: Any) -> list[Any]:
        self.tell(value)
        return [value, self.hear()]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._to.close()
        self._of.close()


def main() -> None:
    from commlib.errors import TransportError
    from tests.cuda.gpu import gpu

    def tell(value: Any) -> None:
        sys.stdout.write(written(value))
        sys.stdout.flush()

    def gather(value: Any) -> list[Any]:
        tell(value)
        return [read(sys.stdin.readline()), value]

    device = gpu().device
    shared = []
    for line in sys.stdin:
        if (order := read(line)) == "share":
            try:
                shared.append(device.share(4000, 1, gather))
            except TransportError as error:
                tell(str(error))
                continue
            device.current().record()
            tell("shared")
        elif order == "close":
            shared.pop().close()
            tell("closed")


if __name__ == "__main__":
    main()
