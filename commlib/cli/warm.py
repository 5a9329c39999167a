"""`commlib warm`: compile all kernels ahead of jobs: on a login node, or while building a container."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import typer

from commlib.console.progress import show_progress
from commlib.launch.mpi_start import launched_rank

_NO_CPU = "is not a recognized processor"  # LLVM prints this on standard error, and compiles for another CPU


def warm(
    cpu: Annotated[
        list[str] | None,
        typer.Option(help="Compile for this CPU, by LLVM's name (x86-64-v3, znver3, ...). [default: this one]"),
    ] = None,
    rare: Annotated[
        bool, typer.Option("--all", help="Also reductions that training rarely uses: three times the work.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes that compile in parallel; 0: one per core, at most 8.")
    ] = 0,
) -> None:
    """Compile all kernels into the cache folder, where jobs find them: commlib warm

    Run it on a CPU like that of the jobs, such as on one node of each kind: srun -N 1 commlib warm. Or compile for a
    CPU whose instructions all nodes support: commlib warm --cpu x86-64-v3; jobs then need the two settings that it
    prints.

    Existing kernels are kept. The folder: NUMBA_CACHE_DIR, else XDG_CACHE_HOME, else ~/.cache, each with /commlib.
    """
    names = list(dict.fromkeys(cpu or [""]))
    for name in filter(None, names):
        if why := refusal(name):
            typer.echo(f"commlib warm: {why}", err=True)
            raise typer.Exit(2)
    failed = [name for name in names if not _warm(name, rare, jobs or min(os.cpu_count() or 1, 8))]
    raise typer.Exit(1 if failed else 0)


def refusal(name: str) -> str:
    """Return an error text if LLVM does not know the CPU, or ""."""
    program = (
        "import sys, llvmlite.binding as llvm\n"
        "llvm.initialize_native_target()\n"
        "llvm.Target.from_default_triple().create_target_machine(cpu=sys.argv[1])"
    )
    tried = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True)
    if tried.returncode == 0 and _NO_CPU not in tried.stderr:
        return ""
    reason = (tried.stderr.strip().splitlines() or ["it ended"])[0]
    return f"LLVM cannot compile for the CPU {name!r} ({reason}): try x86-64-v2, x86-64-v3, x86-64-v4 or generic"


def _warm(name: str, rare: bool, jobs: int) -> bool:
    """Compile everything for one CPU, "" for this one; return whether all of it is in the cache."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from commlib.cli import warming
    from commlib.kernels.precompile import folder

    if (place := folder()) is None:
        return False  # `folder` has logged the reason
    began, is_silent = time.monotonic(), launched_rank() != 0
    there, compiled, problems = set(os.listdir(place)), set(), []
    with (
        _settings(name),
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), warming.hush) as pool,
        show_progress("commlib warm", silent=is_silent) as progress,
    ):
        count, what = pool.submit(warming.count, rare).result()
        for number, (task, file_name, problem) in enumerate(pool.map(partial(warming.compile_one, rare), range(count))):
            progress((number + 1) / count, task)
            if file_name not in there:
                compiled.add(file_name)
            if problem or not (place / file_name).is_file():
                problems.append(f"{task}: {problem or 'it could not be written'}")
    if not is_silent:
        typer.echo(
            f"{count} kernels for {what} in {place}: {len(compiled)} compiled now, {count - len(compiled)} were there; "
            f"{time.monotonic() - began:.0f} s"
        )
        if name:
            settings = " ".join(f"{key}={value}" for key, value in settings_for(name).items())
            typer.echo(f"jobs need this to find them: export {settings}")
    for text in problems:
        typer.echo(f"commlib warm: not kept: {text}", err=True)
    return not problems


def settings_for(name: str) -> dict[str, str]:
    """Return numba's settings for a CPU. Its features follow from its name, not from this machine."""
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}


@contextmanager
def _settings(name: str) -> Iterator[None]:
    """Make child processes started within compile for a CPU: numba reads its settings on import."""
    before = dict(os.environ)
    if name:
        os.environ.update(settings_for(name))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
