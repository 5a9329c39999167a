"""The core on numpy arrays: the type of an array comes back."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import commlib
from commlib.ranks import Ranks, communicator_of

comm = commlib.init()
assert_type(comm, commlib.Communicator)

x: NDArray[np.float32] = np.ones(8, np.float32)
assert_type(comm.all_reduce(x), NDArray[np.float32])
assert_type(comm.all_reduce(x, "mean", out=x, algorithm="ring"), NDArray[np.float32])
assert_type(comm.reduce_scatter(x), NDArray[np.float32])
assert_type(comm.all_gather(x), NDArray[np.float32])
assert_type(comm.all_to_all(x), NDArray[np.float32])
assert_type(comm.gather(x, root=1), NDArray[np.float32] | None)
assert_type(comm.reduce(x, "max"), NDArray[np.float32] | None)
assert_type(comm.exscan(x), NDArray[np.float32] | None)
assert_type(comm.broadcast(x, 0), NDArray[np.float32])
assert_type(comm.recv(x, 1), NDArray[np.float32])
assert_type(comm.send_recv(b"any bytes", 1, x, 1), NDArray[np.float32])

on_device: Any = comm.empty(8, "float32", "cuda")
assert_type(comm.all_reduce(on_device, algorithm="nccl"), Any)
for algorithm in comm.paths():
    comm.all_reduce(on_device, algorithm=algorithm)

assert_type(comm.scan(x, "max"), NDArray[np.float32])
print(comm.split(comm.rank % 2).size)
half: commlib.Communicator = comm.split(comm.rank % 2, name="half")
if (left := comm.split(0 if comm.rank else -1)) is not None:
    left.barrier()

mesh = commlib.Mesh(dp=-1, tp=2)
assert_type(mesh["tp"], commlib.Communicator)


def ranks_of(ranks: Ranks) -> commlib.Communicator:
    return communicator_of(ranks, "an example")


for ranks in (comm, mesh["dp"], commlib.Mesh(tp=-1)):
    ranks_of(ranks)

commlib.Preemption(ranks=mesh)
commlib.metrics.start()
