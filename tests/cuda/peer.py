"""A second rank in a process of its own, for tests that end it. As a program it shares memory, and follows commands.

The ranks exchange values by lines on its standard input and output.
"""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

Gather = Callable[[Any], list[Any]]


def encode(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode() + "\n"


def decode(line: str) -> Any:
    return pickle.loads(base64.b64decode(line))


class Peer:
    """Starts that process. `gather` is rank 0's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._of = self.process.stdin, self.process.stdout

    def send(self, value: Any) -> None:
        self._to.write(encode(value))
        self._to.flush()

    def receive(self) -> Any:
        return decode(self._of.readline())

    def gather(self, value: Any) -> list[Any]:
        self.send(value)
        return [value, self.receive()]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._to.close()
        self._of.close()


def main() -> None:
    from commlib.errors import TransportError
    from tests.cuda.gpu import gpu

    def send(value: Any) -> None:
        sys.stdout.write(encode(value))
        sys.stdout.flush()

    def gather(value: Any) -> list[Any]:
        send(value)
        return [decode(sys.stdin.readline()), value]

    device = gpu().device
    shared = []
    for line in sys.stdin:
        if (order := decode(line)) == "share":
            try:
                shared.append(device.share(4000, 1, gather))
            except TransportError as error:
                send(str(error))
                continue
            device.current().record()
            send("shared")
        elif order == "close":
            shared.pop().close()
            send("closed")


if __name__ == "__main__":
    main()
