"""A job that no cluster could run is refused; the message names the option and the expected value."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.errors import UsageError
from commlib.slurm.job import Job, check

GOOD: dict[str, Any] = {"command": ("true",), "mpi": "pmix"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"command": ()}, "no command: expected the command of each rank"),
        ({"mpi": "openmpi"}, "mpi 'openmpi': expected pmix, pmi2, srun, mpirun, mpiexec"),
        ({"nodes": 0}, "nodes is 0: expected at least 1"),
        ({"ntasks_per_node": -1}, "ntasks-per-node is -1"),
        ({"cpus_per_task": 0}, "cpus-per-task is 0"),
        ({"job_name": "a b"}, "job-name 'a b': expected letters"),
        ({"partition": "gpu; rm"}, "partition 'gpu; rm'"),
        ({"gpus_per_node": "a100"}, "gpus-per-node 'a100': expected a number, or a kind and a number"),
        ({"time": "1h"}, "time '1h': expected minutes"),
        ({"time": "1:2:3:4"}, "time '1:2:3:4'"),
        ({"mem": "64 GB"}, "mem '64 GB': expected the memory of a node"),
        ({"signal": "USR1"}, "signal 'USR1': expected a signal, and the seconds"),
        ({"signal": "B:USR1@60"}, "signal 'B:USR1@60'"),
        ({"array": "0..3"}, "array '0..3': expected numbers and ranges"),
        ({"constraint": "a b"}, "constraint 'a b'"),
        ({"constraint": "a\n#SBATCH --exclusive"}, "expected one line without control characters"),
        ({"command": ("a\nb",)}, "command 'a\\nb': expected one line"),
        ({"env": {"1A": "b"}}, "env '1A': expected the name of a variable"),
        ({"env": {"A": "b\nc"}}, "env 'b\\nc': expected one line"),
        ({"output": 'a"b'}, "output 'a\"b'"),
        ({"sbatch": ("mail",)}, "sbatch 'mail': expected an option of sbatch"),
        (
            {"sbatch": ("--time=3",)},
            "sbatch '--time=3': commlib slurm has this option itself; use time",
        ),
        ({"sbatch": ("--gpus-per-node 3",)}, "use gpus-per-node instead"),
        ({"runtime": "docker"}, "runtime 'docker': expected apptainer, singularity, pyxis"),
        ({"bind": ("/a",)}, "bind /a: there is no container"),
        ({"container": "x.sif", "venv": "/v"}, "venv /v: a container has its own Python"),
        ({"container": "x", "runtime": "pyxis", "mpi": "mpirun"}, "mpi mpirun: with pyxis srun starts the container"),
    ],
)
def test_a_wrong_option_is_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(Job(**{**GOOD, **values}))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        *({"time": time} for time in ("5", "5:30", "1:00:00", "2-12", "2-12:30", "2-12:30:10", "UNLIMITED")),
        *({"array": array} for array in ("3", "0-7", "0-7:2", "1,3,5-9%2")),
        *({"mem": mem} for mem in ("0", "512", "64G")),
        *({"signal": signal} for signal in ("USR1@120", "SIGTERM@5")),
        {"partition": "gpu,gpu-2"},
        {"sbatch": ("--mail-type=END", "-w node7", "--ntasks=5")},
        {"container": "docker://x:1", "bind": ("/a:/b:ro",), "mpi": "mpirun"},
        {"container": "x", "runtime": "pyxis", "mpi": "srun"},
    ],
)
def test_values_that_sbatch_accepts_are_accepted(values: dict[str, Any]) -> None:
    check(Job(**{**GOOD, **values}))
