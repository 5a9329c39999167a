"""`commlib info`: what is installed, which MPI is found, and every setting with its value. It starts no MPI itself."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

import commlib
from commlib import config, cuda_probe, launch, mpi_on_gpus
from commlib.config_rows import Row, rows, value_text
from commlib.console.width import reader_width, wrapped
from commlib.errors import TransportError, UsageError
from commlib.folders import user_cache

PACKAGES = ("numpy", "numba", "ml_dtypes", "mpi4py", "torch", "tensorflow", "tensorflow-cpu", "keras", "tf_keras")


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, the MPI library that Python finds, and every setting: its value here, default and meaning.

    Under a launcher rank 0 alone prints.
    """
    if launch.launched_rank():
        return
    try:
        settings = config.load()
    except UsageError as error:
        typer.echo(f"commlib: {error}", err=True)
        raise typer.Exit(2) from None
    facts = find_facts()
    values = {row.field: getattr(settings, row.field) for row in rows()}
    if as_json:
        own = {row.variable: values[row.field] for row in rows()}
        typer.echo(json.dumps({**facts, "settings": own}, indent=1))
        return
    width = reader_width()
    typer.echo(wrapped(facts_text(facts), width, indent=10))
    typer.echo("\nSettings, read from the environment:\n")
    for row in rows():
        typer.echo(wrapped(setting_text(row, value_text(values[row.field])), width, indent=4))


def find_facts() -> dict[str, Any]:
    """Return what is installed and found on this machine."""
    try:
        mpi, library = launch.find_library()
    except TransportError as error:
        mpi, library = f"none: {error}", ""
    return {
        "commlib": commlib.__version__,
        "python": platform.python_version(),
        "folder": str(Path(commlib.__file__).parent),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "mpi": mpi,
        "mpi_library": library,
        "gpus": _gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "cache": str(user_cache()),
    }


def facts_text(facts: dict[str, Any]) -> str:
    """Return the facts, a line each."""
    packages = ", ".join(f"{name} {found}" for name, found in facts["packages"].items())
    library = f" ({facts['mpi_library']})" if facts["mpi_library"] else ""
    return "\n".join((
        f"commlib   {facts['commlib']}, {facts['folder']}",
        f"Python    {facts['python']}, {facts['cores']} cores",
        f"packages  {packages}",
        f"MPI       {facts['mpi']}{library}",
        f"GPUs      {facts['gpus']}",
        f"cache     {facts['cache']}",
    ))  # fmt: skip


def setting_text(row: Row, value: str) -> str:
    """Return two lines of a setting: its value, with the default if that is another one; its meaning."""
    default = "" if value == row.default else f"  (default: {row.default or 'empty'})"
    return f"{row.variable}={value}{default}\n    {row.meaning}"


def _gpus() -> str:
    """Return whether MPI takes memory of a GPU, where there may be one: MPI is started for it, in another process."""
    if not mpi_on_gpus.may_have_gpu():
        return "none that CuPy could use"
    found = cuda_probe.probe()
    claim = found.claim or "MPI could not be asked"
    return f"{claim}; MPI {'takes memory of a GPU' if not found.failure else f'took none: {found.failure}'}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
