"""A job in a TOML file: every option, and errors that name the file and the key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from commlib.errors import UsageError
from commlib.slurm import table
from commlib.slurm.job import Job, check

ALL = """
command = "python train.py --note 'a b'"
mpi = "mpirun"
job-name = "train"
partition = "gpu"
account = "p1"
qos = "long"
nodes = 2
ntasks-per-node = 4
cpus_per_task = 8
gpus-per-node = 4
time = 90
mem = "64G"
constraint = "ib"
exclusive = true
signal = "USR1@120"
requeue = false
array = "0-3"
sbatch = ["--mail-type=END"]
modules = ["gcc", "openmpi"]
venv = "/venv"
setup = ["ulimit -c 0"]
container = "x.sif"
runtime = "singularity"
bind = ["/a"]

[env]
NCCL_DEBUG = "WARN"
"""


def read(folder: Path, text: str) -> dict[str, object]:
    path = folder / "job.toml"
    path.write_text(text)
    return table.read(path)


def test_every_option_has_a_key(tmp_path: Path) -> None:
    values = read(tmp_path, ALL)
    assert set(values) == {item.name for item in fields(Job)} - {"output"}
    assert values["command"] == ("python", "train.py", "--note", "a b")
    assert (values["gpus_per_node"], values["time"], values["nodes"], values["requeue"]) == ("4", "90", 2, False)
    assert (values["modules"], values["env"]) == (("gcc", "openmpi"), {"NCCL_DEBUG": "WARN"})
    check(Job(**{**values, "venv": None}))  # type: ignore[arg-type]


def test_a_command_may_be_a_list(tmp_path: Path) -> None:
    assert read(tmp_path, 'command = ["python", "a b.py"]') == {"command": ("python", "a b.py")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node = 2", "unknown key 'node': did you mean nodes?"),
        ("xyzzy = 2", "unknown key 'xyzzy': expected command, mpi, "),
        ("output = 'x'", "unknown key 'output'"),
        ("nodes = '2'", "nodes = '2': expected a whole number"),
        ("nodes = true", "nodes = True: expected a whole number"),
        ("mem = 64", "mem = 64: expected text"),
        ("time = 1.5", "time = 1.5: expected text"),
        ("exclusive = 1", "exclusive = 1: expected true or false"),
        ("modules = 'gcc'", "modules = 'gcc': expected a list of texts"),
        ("modules = [1]", "modules = [1]: expected a list of texts"),
        ("[env]\nA = 1", "env = {'A': 1}: expected a table of texts"),
        ('command = "a \'b"', 'command = "a \'b": No closing quotation'),
        ("job-name = 'a'\njob_name = 'b'", "job-name is given twice"),
        ("nodes = ", "is not TOML: "),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert expected in str(caught.value) and "job.toml" in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: No such file"):
        table.read(tmp_path / "none.toml")
