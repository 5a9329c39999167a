"""Calls before `init` or after `shutdown`: nothing initialises silently, and the error names the call to make."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.any_mpi

CALLS = {
    "commlib": (
        "import commlib, numpy as np",
        ["commlib.world()"],
        "commlib.init()",
    ),
    "horovod": (
        "from commlib import horovod as hvd\nimport numpy as np\nx = np.ones(3)",
        [
            "hvd.rank()",
            "hvd.size()",
            "hvd.local_rank()",
            "hvd.mpi_threads_supported()",
            "hvd.start_allreduce([x], [x], 'x')",
            "hvd.start_barrier()",
            "hvd.broadcast_object(1)",
            "hvd.add_process_set([0])",
            "hvd.start_timeline('x')",
        ],
        "hvd.init()",
    ),
    "torch": (
        "import commlib_torch as hvd, torch\nmodel = torch.nn.Linear(2, 2)\nx = torch.ones(3)",
        [
            "hvd.allreduce(x)",
            "hvd.all_reduce(x)",
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
            "hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))",
            "hvd.DataParallel(model)",
            "hvd.OneBitAdam(model.parameters(), lr=0.1, freeze_step=1)",
        ],
        "hvd.init()",
    ),
    "tensorflow": (
        "import commlib_tensorflow as hvd, tensorflow as tf\nx = tf.ones(3)",
        [
            "hvd.allreduce(x)",
            "hvd.broadcast_variables([tf.Variable(x)], root_rank=0)",
            "hvd.DistributedGradientTape(tf.GradientTape())",
        ],
        "hvd.init()",
    ),
}

# Each is a module of its own for users, with the same version.
MODULES = {"torch": ["commlib_torch"], "tensorflow": ["commlib_tensorflow", "commlib_tensorflow.keras"]}


@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=pytest.mark.long) if name == "tensorflow" else name for name in CALLS]
)
def test_calls_before_init_and_after_shutdown(mpirun, module):
    """`hvd.allreduce` initialised silently, and `hvd.rank` raised an error that named `commlib.init`."""
    if module in ("torch", "tensorflow"):
        pytest.importorskip(module)
    head, calls, named = CALLS[module]
    program = f"""{head}
import commlib, importlib
for name in {MODULES.get(module, [])}:
    assert importlib.import_module(name).__version__ == commlib.__version__, name
for _ in range(2):
    for call in {calls}:
        try:
            eval(call)
        except ValueError as error:
            assert isinstance(error, commlib.UsageError) and "not initialised: call {named} first" in str(error), call
        else:
            raise AssertionError(call)
    assert not commlib.is_initialized()
    {named}
    {named.replace("init", "shutdown")}
print("well")
"""
    done = mpirun(1, program, env={"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}, timeout=120)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_the_command_prints_its_version(mpirun):
    pytest.importorskip("typer")
    import commlib

    done = mpirun(1, ["-m", "commlib", "--version"])
    assert (done.returncode, done.stdout) == (0, f"commlib {commlib.__version__}\n"), done.stderr
