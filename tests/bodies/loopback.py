"""Ranks as threads: run a function of a Communicator on every rank of a group, without MPI."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.runtime.process import Runtime
from commlib.transport.loopback import LoopbackTransport, transports

T = TypeVar("T")

_JOIN = 30.0  # seconds for everything
_CLEAN_UP = 3.0  # seconds that the other ranks get to end after the first failure


def run(
    size: int,
    function: Callable[[Communicator], T],
    *,
    nodes: Sequence[int] | None = None,
    config: Config | None = None,
    devices: Sequence[str] = (),
) -> list[T]:
    """Run `function(comm)` on `size` ranks and return their results, in rank order.

    `nodes[r]` is the node that rank r pretends to be on (default: one node); `devices` are the kinds whose memory
    its messages carry directly. The first failure is raised again here; the other ranks are made to give up. Never
    hangs: ranks that do not end raise TimeoutError with their tracebacks.
    """
    config = config or Config(timeout=10)
    runtimes = [Runtime(config, ranks_on_node=size) for _ in range(size)]
    results: list[T | None] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    running = list(range(size))
    over = threading.Event()  # all have ended, or one has failed

    def rank_main(transport: LoopbackTransport) -> None:
        rank = transport.rank
        try:
            comm = Communicator(transport, runtimes[rank])
            comm.group.prepare()  # as `commlib.init` does
            results[rank] = function(comm)
        except BaseException as error:
            failures.append((rank, error))
            over.set()
        running.remove(rank)
        if not running:
            over.set()

    threads = [
        threading.Thread(target=rank_main, args=(end,), name=f"rank {end.rank}", daemon=True)
        for end in transports(size, nodes, devices)
    ]
    for thread in threads:
        thread.start()
    stuck = [] if over.wait(_JOIN) else [thread for thread in threads if thread.is_alive()]
    stacks = "\n".join(_stack(thread) for thread in stuck)
    for runtime in runtimes:
        runtime.closing = True  # ranks that wait in commlib give up
        runtime.poller.close()
        for group in list(runtime.groups):
            group.progress.close()
    for thread in threads:
        thread.join(_CLEAN_UP)
    if failures and not stuck:
        rank, error = failures[0]
        error.add_note(f"on rank {rank} of {size}, nodes {list(nodes or [0] * size)}")
        raise error
    if stuck:
        raise TimeoutError(f"{', '.join(thread.name for thread in stuck)} did not end:\n{stacks}")
    return results  # type: ignore[return-value]  # no failure, so all have been set


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"--- {thread.name}:\n" + "".join(traceback.format_stack(frame)) if frame else f"--- {thread.name}"
