"""Detection of CUDA-aware MPI at the start, with real MPI libraries; GPUs are emulated in host memory."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

# As much of CuPy as the probe uses, in host memory: MPI accepts that, unless something is done to it.
CUPY = """
import sys
from types import SimpleNamespace
import numpy as np

def asarray(values):
    return SimpleNamespace(values=values, data=SimpleNamespace(ptr=values.ctypes.data), nbytes=values.nbytes)

def zeros(count, dtype):
    return asarray(np.zeros(count, dtype))

def asnumpy(array):
    return array.values

cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None))
"""
KINDS = {
    "works": "",
    "crashes": "def zeros(count, dtype):\n    return SimpleNamespace(data=SimpleNamespace(ptr=64), nbytes=count)\n",
    "loses a byte": "def asnumpy(array):\n    array.values[7] ^= 1\n    return array.values\n",
    "finds no GPU": "raise RuntimeError('no CUDA-capable device is detected')\n",
}
FOUND = {
    "works": "",
    "crashes": "the probe process was killed by SIGSEGV",
    "loses a byte": "1 of 64 bytes arrived corrupted",
    "finds no GPU": "ended with code 1: RuntimeError: no CUDA-capable device is detected",
}


def gpus(tmp_path: Path, kind: str) -> str:
    """Return the folder of an emulated CuPy of this kind."""
    folder = tmp_path / kind / "cupy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(CUPY + KINDS[kind])
    return str(folder.parent)


# A machine with GPUs for rank 1 and beyond, and a library that claims whatever it is configured to.
START = """
import sys
sys.path.insert(0, {folder!r})
import commlib
from commlib import cuda_aware_mpi
from commlib.transport import cuda_aware
from mpi4py import MPI

claim = {claim}
if claim is not ...:
    cuda_aware.query_loaded = lambda MPI: cuda_aware.Answer(claim, "MPI X")
if MPI.COMM_WORLD.rank > 0:
    cuda_aware_mpi.may_have_gpu = lambda: True
print("takes it:", commlib.init().group.transport.accepts("cuda"), flush=True)
"""


def start(mpirun, folder: str, claim: str) -> tuple[list[str], str]:
    """Start two ranks; return their answers, and what is logged."""
    done = mpirun(2, START.format(folder=folder, claim=claim), env={"COMMLIB_LOG_LEVEL": "info"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("commlib ") and "GPU" in line]
    assert len(lines) == 1, done.stderr
    return done.stdout.splitlines(), lines[0]


def test_wheels_claim_no_support(mpirun, tmp_path):
    answers, logged = start(mpirun, gpus(tmp_path, "crashes"), "...")
    assert answers == ["takes it: False"] * 2
    assert logged.startswith("commlib INFO: GPU data goes through host memory: MPI cannot use GPU memory (")
    assert "opal_cuda_support is off" in logged or "MPIX_GPU_query_support returns 0" in logged


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    "kind", [kind if kind in ("works", "crashes") else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_a_library_that_claims_support_is_tried(mpirun, tmp_path, kind):
    answers, logged = start(mpirun, gpus(tmp_path, kind), "True")
    assert answers == [f"takes it: {kind == 'works'}"] * 2
    assert logged.startswith(f"commlib {'INFO' if kind == 'works' else 'WARNING'}: ") and FOUND[kind] in logged


@pytest.mark.any_mpi
def test_a_library_without_a_query_is_tried(mpirun, tmp_path):
    assert start(mpirun, gpus(tmp_path, "works"), "None")[0] == ["takes it: True"] * 2


DIRECT = textwrap.dedent("""
    import numpy as np
    import commlib
    from commlib.transport.mpi import MpiTransport
    from tests.cuda.gpu import Gpu
    from tests.cuda import standin

    comm, cupy = commlib.init(), standin.install()
    from commlib.devices.cuda.process import device

    gpu, sent, addressed = Gpu(device(), cupy), [], MpiTransport.addressed

    def counting(self, buffer):
        sent.append(buffer.nbytes)
        return addressed(self, buffer)

    MpiTransport.addressed = counting
    x = gpu.put(np.full(6000, comm.rank + 1.0, np.float32))
    np.testing.assert_array_equal(gpu.fetch(comm.all_reduce(x)), np.full(6000, 3.0, np.float32))
    np.testing.assert_array_equal(gpu.fetch(comm.all_gather(x)), np.repeat(np.float32([1, 2]), 6000))
    print(sum(sent) > 0, flush=True)
""")


@pytest.mark.any_mpi
@pytest.mark.parametrize("aware", ["yes", pytest.param("no", marks=pytest.mark.long), "auto"])
def test_gpu_memory_goes_through_mpi_on_the_users_word(mpirun, aware):
    """By messages of its own memory, really the host's; the only other path here is copies."""
    env = {"COMMLIB_CUDA_AWARE": aware, "COMMLIB_DEVICE_PEERS": "0", "COMMLIB_NCCL": "0"}
    done = mpirun(2, DIRECT, env=env)
    assert done.stdout.splitlines() == [str(aware == "yes")] * 2, done.stderr
