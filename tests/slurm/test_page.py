"""Commands in docs/pages/slurm.md: they print the output shown there, and the scripts in examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, is_open_mpi

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/pages/slurm.md").read_text()
FILES = re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CONSOLE = "".join(re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ (.*)\n((?:[^$\n].*\n)*)", CONSOLE, re.MULTILINE)


def test_the_page(cluster: Cluster) -> None:
    assert [name for name, _ in FILES] == ["hello.py", "train.toml"]
    assert len(COMMANDS) == CONSOLE.count("$ commlib") + 2 >= 11
    for name, text in FILES:
        (cluster.folder / name).write_text(text)
    for command, printed in COMMANDS:
        done = cluster.run("bash", "-c", command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        missing = set(printed.splitlines()) - set(done.stdout.splitlines())
        assert not missing, f"{command}\n{done.stdout}\n{done.stderr}"
    assert len(list(cluster.folder.glob("slurm-jobs/*/*.json"))) == 1  # of the benchmark


@pytest.mark.parametrize("name", [pytest.param("srun", marks=pytest.mark.long), "mpirun"])
def test_a_user_script(cluster: Cluster, request: pytest.FixtureRequest, name: str) -> None:
    request.getfixturevalue(name)
    [hello] = [text for file, text in FILES if file == "hello.py"]
    program = cluster.program(hello)
    export = "ALL" if is_open_mpi() else "ALL,MPI_TYPE=pmi2,LAUNCH=mpiexec"
    script = str(ROOT / f"examples/slurm/{name}.sh")
    done = cluster.run("sbatch", "--parsable", "--output=out", f"--export={export}", script, "python", program)
    assert done.returncode == 0, done.stderr
    task = cluster.ended(done.stdout.strip())
    output = (cluster.folder / "out").read_text()
    assert task.code == 0, output
    assert sorted(output.splitlines()) == [f"rank {rank} of 4 on h{rank // 2}: 10" for rank in range(4)]


def test_a_table_of_options(cluster: Cluster) -> None:
    done = cluster.commlib("run", "--config", str(ROOT / "examples/slurm/train.toml"), "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=4\n" in done.stdout and "module load gcc openmpi cuda\n" in done.stdout
