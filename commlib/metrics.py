"""Metrics: this rank's call counters, for Prometheus and for experiment trackers.

    from commlib import metrics

    metrics.start()                                      # count from now on
    metrics.write_textfile("/var/lib/node_exporter/commlib-{rank}.prom")
    server = metrics.serve(9464)                         # /metrics on 127.0.0.1, from now on
    wandb.log(metrics.values(), step=step)               # a plain dict

Counting costs a few microseconds per call; without `start` it costs nothing. `Communicator.stats` returns the same
counts. The functions for Prometheus need the extra 'metrics'.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from commlib.arguments import install
from commlib.errors import UsageError
from commlib.world import world

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily

log = logging.getLogger("commlib")

_LABELS = ("rank", "group", "verb")

# Names follow Prometheus: base units; the client adds "_total" to counters. Each with the field of a Count and a help.
_FAMILIES = (
    ("commlib_calls", "calls", "Operations that have ended."),
    ("commlib_failed_calls", "failed", "Operations that have ended in an error."),
    ("commlib_bytes", "nbytes", "Bytes of this rank's arrays in these operations."),
    ("commlib_seconds", "seconds", "Seconds from the start of operations to their end."),
    ("commlib_queued_seconds", "waited", "Seconds of operations in the queue before their start."),
    ("commlib_exposed_seconds", "exposed", "Seconds that threads of the program waited for operations."),
)


def start() -> None:
    """Count the operations of this rank from now on, until `commlib.shutdown`. Idempotent; not collective."""
    world().runtime.recording.start_counting()


def values(prefix: str = "commlib/") -> dict[str, float]:
    """Return the counts as one flat dict, for `wandb.log`, `mlflow.log_metrics` or TensorBoard's `add_scalar`.

    Keys are `<prefix><group>/<verb>/<what>`, with calls, failed_calls, bytes, seconds, queued_seconds, exposed_seconds
    for `what`; values only grow.

    Args:
        prefix: The first part of each key.

    Raises:
        UsageError: If nothing was counted: see `start`.
    """
    names = {field: family.removeprefix("commlib_") for family, field, _ in _FAMILIES}
    return {
        f"{prefix}{_tidy(group)}/{verb}/{names[field]}": float(value)
        for (group, verb), count in world().runtime.recording.counters().counts().items()
        for field, value in count.as_dict().items()
    }


def _tidy(group: str) -> str:
    """Return a group's name with "_" for characters that MLflow refuses."""
    return "".join(letter if letter.isalnum() or letter in "_-. " else "_" for letter in group)


class Collector:
    """A collector for Prometheus' client with this rank's counts: `REGISTRY.register(Collector())`.

    It is empty before `start` and after `commlib.shutdown`. Families are counters with the labels rank, group, verb.
    """

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yield one family for each field of a `commlib.observe.Count`."""
        client = _client()
        counts, rank = _counts()
        for name, field, about in _FAMILIES:
            family = client.core.CounterMetricFamily(name, about, labels=_LABELS)
            for (group, verb), count in counts.items():
                family.add_metric((rank, group, verb), getattr(count, field))
            yield family

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Return the families without samples."""
        client = _client()
        return [client.core.CounterMetricFamily(name, about, labels=_LABELS) for name, _, about in _FAMILIES]


def _counts() -> tuple[dict[tuple[str, str], Any], str]:
    try:
        comm = world()
        return comm.runtime.recording.counters().counts(), str(comm.rank)
    except UsageError:  # a scrape may arrive at any time
        return {}, ""


def registry() -> CollectorRegistry:
    """Return a registry of Prometheus' client with only this rank's counts."""
    result = _client().CollectorRegistry()
    result.register(Collector())
    return result  # type: ignore[no-any-return]


def write_textfile(path: str) -> None:
    """Write the counts for node_exporter's textfile collector, atomically.

    Ranks of one node need separate files.

    Args:
        path: The file; `{rank}` in it is replaced by this rank's number.

    Raises:
        UsageError: If the file cannot be written, or if nothing was counted.
    """
    comm = world()
    comm.runtime.recording.counters()  # raises if there are none: an empty file would look idle
    path = path.replace("{rank}", str(comm.rank))
    try:
        _client().write_to_textfile(path, registry())
    except OSError as error:
        raise UsageError(f"metrics.write_textfile: rank {comm.rank}: cannot write {path}: {error}") from error


class Server:
    """An HTTP server of /metrics, until `close`. port: the port it listens on."""

    def __init__(self, port: int, address: str) -> None:
        try:
            self._server, self._thread = _client().start_http_server(port, address, registry())
        except OSError as error:
            raise UsageError(f"metrics.serve: cannot listen on {address}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(port: int = 0, address: str = "127.0.0.1") -> Server:
    """Count from now on, and serve this rank's counts at http://address:port/metrics; port 0 takes a free port.

    Anyone who can reach the address can read the counts: use addresses other than 127.0.0.1 only in trusted networks.
    Each rank of a node needs a separate port, `9464 + local_rank` for example.

    Args:
        port: The port to listen on; 0: a free one.
        address: The address to listen on.

    Raises:
        UsageError: If the port is taken.
    """
    start()
    return Server(port, address)


class Reports:
    """A thread that calls `callback` with the counts every `every` seconds, until `close`."""

    def __init__(self, callback: Callable[[dict[str, float]], Any], every: float) -> None:
        self._callback, self._every = callback, every
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="commlib-metrics", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._closing.wait(self._every):
            try:
                current = values()
            except UsageError:
                return  # commlib was shut down
            try:
                self._callback(current)
            except Exception as error:  # an unreachable tracker must not end the training
                log.warning("metrics: the callback failed: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Stop calling back; a callback in progress ends first."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def on_metrics(callback: Callable[[dict[str, float]], Any], every: float = 60.0) -> Reports:
    """Count from now on, and call `callback(values())` every `every` seconds, in a separate thread.

    For trackers that accept values at any time; to log by steps, call `values` in the training loop. Exceptions of the
    callback are logged. Ends with `close` or `commlib.shutdown`.

    Args:
        callback: Called with the result of `values`.
        every: Seconds between calls.

    Raises:
        UsageError: If `every` is not positive.
    """
    if not every > 0:
        raise UsageError(f"on_metrics: every is {every}, expected a positive number of seconds")
    start()
    return Reports(callback, every)


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ModuleNotFoundError:
        raise UsageError(f"metrics for Prometheus need prometheus-client: {install('metrics')}") from None
    return prometheus_client
