"""Sharded layers created without `parallelize`: optimizers recognise them, and a failing backward ends the job."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.any_mpi

REFUSED = """
import commlib, torch
from commlib_torch.tensor import ColumnLinear
layer = ColumnLinear(4, 8, commlib.init(), bias=False)
layer(torch.ones(3, 4)).sum().backward()
try:
    torch.optim.Adafactor(layer.parameters()).step()
except commlib.UsageError as error:
    assert "full weights" in str(error), error
else:
    raise AssertionError("it took a part for the whole")
"""

# With 32 ones the norm is the square root of 32, though each rank has 16.
CLIPPED = """
import commlib, keras, numpy as np
from commlib_tensorflow.tensor import ColumnDense
layer = ColumnDense(8, commlib.init(), use_bias=False)
layer.build((None, 4))
before = layer.kernel.numpy()
optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.5)
optimizer.apply([keras.ops.ones_like(layer.kernel)], [layer.kernel])
np.testing.assert_allclose(before - layer.kernel.numpy(), 0.5 / 32**0.5, rtol=1e-5)
"""


@pytest.mark.parametrize(
    ("module", "program"), [("torch", REFUSED), pytest.param("tensorflow", CLIPPED, marks=pytest.mark.long)]
)
def test_optimizers_recognise_sharded_layers(mpirun, module, program):
    pytest.importorskip(module)
    done = mpirun(2, program, env={"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# The last rank fails after its reduction of the input's gradient; the others wait for it in their next forward.
FAILS = """
import commlib, torch
from commlib_torch.tensor import ColumnLinear, RowLinear
comm = commlib.init()
up, down = ColumnLinear(4, 8, comm), RowLinear(8, 4, comm)
up.axis.overlaps = down.axis.overlaps = True
def fail(gradient):
    raise ValueError("out of luck")
for step in range(3):
    x = torch.ones(3, 4).requires_grad_()
    y = x * 2
    if step == 1 and comm.rank == comm.size - 1:
        y.register_hook(fail)
    down(up(y)).sum().backward()
"""


def test_a_rank_that_fails_in_backward_ends_the_job(mpirun):
    pytest.importorskip("torch")
    done = mpirun(3, FAILS, timeout=60)
    assert done.returncode != 0
    assert "commlib: rank 2 of 3" in done.stderr and "ended by an uncaught ValueError; aborting the job" in done.stderr
