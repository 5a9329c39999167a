"""A pytest plugin that makes one test run of `mpiexec -n N python -m pytest tests/mpi`.

Every rank runs every test. After each phase of a test (set-up, call, teardown) the ranks exchange their outcomes, so
that

- a failure on any rank fails the test on all of them, and rank 0, the only one that prints, shows its traceback;
- ranks that skip a test, or run another one, while the others do not, get an error instead of hanging;
- a hang ends after `faulthandler_timeout` seconds: the stuck rank prints its traceback and ends, and so does the job.

It uses mpi4py on a communicator of its own, so that it works even where commlib does not.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import io
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from mpi4py import MPI

from tests.plugins.again import ranks_of

if TYPE_CHECKING:
    from commlib import Communicator

EXTRA_SECONDS = 10.0  # how much longer a rank waits for the others than they may take: the stuck rank must report first


class Outcome(NamedTuple):
    """The outcome of one phase of a test on one rank."""

    kind: str  # passed, failed, skipped, xfailed, xpassed
    text: str = ""  # the traceback and the captured output, if it failed; the reason, if it was skipped
    brief: str = ""  # one line for the summary, if it failed


class Crash(NamedTuple):
    """The place where pytest's summary looks for its line about a failure."""

    message: str


class Failure(NamedTuple):
    """The report of a failed test: the text once, and one line in the summary.

    A plain string would do for both, but where the variable CI is set pytest prints it whole in the summary, too.
    """

    text: str
    reprcrash: Crash

    def toterminal(self, out: Any) -> None:
        out.line(str(self))

    def __str__(self) -> str:
        return f"{self.reprcrash.message}\n{self.text}"


@pytest.fixture(scope="session")
def comm() -> Communicator:
    """The communicator of all ranks."""
    import commlib

    return commlib.init()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(min=1, max=None): skip unless there are that many ranks")
    config.pluginmanager.register(MultiRank(config), "multirank")
    _same_examples_everywhere()


