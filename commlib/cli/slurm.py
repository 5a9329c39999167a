"""`commlib slurm`: write batch scripts, submit them, and wait for their jobs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from commlib.errors import CommlibError, UsageError
from commlib.launch import mpi_start

slurm = typer.Typer(help="Write batch scripts for Slurm, submit them, and wait for their jobs.", no_args_is_help=True)

FOLDER = Path("slurm-jobs")  # default folder of submitted jobs
SHOWN = 40  # lines of a job's output


def job(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(help="after --")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with these options as keys; flags win over it")
    ] = None,
    job_name: Annotated[str | None, typer.Option("--job-name", "-J")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A")] = None,
    qos: Annotated[str | None, typer.Option("--qos")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", "-N", help="default: 1")] = None,
    ntasks_per_node: Annotated[int | None, typer.Option(help="ranks on each node (default: 1)")] = None,
    cpus_per_task: Annotated[int | None, typer.Option("--cpus-per-task", "-c", help="cores of each rank")] = None,
    gpus_per_node: Annotated[str | None, typer.Option(help="4, or a100:4")] = None,
    time: Annotated[str | None, typer.Option("--time", "-t", help="limit: 90, 01:30:00, 2-12")] = None,
    mem: Annotated[str | None, typer.Option(help="memory of each node: 64G; 0 is all")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", "-C")] = None,
    exclusive: Annotated[bool | None, typer.Option("--exclusive/--shared", help="whole nodes")] = None,
    signal: Annotated[
        str | None, typer.Option(help="USR1@120: send this signal to every rank, 120 s before the limit")
    ] = None,
    requeue: Annotated[bool | None, typer.Option("--requeue/--no-requeue", help="after a node failed")] = None,
    array: Annotated[str | None, typer.Option("--array", "-a", help="0-7, or 0-7%2")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="another option of sbatch; repeatable")] = None,
    module: Annotated[list[str] | None, typer.Option(help="module to load; repeatable")] = None,
    venv: Annotated[str | None, typer.Option(help="folder (default: that of this command), or none")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of every rank; repeatable")] = None,
    setup: Annotated[list[str] | None, typer.Option(help="line of bash before the ranks start; repeatable")] = None,
    container: Annotated[str | None, typer.Option(help="image to run the ranks in")] = None,
    runtime: Annotated[
        str | None, typer.Option(help="of the container: apptainer (default), singularity, pyxis")
    ] = None,
    bind: Annotated[list[str] | None, typer.Option(help="folder to bind into the container; repeatable")] = None,
    mpi: Annotated[
        str | None,
        typer.Option(
            help="pmix, pmi2, srun, mpirun (Open MPI), mpiexec (MPICH); default: by this Python's MPI library"
        ),
    ] = None,
    script: Annotated[Path | None, typer.Option(help="write the script to this file")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="submit it")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="submit it, wait for the job, and return its exit code")] = False,
    folder: Annotated[Path | None, typer.Option(help="folder of a submitted job's files (default: slurm-jobs)")] = None,
) -> None:
    # The help texts are RUN and BENCH below.
    from commlib.slurm import request, table
    from commlib.slurm.script import script as script_of

    if mpi_start.launched_rank():
        return  # under a launcher only the first process writes
    kind = str(context.info_name)
    flags: dict[str, Any] = {
        "command": command,
        "job_name": job_name,
        "partition": partition,
        "account": account,
        "qos": qos,
        "nodes": nodes,
        "ntasks_per_node": ntasks_per_node,
        "cpus_per_task": cpus_per_task,
        "gpus_per_node": gpus_per_node,
        "time": time,
        "mem": mem,
        "constraint": constraint,
        "exclusive": exclusive,
        "signal": signal,
        "requeue": requeue,
        "array": array,
        "sbatch": sbatch,
        "modules": module,
        "venv": venv,
        "setup": setup,
        "container": container,
        "runtime": runtime,
        "bind": bind,
        "mpi": mpi,
    }
    is_submitted = submit or wait
    place = folder or (FOLDER if is_submitted else Path())
    try:
        values = {} if config is None else table.read(config)
        values |= {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in flags.items()
            if value not in (None, [])
        }
        values["env"] = {**values.get("env", {}), **request.pairs(env or ())}
        chosen = request.job(kind, values, place)
        text = script_of(chosen, f"commlib slurm {kind}")
        place.mkdir(parents=True, exist_ok=True)  # Slurm does not create it, and the job would fail silently
        if script is not None:
            script.write_text(text)
        elif not is_submitted:
            typer.echo(text, nl=False)
        if not is_submitted:
            return
        number = _submit(text, place)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}") from None
    except CommlibError as error:
        typer.echo(f"commlib slurm: {error}", err=True)
        raise typer.Exit(1) from None
    if wait:
        _wait(number, place)


RUN = """Write a batch script that runs a command on every rank.

    commlib slurm run -N 2 --ntasks-per-node 4 -t 30 -- python train.py

