"""Matrix: the suites of `ci/test`, with their extents, MPI libraries and numbers of ranks.

quick: style, types, documents, unit tests, and the verbs on 2 ranks: some minutes. usual: what CI runs, at most half an
hour on 2 cores. full: all parameters, and tests marked `long` too: some two hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

QUICK, USUAL, FULL = "quick", "usual", "full"
EXTENTS = (QUICK, USUAL, FULL)
NONE, FIRST, OTHER = "no MPI", "first MPI", "another MPI"


@dataclass(frozen=True, slots=True)
class Check:
    """A command that must succeed."""

    name: str
    command: tuple[str, ...]
    is_alone: bool = False  # nothing runs at the same time


@dataclass(frozen=True, slots=True)
class Suite:
    """A folder of tests, in some runs.

    ranks: a run under mpiexec for each; () runs pytest without a launcher, and the tests start jobs themselves. again:
    leave out tests that learn nothing from another number of ranks ("ranks") or another MPI ("mpi"), see
    `tests.plugins.again`. variants: run that many parameters of each test, 0 for all, see `tests.plugins.variants`.
    """

    folder: str
    mpi: str
    extents: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    again: str = ""
    variants: int = 0
    options: tuple[str, ...] = ()
    title: str = ""  # the part of the name after folder and ranks

    def pytest(self) -> list[str]:
        """Return the options of pytest."""
        again = [f"--again={self.again}"] if self.again else []
        variants = [f"--variants={self.variants}"] if self.variants else []
        return [*again, *variants, *self.options]


CHECKS = (
    # A fresh machine compiles kernels first: a test would wait for the compiler and time out.
    Check("kernels", ("python", "-m", "commlib", "warm", "--all"), is_alone=True),
    Check("ruff check", ("ruff", "check", ".")),
    Check("ruff format", ("ruff", "format", "--check", ".")),
    Check("mypy", ("mypy",)),
    Check("codespell", ("codespell",)),
    Check("docs", ("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml")),  # --quiet hides warnings
)

SHORT = (QUICK, USUAL)
MANY = ("-n", "3", "--dist", "worksteal")  # three processes on two cores: many tests wait
LATE = ("-p", "tests.late.late_host")
NOT_LONG = ("-m", "not long")  # long tests of GPUs count calls, which are the same under any MPI

# In the order of the run, two at a time: TensorFlow's tests compute all the time, so tests that wait run with them.
SUITES = (
    #     folder                 MPI    extents  ranks         again    variants
    Suite("unit",                NONE,  SHORT,   (),           "",      2, MANY),
    Suite("unit",                NONE,  (FULL,), (),           "",      0, MANY),

    Suite("mpi",                 FIRST, (USUAL,), (1,),        "ranks", 2),
    Suite("mpi",                 FIRST, (QUICK,), (2,)),
    Suite("mpi",                 FIRST, (USUAL,), (2,),        "",      2),
    Suite("mpi",                 FIRST, (USUAL,), (4,),        "ranks", 2),
    Suite("mpi",                 FIRST, (FULL,), (1, 2, 3, 4)),
    Suite("mpi",                 OTHER, (USUAL,), (3,),        "mpi",   2),
    Suite("mpi",                 OTHER, (FULL,), (1, 2, 3, 4), "mpi"),

    Suite("gpu",                 FIRST, (USUAL,), (2,),        "",      2),
    Suite("gpu",                 FIRST, (FULL,), (2, 4)),
    Suite("gpu",                 OTHER, (FULL,), (2,),         "",      0, NOT_LONG),
    Suite("gpu",                 FIRST, (FULL,), (2,),         "",      0, LATE, ", whose hosts are late"),
    Suite("mpi",                 FIRST, (FULL,), (2,),         "",      0, LATE, ", whose hosts are late"),

    Suite("tensorflow_adapter",  FIRST, (USUAL,), (2,),        "",      1),
    Suite("tensorflow_adapter",  OTHER, (USUAL,), (2,),        "mpi",   1),
    Suite("tensorflow_adapter",  FIRST, (FULL,), (1,),         "mpi"),
    Suite("tensorflow_adapter",  FIRST, (FULL,), (2,)),
    Suite("tensorflow_adapter",  FIRST, (FULL,), (3,),         "",      1),
    Suite("tensorflow_adapter",  OTHER, (FULL,), (1, 2),       "mpi"),
    Suite("tensorflow_adapter",  OTHER, (FULL,), (3,),         "mpi",   1),

    Suite("multihost",           FIRST, (USUAL,), (),          "",      1),
    Suite("multihost",           FIRST, (FULL,), ()),
    Suite("multihost",           OTHER, (USUAL,), (),          "mpi",   1),
    Suite("multihost",           OTHER, (FULL,), (),           "mpi"),
    Suite("slurm",               FIRST, (USUAL,), (),          "",      1),
    Suite("slurm",               FIRST, (FULL,), ()),
    Suite("slurm",               OTHER, (USUAL,), (),          "mpi",   1),
    Suite("slurm",               OTHER, (FULL,), (),           "mpi"),

    Suite("torch_adapter",       FIRST, (USUAL,), (2,),        "",      2),
    Suite("torch_adapter",       OTHER, (USUAL,), (2,),        "mpi",   2),
    Suite("torch_adapter",       FIRST, (FULL,), (1,),         "mpi"),
    Suite("torch_adapter",       FIRST, (FULL,), (2,)),
    Suite("torch_adapter",       FIRST, (FULL,), (3,),         "",      2),
    Suite("torch_adapter",       OTHER, (FULL,), (1, 2),       "mpi"),
    Suite("torch_adapter",       OTHER, (FULL,), (3,),         "mpi",   2),

    # Replicas of pipelines, process sets of some ranks.
    Suite("torch_adapter",       FIRST, (USUAL,), (4,),        "ranks", 1),
    Suite("torch_adapter",       FIRST, (FULL,), (4,),         "ranks"),
    Suite("tensorflow_adapter",  FIRST, (USUAL,), (4,),        "ranks", 1),
    Suite("tensorflow_adapter",  FIRST, (FULL,), (4,),         "ranks"),

    # Tests that start jobs, sleep, or wait for a limit; not while the unit tests run.
    Suite("launch",              FIRST, (USUAL,), (),          "",      1, MANY),
    Suite("launch",              FIRST, (FULL,), (),           "",      0, MANY),
    Suite("launch",              OTHER, (USUAL,), (),          "mpi",   1, MANY),
    Suite("launch",              OTHER, (FULL,), (),           "mpi",   0, MANY),
)  # fmt: skip

# Otherwise the same MPI could be tested twice, or a launcher start worlds of one rank each.
_TWO_RANKS = """
import sys
from mpi4py import MPI
world = f"{MPI.COMM_WORLD.size} ranks under " + MPI.get_vendor()[0].replace(" ", "").lower()
sys.exit(world != f"2 ranks under {sys.argv[1]}" and f"expected 2 ranks under {sys.argv[1]}, got {world}")
"""


def soaks(extent: str) -> tuple[Check, ...]:
    """Return the soaks of an extent: random calls on many groups at once."""
    operations, seconds = ("10000", "30") if extent == FULL else ("600", "4")
    on_four = ("mpiexec", "-n", "4", "python", "-m")
    return (
        Check("soak", (*on_four, "tests.soak", "--operations", operations, "--seed", "1")),
        Check("soak of named operations", (*on_four, "tests.soak.named", "--seconds", seconds, "--seed", "1")),
    )


def two_ranks(mpi: str) -> Check:
    """Return the check that mpiexec starts one world of two ranks, under the MPI of that name."""
    return Check("two ranks meet", ("mpiexec", "-n", "2", "python", "-c", _TWO_RANKS, mpi))


def suites(extent: str, mpi: str) -> Iterator[tuple[str, Suite, tuple[str, ...]]]:
    """Yield the runs of an extent under NONE, the FIRST or an OTHER MPI: (name, suite, launcher)."""
    for suite in SUITES:
        if extent in suite.extents and suite.mpi == mpi:
            for ranks in suite.ranks:
                yield f"tests/{suite.folder} on {ranks}{suite.title}", suite, ("mpiexec", "-n", str(ranks))
            if not suite.ranks:
                yield f"tests/{suite.folder}", suite, ()
