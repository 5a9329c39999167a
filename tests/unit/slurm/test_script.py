"""Batch scripts have the given options, and bash parses them as intended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commlib.slurm.job import LAUNCHERS, Job
from commlib.slurm.script import script

PLAIN = Job(command=("python", "train.py"), mpi="pmix", job_name="train", nodes=2, ntasks_per_node=4)

FULL = Job(
    command=("python", "train.py", "--seed", "$SLURM_ARRAY_TASK_ID", "--note", 'a $HOME "b"'),
    mpi="pmi2",
    job_name="train",
    output="my jobs/%j.out",
    partition="gpu",
    account="p1",
    qos="long",
    nodes=2,
    ntasks_per_node=4,
    cpus_per_task=8,
    gpus_per_node="a100:4",
    time="01:30:00",
    mem="64G",
    constraint="ib&new",
    exclusive=True,
    signal="SIGUSR1@120",
    requeue=True,
    array="0-3%2",
    sbatch=("--mail-type=END",),
    modules=("gcc/12", "mpich"),
    venv="/my home/venv",
    env={"NCCL_DEBUG": "WARN", "TEXT": "it's $HOME"},
    setup=("ulimit -c 0",),
)

WRITTEN = """\
#!/bin/bash
# Written by `commlib slurm run`; sbatch submits it.
#SBATCH --job-name=train
#SBATCH --output="my jobs/%j.out"
#SBATCH --partition=gpu
#SBATCH --account=p1
#SBATCH --qos=long
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=a100:4
#SBATCH --time=01:30:00
#SBATCH --mem=64G
#SBATCH --constraint=ib&new
#SBATCH --array=0-3%2
#SBATCH --exclusive
#SBATCH --signal=B:SIGUSR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --mail-type=END

# Software: an error ends the job.
set -e
module load gcc/12 mpich
source '/my home/venv/bin/activate'
ulimit -c 0

# Environment of every rank.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export NCCL_DEBUG=WARN
export TEXT='it'"'"'s $HOME'

# The ranks: 4 on each of 2 nodes.
trap : TERM  # scancel and the time limit also signal the ranks: let them end
# Slurm signals this shell, which passes the signal on to the ranks.
trap 'for job in $(jobs -p); do kill -USR1 $job; done' USR1
srun --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task=8 \\
    python train.py --seed "$SLURM_ARRAY_TASK_ID" --note 'a $HOME "b"' &
ranks=$!
while kill -0 $ranks 2>/dev/null; do
    wait $ranks || true  # a signal ends the wait, too
done
wait $ranks
"""


def test_a_script_has_all_options() -> None:
    assert script(FULL) == WRITTEN


def test_missing_options_are_left_to_the_site() -> None:
    text = script(PLAIN, "commlib slurm bench")
    options = [line.split("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [f"#SBATCH --{name}" for name in ("job-name", "output", "nodes", "ntasks-per-node")]
    assert text.startswith("#!/bin/bash\n# Written by `commlib slurm bench`") and "export" not in text
    assert text.endswith("srun --mpi=pmix --kill-on-bad-exit=1 \\\n    python train.py\n")


@pytest.mark.parametrize(("requeue", "expected"), [(True, ["--requeue"]), (False, ["--no-requeue"]), (None, [])])
def test_requeue_is_enabled_disabled_or_left_to_the_site(requeue: bool | None, expected: list[str]) -> None:
    lines = script(replace(PLAIN, requeue=requeue)).splitlines()
    assert [line.removeprefix("#SBATCH ") for line in lines if "requeue" in line] == expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (replace(PLAIN, container="my.sif"), "apptainer exec my.sif"),
        (
            replace(PLAIN, container="my.sif", runtime="singularity", bind=("/a", "/b:/c d"), gpus_per_node="1"),
            "singularity exec --nv --bind /a --bind '/b:/c d' my.sif",
        ),
        (
            replace(PLAIN, container="nvcr.io#nvidia/x:1", runtime="pyxis", bind=("/a:/a", "/b:/b")),
            "'--container-image=nvcr.io#nvidia/x:1' --container-mounts=/a:/a,/b:/b",
        ),
    ],
    ids=["apptainer", "singularity", "pyxis"],
)
def test_a_container_runs_between_the_launcher_and_the_command(job: Job, expected: str) -> None:
    assert script(job).endswith(f"{LAUNCHERS['pmix']} \\\n    {expected} \\\n    python train.py\n")


def stand_in(folder: Path, name: str, text: str) -> None:
    """Put a command of this name into the folder."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_bash_keeps_words_unchanged(tmp_path: Path) -> None:
    """Only Slurm's variables are expanded: the shell of the user has expanded others."""
    words = ("a b", "$HOME", "it's", '"', "\\", "`date`", "*", "run-$SLURM_JOB_ID", '$SLURM_JOB_ID "$HOME" `x` \\')
    stand_in(tmp_path, "srun", 'shift 2; printf "%s\\n" "$@"')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "HOME": "/home"}
    text = script(replace(PLAIN, command=words))
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=environment, check=True)
    assert done.stdout.splitlines() == [word.replace("$SLURM_JOB_ID", "7") for word in words]


@pytest.mark.parametrize("mpi", LAUNCHERS)
def test_the_exit_code_comes_from_the_ranks(tmp_path: Path, mpi: str) -> None:
    stand_in(tmp_path, LAUNCHERS[mpi].split()[0], "exit 7")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": "1"}
    for job in (replace(PLAIN, mpi=mpi), replace(PLAIN, mpi=mpi, signal="USR1@60")):
        assert subprocess.run(["bash"], input=script(job), text=True, env=environment).returncode == 7


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_the_script_outlives_a_signal_until_the_ranks_have_ended(tmp_path: Path, name: str) -> None:
    """A script that ends first takes the ranks along while they write a checkpoint."""
    stand_in(
        tmp_path,
        "srun",
        'trap "sleep 0.2; echo saved; exit 5" USR1\ntouch ready\nfor i in {1..100}; do sleep 0.1; done',
    )
    (tmp_path / "job.sh").write_text(script(replace(PLAIN, signal="USR1@60")))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as job:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        if name == "TERM":  # Slurm itself sends this one to the ranks
            job.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        out, _ = job.communicate(timeout=30)
    assert (out, job.returncode) == ("saved\n", 5)


def test_a_signal_right_after_the_start_is_handled(tmp_path: Path) -> None:
    """The script set its traps after it had started the ranks: a signal in between ended it."""
    stand_in(
        tmp_path, "srun", 'trap "echo saved; exit 5" USR1\nkill -USR1 $PPID\nfor i in {1..100}; do sleep 0.1; done'
    )
    (tmp_path / "job.sh").write_text(script(replace(PLAIN, signal="USR1@60")))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("saved\n", 5)


def test_missing_software_ends_the_job(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", "touch started")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    text = script(replace(PLAIN, venv=str(tmp_path / "none")))
    done = subprocess.run(["bash"], cwd=tmp_path, input=text, text=True, capture_output=True, env=environment)
    assert done.returncode != 0 and "No such file" in done.stderr and not (tmp_path / "started").exists()
