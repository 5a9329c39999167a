"""Report: print facts, the table line by line, and progress during a run. Only rank 0 prints."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from commlib.bench import table
from commlib.bench.cases import Case
from commlib.bench.formats.base import Format
from commlib.bench.load import busy_text
from commlib.bench.options import BenchSettings
from commlib.bench.rows import CSV_TITLE, BenchRow, csv_lines, mistakes


class Report:
    """A context manager: while it is open, a progress bar is shown below the output."""

    def __init__(self, settings: BenchSettings, *, rounds: int, bound: bool, console: Console | None) -> None:
        """rounds: the total number. bound: whether rows have a bound. Without a console nothing is printed."""
        self._settings = settings
        self._table = table.BenchTable(
            settings.verb,
            settings.peers,
            bound=bound,
            percentiles=settings.percentiles,
            events=settings.device != "host",
            places=settings.places,
        )
        self._console = self._rows_to = console or Console(quiet=True)
        self._format: Format | None = None
        if (settings.csv or settings.format) and console is not None:
            self._console = Console(stderr=True, force_terminal=console.is_terminal, highlight=False)
        self._has_title = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,  # a thread that draws ten times a second would disturb the measurement
            disable=not self._console.is_terminal or self._console.quiet,
        )
        self._task = self._progress.add_task("", total=rounds)

    @classmethod
    def on_rank(cls, rank: int, settings: BenchSettings, *, rounds: int, bound: bool) -> Report:
        """Return the report of one rank: on standard output, or silent."""
        return cls(settings, rounds=rounds, bound=bound, console=table.console() if rank == 0 else None)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Print the verb, hosts, MPI library and settings."""
        hosts = list(dict.fromkeys(facts["hosts"]))
        ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] > 1)}"
        self.note(f"{self._settings.verb.name}, {ranks} on {', '.join(hosts)}, {facts['mpi']}")
        self.note(f"{facts['cpu']}, {facts['cores']} cores, load {facts['load']:.1f} at the start")
        if warning := busy_text(facts):
            self._print(f"# {warning}", "bold red")
        if gpu := facts.get("gpu"):
            self.note(f"{gpu['name']}, {gpu['gpus']} on this node, CUDA {gpu['runtime']}, CuPy {gpu['cupy']}")
        if job := facts.get("slurm"):
            self.note(f"Slurm job {job.get('SLURM_JOB_ID')}, step {job.get('SLURM_STEP_ID', '-')}")
        self.note(describe(self._settings))

    def write_as(self, chosen: Format) -> None:
        """Print rows, with header and footer, in another benchmark's format."""
        self._format = chosen
        for text in chosen.head():
            self._print_row(text, "")

    def note(self, text: str) -> None:
        """Print a remark on a separate line."""
        self._print(f"# {text}", "dim")

    def progress(self, case: Case, done: int) -> None:
        """Show the case being measured, and advance the progress bar by one round."""
        size = f"{case.nbytes} B" if case.nbytes else case.verb.name
        what = " ".join(filter(None, [case.dtype if case.nbytes else "", case.op, size]))
        self._progress.update(self._task, description=what, advance=1 if done else 0, refresh=True)

    def row(self, *rows: BenchRow) -> None:
        """Print one line of the table, with titles before the first. rows: one for each place of the settings."""
        if self._format is not None:
            for text in self._format.line(*rows):
                self._print_row(text, "")
            return
        csv = self._settings.csv
        if not self._has_title:
            for title in [CSV_TITLE] if csv else self._table.titles():
                self._print_row(title, "bold")
            self._has_title = True
        is_wrong = mistakes(rows) > 0
        for text in csv_lines(rows) if csv else [self._table.line(*rows)]:
            self._print_row(text, "red" if is_wrong else "")

    def end(self) -> None:
        """Print the footer."""
        for text in self._format.foot() if self._format is not None else ():
            self._print_row(text, "")

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def _print_row(self, text: str, style: str) -> None:
        self._rows_to.print(text, style=style, markup=False, soft_wrap=True)


def describe(settings: BenchSettings) -> str:
    """Return one line that describes the calls of the verb."""
    has_data = settings.verb.name != "barrier"
    how = {
        "out of place and in place": has_data and settings.side_by_side,
        "in place": has_data and settings.in_place and not settings.side_by_side,
        "out of place": has_data and not settings.in_place and not settings.side_by_side,
        "symmetric buffers": has_data and settings.symmetric,
        "ordinary arrays": has_data and not settings.symmetric,
        f"on {settings.device}": settings.device != "host",
        f"algorithm {settings.algorithm}": settings.algorithm != "auto",
        "through a plan": settings.plan,
        "on the progress thread": settings.asynchronous,
        "rewritten before each call": settings.fresh,
        f"{settings.iters} calls a round": settings.iters is not None,
        f"{settings.warmup_iters} to warm up": settings.warmup_iters is not None,
        f"median of {settings.rounds} rounds": True,
    }
    return ", ".join(text for text, is_so in how.items() if is_so)