prints it. --submit also submits it, from this folder and this environment;
with --wait the exit code is that of the job.

$SLURM_JOB_ID, $SLURM_ARRAY_TASK_ID and the like in the command are replaced
when the job runs; quote them ('...') so that your shell does not.

Files of a submitted job, in --folder: 12.sh, its script; 12.out, its output
(12_0.out of an array); 12.json, its outcome, after --wait.
"""

BENCH = """Write a batch script that runs `commlib bench`.

    commlib slurm bench -N 2 --wait -- all_reduce --peer mpi

    commlib slurm bench -N 4 --ntasks-per-node 8 --wait -- sweep plan.toml

Unless --out is given, results go to the folder 12 next to the output 12.out;
those of a sweep to plan.jsonl there, so that the next job continues an
interrupted one. All else is as with `commlib slurm run`.
"""

for _name, _help in (("run", RUN), ("bench", BENCH)):
    slurm.command(_name, help=_help, no_args_is_help=True, context_settings={"allow_interspersed_args": False})(job)


@slurm.command("wait")
def wait_for(
    number: Annotated[str, typer.Argument(metavar="JOB", help="the number of a job")],
    folder: Annotated[Path, typer.Option(help="folder of its files")] = FOLDER,
    patience: Annotated[
        float | None, typer.Option(min=0, help="seconds without an answer of Slurm before an error (default: 900)")
    ] = None,
) -> None:
    """Wait for a job submitted before, and end with its exit code."""
    if not number.isdecimal():
        raise typer.BadParameter(f"{number!r}: expected the number of a job")
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}: expected the folder of the job's files")
    _wait(number, folder, patience)


def _submit(text: str, folder: Path) -> str:
    """Submit a script, save it, and print the number of the job."""
    from commlib.slurm import client

    number = client.submit(text)
    typer.echo(number)
    (folder / f"{number}.sh").write_text(text)
    return number


def _wait(number: str, folder: Path, patience: float | None = None) -> None:
    """Wait for a job, show the end of its output, and end with its exit code."""
    from commlib.console import progress
    from commlib.slurm import client, results
    from commlib.slurm.states import summary

    again = shlex.join(["commlib", "slurm", "wait", number, "--folder", str(folder)])
    try:
        with progress.show_changes(f"job {number}") as report:
            tasks = client.wait_for_job(number, report, patience=client.PATIENCE if patience is None else patience)
    except KeyboardInterrupt:
        typer.echo(f"job {number} continues: `{again}` waits for it, `scancel {number}` ends it", err=True)
        raise typer.Exit(130) from None
    except client.UnreachableError as error:
        typer.echo(f"commlib slurm: {error}; this does not end job {number}: `{again}` waits for it", err=True)
        raise typer.Exit(1) from None
    except CommlibError as error:
        typer.echo(f"commlib slurm: {error}", err=True)
        raise typer.Exit(1) from None
    facts = results.facts(folder, number, tasks)
    for task in tasks:
        path = results.output(folder, task)
        if len(tasks) == 1 and (lines := results.tail(path, SHOWN)):
            typer.echo("\n".join(lines))
        where = f"output in {path}" if path.exists() else "no output"
        typer.echo(f"job {task.id}: {summary([task])}, {task.run_time}, exit code {task.code}, {where}", err=True)
    for name in facts["results"]:
        typer.echo(f"results in {name}", err=True)
    try:
        results.save(folder, facts)
    except OSError as error:
        typer.echo(f"commlib slurm: cannot write {error.filename}: {error.strerror}", err=True)
    raise typer.Exit(facts["exit_code"])
