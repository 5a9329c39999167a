"""Shield: run work that an exception of a signal handler must not end half-way."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any


def run_shielded(work: Callable[..., Any], *arguments: Any, unless: Callable[[], bool] = bool) -> Any:
    """Return `work(*arguments)`, shielded from exceptions of signal handlers.

    Python runs signal handlers in the main thread, so another thread does the work. If the main thread is interrupted,
    the work continues: a numba compilation that stopped half-way would prevent all later ones, and a file whose loading
    an exception ended would seem damaged. unless: returns whether this thread must do it: it holds a lock of the work.
    """
    if threading.current_thread() is not threading.main_thread() or unless():
        return work(*arguments)
    results: list[Any] = []
    errors: list[BaseException] = []
    running = threading.Lock()  # the only primitive of `threading` that survives an interrupt at any instruction
    running.acquire()

    def run() -> None:
        try:
            results.append(work(*arguments))
        except BaseException as error:
            errors.append(error)
        finally:
            running.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # Python is shutting down, or cannot start a thread
        return work(*arguments)
    with running:
        pass
    for error in errors:
        raise error
    return results[0]