def _same_examples_everywhere() -> None:
    """Make hypothesis draw the same examples on all ranks: no randomness, database or shrinking."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("multirank", derandomize=True, database=None, deadline=None, phases=phases)
    settings.load_profile("multirank")


class MultiRank:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.timeout = float(config.getini("faulthandler_timeout") or 0)
        self.collection_errors: list[str] = []
        self.agreed = True  # no exchange after the ranks diverged
        self.file: Path | None = None  # of the current test
        # pytest redirects descriptor 2 during tests. It does not now, but the copy stays valid.
        self.stderr = os.fdopen(os.dup(2), "w")
        # A rank that dies takes the job with it: mpiexec terminates the others, and they print their tracebacks.
        faulthandler.register(signal.SIGTERM, self.stderr, chain=True)
        self.output = sys.stdout
        if self.rank != 0:
            # The terminal reporter is about to be created and uses the sys.stdout of that time.
            self.output = sys.stdout = io.StringIO()

    # The exchange

    def exchange(self, place: str, mine: Any) -> list[Any]:
        """All-gather `mine`, having checked that all ranks are at the same `place`; end the session if they are not."""
        if self._is_same_everywhere(place, mine):
            return [mine] * self.size
        places, everyone = zip(*self.comm.allgather((place, mine)), strict=True)
        if len(set(places)) > 1:
            self.agreed = False
            self._exit("the ranks went different ways", list(places))
        return list(everyone)

    def _is_same_everywhere(self, place: str, mine: Any) -> bool:
        """Wait for all ranks, without keeping a core busy and without being cut off before the stuck rank.

        Equal values are recognised by their digest: they usually are equal, and there are thousands of exchanges.
        """
        self._restart_timer(self.timeout + EXTRA_SECONDS)
        report_at = time.monotonic() + self.timeout / 2
        digest = hashlib.sha256(repr((place, mine)).encode()).digest()
        digests = bytearray(len(digest) * self.size)
        request = self.comm.Iallgather(digest, digests)
        while not request.Test():
            time.sleep(0.0002)
            if isinstance(mine, Outcome) and mine.kind == "failed" and time.monotonic() > report_at:
                # The others probably hang because of this failure, and the job ends before it can be reported.
                self._print_now(f"rank {self.rank} failed and still waits for the others:\n{mine.text}")
                report_at = float("inf")
        self._restart_timer(self.timeout)
        return digests == digest * self.size

    def _restart_timer(self, seconds: float) -> None:
        if self.timeout > 0:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self.stderr)

    def _exit(self, reason: str, texts: list[str]) -> None:
        pytest.exit(f"{reason}\n{_by_rank(texts)}", returncode=1)

    def _print_now(self, text: str) -> None:
        print(text, file=self.stderr, flush=True)

    # Hooks of pytest, in this order

    def pytest_report_header(self) -> str:
        return f"ranks: {self.size}, {MPI.Get_library_version().split(',')[0].strip()}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        sys.stdout = sys.__stdout__

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors.append(str(report.longrepr))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("ranks"):
                least, most = ranks_of(mark)
                if not least <= self.size <= (most or self.size):
                    needed = f"{least} or more" if most is None else f"{least} to {most}"
                    item.add_marker(pytest.mark.skip(reason=f"wants {needed} ranks, there are {self.size}"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = "\n".join([*self.collection_errors, *(item.nodeid for item in session.items)])
        everyone = self.exchange("collection", tests)
        if len(set(everyone)) > 1:
            self._exit("the ranks found different tests", everyone)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Make tests that collect garbage examine only objects of their file, instead of 0.3 s of older ones.

        Here, and not before the fixtures of the file's first test, which may import numba or a framework.
        """
        if item.path != self.file:
            self.file = item.path
            gc.collect()
            gc.freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: xfail has been handled
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        everyone: list[Outcome] = self.exchange(f"{report.when} of {item.nodeid}", _outcome(report))
        kinds = {outcome.kind for outcome in everyone}
        if "failed" in kinds:
            texts = [outcome.text if outcome.kind == "failed" else "" for outcome in everyone]
            brief = next(outcome.brief for outcome in everyone if outcome.kind == "failed")
            _fail(report, Failure(_by_rank(texts), Crash(brief)) if self.size > 1 else None)
        elif len(kinds) > 1:
            texts = [f"{outcome.kind} {outcome.text}" for outcome in everyone]
            _fail(report, Failure(_by_rank(texts), Crash("the ranks disagree")))
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.agreed:
            # Ranks that still run tests learn here that this one left, e.g. because of an internal error.
            statuses = self.exchange("the end of the session", int(exitstatus))
            self.agreed = len(set(statuses)) == 1
        faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if not self.agreed and isinstance(self.output, io.StringIO):
            self._print_now(f"what rank {self.rank} would have printed:\n{self.output.getvalue()}")


def _outcome(report: pytest.TestReport) -> Outcome:
    if hasattr(report, "wasxfail"):
        return Outcome("xfailed" if report.skipped else "xpassed", report.wasxfail)
    if report.passed:
        return Outcome("passed")
    if report.skipped:
        return Outcome("skipped", report.longreprtext)
    captured = [f"{title}\n{content}" for title, content in report.sections if content.strip()]
    crash = getattr(report.longrepr, "reprcrash", None)
    brief = str(crash.message).split("\n", 1)[0] if crash else ""
    return Outcome("failed", "\n".join([report.longreprtext, *captured]), brief)


def _fail(report: pytest.TestReport, failure: Failure | None) -> None:
    report.outcome = "failed"
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    if failure is not None:
        report.longrepr = failure  # type: ignore[assignment]  # pytest asks for toterminal and reprcrash alone
        report.sections.clear()  # they are in the text


def _by_rank(texts: list[str]) -> str:
    """Join one text per rank under headings; equal ones appear once, empty ones never."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "\n".join(
        f"--- {'rank' if len(same_ranks) == 1 else 'ranks'} {', '.join(map(str, same_ranks))}:\n{text}"
        for text, same_ranks in ranks.items()
        if text
    )
