"""`commlib trace hang`: print the diagnosis of a job that hung, or of a running one. Needs no MPI."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from commlib.errors import UsageError
from commlib.observe.diagnosis import diagnose
from commlib.observe.dump import Dump
from commlib.observe.dump_request import find_job, request_dumps
from commlib.observe.hang_folder import HangFolder, find_hangs

SECONDS = 15.0  # a rank looks every second, and those of other hosts every few seconds


def hang(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="Folder with the hangs of several jobs, of one job, or of one hang. With --now: the running job, by "
            "its name, its folder, or the process of a rank or of mpirun; may be left out if only one runs here.",
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Ask a running job, which goes on.")] = False,
    seconds: Annotated[
        float,
        typer.Option("--timeout", min=0.1, help="With --now: how long to wait for ranks that do not answer, in s."),
    ] = SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    rank: Annotated[int, typer.Option(help="Also print the full dump of this rank.", min=-1)] = -1,
) -> None:
    """Print why a job hangs, from the dumps of its ranks; the latest hang if there are several.

    With --now, the ranks of a running job dump their state at once, hung or not, and the job goes on.
    """
    try:
        if now:
            folder, dumps = request_dumps(find_job(job), seconds)
            hangs = [folder]
        elif job is None:
            raise UsageError("pass a folder with hangs; or a running job, with --now")
        else:
            hangs = find_hangs(job)
            dumps = hangs[-1].read()
        chosen = None if rank < 0 else _of_rank(rank, dumps, hangs[-1])
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    diagnosis = diagnose(dumps)
    if as_json:
        whole = {"folder": str(hangs[-1].path), **diagnosis.as_dict()}
        typer.echo(json.dumps(whole | ({"dump": asdict(chosen)} if chosen else {}), indent=1))
        return
    typer.echo(str(diagnosis))
    if chosen is not None:
        typer.echo("\n".join(_lines(chosen)))
    if len(hangs) > 1:
        typer.echo(f"earlier hangs: {', '.join(str(earlier.path) for earlier in hangs[:-1])}")


def _of_rank(rank: int, dumps: list[Dump], folder: HangFolder) -> Dump:
    matching = [dump for dump in dumps if dump.rank == rank]
    if not matching:
        raise UsageError(f"{folder.path}: rank {rank} has written nothing")
    return matching[0]


def _lines(dump: Dump) -> list[str]:
    lines = [f"rank {dump.rank} of {dump.size}, process {dump.process} on {dump.host}"]
    for group in dump.groups:
        lines.append(
            f"  {group.name}, {group.calls} calls" + (f", failed with {group.failure}" if group.failure else "")
        )
        for operation in group.operations:
            number = f"call {operation.sequence}: " if operation.sequence else ""
            size = "" if operation.nbytes < 0 else f", {operation.nbytes} bytes"
            lines.append(f"    {operation.state:7} {number}{operation.text}{size}")
    for thread in dump.threads:
        lines.append(f"  thread {thread.name}")
        lines += [f"    {frame}" for frame in thread.stack]
    return lines
