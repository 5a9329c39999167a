"""Horovod's API without a framework, shared by `commlib_torch` and `commlib_tensorflow`.

Both adapters export the names in `__all__` unchanged. They build verbs on tensors from the other names.
"""

from commlib.buffers.aligned_arrays import aligned_empty
from commlib.horovod import elastic as elastic
from commlib.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from commlib.horovod.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from commlib.horovod.operations import (
    allgather_object as allgather_object,
)
from commlib.horovod.operations import (
    broadcast_object as broadcast_object,
)
from commlib.horovod.operations import (
    start_allgather as start_allgather,
)
from commlib.horovod.operations import (
    start_allreduce as start_allreduce,
)
from commlib.horovod.operations import (
    start_alltoall as start_alltoall,
)
from commlib.horovod.operations import (
    start_barrier as start_barrier,
)
from commlib.horovod.operations import (
    start_broadcast as start_broadcast,
)
from commlib.horovod.operations import (
    start_compressed_allreduce as start_compressed_allreduce,
)
from commlib.horovod.operations import (
    start_join as start_join,
)
from commlib.horovod.operations import (
    start_reducescatter as start_reducescatter,
)
from commlib.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from commlib.horovod.process_sets import process_set_of as process_set_of
from commlib.horovod.process_sets import require_world as require_world
from commlib.horovod.reductions import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from commlib.horovod.reductions import Reduction as Reduction
from commlib.horovod.reductions import resolve_op as resolve_op

empty = aligned_empty

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
