"""The core on numpy arrays: calls that a checker refuses."""

import numpy as np
from numpy.typing import NDArray

import commlib
from commlib.ranks import communicator_of

comm = commlib.init()
x: NDArray[np.float32] = np.ones(8, np.float32)

comm.all_reduce(x, "men")  # error: call-overload
comm.all_reduce(x, algorithm="rnig")  # error: call-overload
comm.all_reduce_async(x, "men")  # error: arg-type
comm.plan_all_reduce(x, op="average")  # error: arg-type
comm.broadcast(x, "0")  # error: arg-type
single = comm.all_gather(x)
double: NDArray[np.float64] = single  # error: assignment
comm.scan(x, "mean")  # error: call-overload
comm.exscan_async(x, "mean")  # error: arg-type
print(comm.split(0).rnak)  # error: union-attr
comm.split("0")  # error: call-overload
comm.gather(x).sum()  # error: union-attr
comm.allreduce(x)  # error: attr-defined
commlib.Mesh(comm=comm, dp=2)  # error: arg-type
commlib.Mesh(ranks="dp", dp=2)  # error: arg-type
commlib.Preemption(ranks=3)  # error: arg-type
communicator_of("dp", "an example")  # error: arg-type
print(commlib.Phase)  # error: attr-defined
