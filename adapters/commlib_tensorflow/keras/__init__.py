"""Horovod's API for Keras: what `import horovod.tensorflow.keras as hvd` gives.

import commlib_tensorflow.keras as hvd

hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), loss)
model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

Optimizers may be those of Keras 3 or of tf_keras; callbacks and `load_model` are for the one that `tf.keras` is.
"""

from commlib import __version__
from commlib.horovod import (
    Adasum,
    Average,
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    Max,
    Min,
    ProcessSet,
    Product,
    ReduceOp,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
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
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.functions import allgather_object, broadcast_object, broadcast_variables
from commlib_tensorflow.keras import callbacks, elastic
from commlib_tensorflow.keras._models import DistributedOptimizer, PartialDistributedOptimizer, load_model
from commlib_tensorflow.keras._values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from commlib_tensorflow.one_bit import OneBitAdam, OneBitLAMB

__all__ = [
    "__version__",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "OneBitAdam",
    "OneBitLAMB",
    "load_model",
    "callbacks",
    "elastic",
    "Compression",
    "allreduce",
    "allgather",
    "broadcast",
    "reducescatter",
    "broadcast_global_variables",
    "broadcast_variables",
    "broadcast_object",
    "allgather_object",
    "init",
    "shutdown",
    "is_initialized",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "start_timeline",
    "stop_timeline",
    "ProcessSet",
    "global_process_set",
    "add_process_set",
    "remove_process_set",
    "ReduceOp",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
]
