"""Examples of interrupted training, in both frameworks: a signal, a restart, and the same weights."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launch.conftest import MpiRun
from tests.launch.signalled import mpiexec

pytestmark = [pytest.mark.any_mpi, pytest.mark.long]  # the adapters' tests call the same functions

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
LONGER = {"requeue_torch.py": ("--steps", "1500"), "requeue_keras.py": ("--epochs", "20")}


@pytest.mark.parametrize("script", LONGER)
def test_an_interrupted_training_ends_with_the_same_weights(
    mpirun: MpiRun, launch_environment: Mapping[str, str], tmp_path: Path, script: str
) -> None:
    arguments = [str(EXAMPLES / script), *LONGER[script]]
    whole = mpirun(2, [*arguments, "--checkpoints", "whole"], timeout=110)
    assert whole.returncode == 0, whole.stderr
    command = [mpiexec(), "-n", "2", sys.executable, *arguments, "--checkpoints", "interrupted"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=launch_environment, stdout=pipe, stderr=pipe, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("from ")
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=110)
    assert (job.returncode, "weights" in out) == (75, False), out + err
    resumed = mpirun(2, [*arguments, "--checkpoints", "interrupted"], timeout=110)
    assert resumed.returncode == 0, resumed.stderr
    (done,) = re.findall(r"from \w+ (\d+) on", resumed.stdout)
    assert int(done) > 0
    weights = [re.findall(r"weights \w+", text) for text in (whole.stdout, resumed.stdout)]
    assert weights[0] == weights[1] and len(weights[0]) == 1
