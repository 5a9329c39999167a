"""Examples: they run, and check their own training results. (`ci/demo` runs digits_*.py.)"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith(("digits", "gpu")))


def test_the_list_is_complete():
    assert len(SCRIPTS) >= 4


# TensorFlow takes long to start, experts take long to train, and other examples and the adapters' tests call the same
# functions.
LONG = (
    *("horovod_keras.py", "horovod_tensorflow.py", "loop_tensorflow.py", "pipeline_keras.py", "gpt_keras.py"),
    *("moe_torch.py", "moe_keras.py", "hugging_face_torch.py", "gpt_torch.py", "pipeline_torch.py"),
)


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in SCRIPTS]
)
def test_an_example(mpirun, script):
    if script.startswith("hugging_face") and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    done = mpirun(2, EXAMPLES / script, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_arrays_on_gpus(mpirun):
    """On the stand-in for CuPy."""
    done = mpirun(3, ["-m", "tests.cuda", str(EXAMPLES / "gpu_arrays.py")], env={"PYTHONPATH": str(EXAMPLES.parent)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks, mean 2.0, right" in done.stdout


@pytest.mark.long  # four ranks on two cores
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.startswith("pipeline")])
def test_a_pipeline_of_four_stages(mpirun, script):
    done = mpirun(4, EXAMPLES / script, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_sequences_divided_between_two_ranks(mpirun):
    done = mpirun(2, [str(EXAMPLES / "gpt_torch.py"), "--cp", "2", "--tp", "1"], timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


PAIRS = ("", "--pp 2", "--cp 2", "--pp 2 --cp 2 --tp 1", "--cp 2 --tp 1", "--pp 2 --tp 1")


@pytest.mark.long
@pytest.mark.parametrize("axes", PAIRS)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.startswith("gpt")])
def test_a_mesh_of_four_ranks(mpirun, script, axes):
    done = mpirun(4, [str(EXAMPLES / script), *axes.split()], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.startswith("moe")])
@pytest.mark.parametrize(
    ("ranks", "options"), [(2, "--top-k 2 --capacity 1.25"), (4, ""), (4, "--experts 2 --top-k 2")]
)
def test_mixtures_of_experts(mpirun, script, ranks, options):
    """Experts that drop tokens; more ranks; and fewer experts than ranks, with copies."""
    done = mpirun(ranks, [str(EXAMPLES / script), *options.split()], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long  # the same script on the versions that tests/tensorflow_adapter/test_keras_legacy.py tests
def test_a_keras_script_on_keras_2(mpirun):
    done = mpirun(2, EXAMPLES / "horovod_keras.py", env={"TF_USE_LEGACY_KERAS": "1"}, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_two_frameworks_train_one_model(launch_environment):
    local_mpiexec = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(local_mpiexec) if local_mpiexec.exists() else shutil.which("mpiexec")
    halves = [["-n", "1", sys.executable, str(EXAMPLES / "mixed" / f"{half}_half.py")] for half in ("torch", "tf")]
    command = [str(mpiexec), *halves[0], ":", *halves[1]]
    done = subprocess.run(command, env=launch_environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
