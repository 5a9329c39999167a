"""Names of both modules of the adapter: they export all earlier names, and none by accident."""

from typing import Any

import pytest

import commlib_tensorflow as tf_hvd
import commlib_tensorflow.horovod
import commlib_tensorflow.keras as keras_hvd
from tests.bodies.misspelled_names import check_misspelled

HOROVOD = {
    "Adasum", "Average", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt",
    "Max", "Min", "ProcessSet", "Product", "ReduceOp", "Sum", "add_process_set", "ccl_built", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built", "shutdown", "size",
    "start_timeline", "stop_timeline",
}  # fmt: skip

ORDERED = {
    "exscan", "exscan_async", "reduce_scatter_v", "reduce_scatter_v_async", "scan", "scan_async",
    "Work", "all_gather", "all_gather_async", "all_gather_object", "all_gather_object_async", "all_gather_v",
    "all_gather_v_async", "all_reduce", "all_reduce_async", "all_to_all", "all_to_all_async", "all_to_all_v",
    "all_to_all_v_async", "barrier_async", "broadcast_async", "broadcast_object_async", "gather",
    "gather_async", "recv", "recv_async", "reduce", "reduce_async", "reduce_scatter", "reduce_scatter_async",
    "scatter", "scatter_async", "send", "send_async", "send_recv", "send_recv_async",
}  # fmt: skip

OWN = {
    "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer",
    "OneBitAdam", "OneBitLAMB",
    "PartialDistributedGradientTape", "Pipeline", "SyncBatchNormalization", "__version__", "allgather",
    "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
    "clip_by_global_norm", "elastic", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "join", "local_rank_op", "local_size_op", "pipeline", "process_set_included_op", "rank_op", "reducescatter",
    "size_op",
}  # fmt: skip

KERAS = {
    "Compression", "DistributedOptimizer", "OneBitAdam", "OneBitLAMB", "PartialDistributedOptimizer",
    "__version__", "allgather", "allgather_object", "allreduce", "broadcast", "broadcast_global_variables",
    "broadcast_object", "broadcast_variables", "callbacks", "elastic", "load_model", "reducescatter",
}  # fmt: skip

DIVIDED = {
    "Column", "ParallelAttention", "ParallelMLP", "Row", "Vocabulary",
    "VocabularyCrossEntropy", "context", "gather_model", "gather_weights", "parallelize", "streams", "tensor",
    "vocabulary_cross_entropy",
}  # fmt: skip

EXPERTS = {
    "Experts", "MoE", "expert_stats", "expertize", "load_experts", "rebalance_experts", "save_experts",
}  # fmt: skip


INTERRUPTED = {"Checkpoint"}

TYPES = {"WrappedOptimizer"}


def exported(module: Any) -> set[str]:
    """Return the names in `__all__`, each of which exists and appears once."""
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)
    return set(module.__all__)


def test_exported_names() -> None:
    assert exported(tf_hvd) == HOROVOD | ORDERED | OWN | DIVIDED | EXPERTS | INTERRUPTED | TYPES
    assert exported(keras_hvd) == HOROVOD | KERAS


def test_horovod_has_a_module_of_its_own() -> None:
    module = commlib_tensorflow.horovod
    assert exported(module) == HOROVOD | OWN - {
        "OneBitAdam",
        "OneBitLAMB",
        "Pipeline",
        "clip_by_global_norm",
        "pipeline",
    }
    assert all(getattr(module, name) is getattr(tf_hvd, name) for name in module.__all__)


def test_names_are_not_modules_of_the_same_name() -> None:
    for module in (tf_hvd, keras_hvd):
        assert callable(module.broadcast) and callable(module.elastic.run)
    for name in ORDERED:
        assert getattr(tf_hvd, name).__doc__


def test_generic_names_of_styles_are_not_at_top_level() -> None:
    """Regression: `from commlib_tensorflow import *` replaced typing's `Sequence`."""
    assert not {"PerRank", "Plan", "Replicate", "Sequence", "Slice"} & set(tf_hvd.__all__)
    styles = {"Column", "PerRank", "Plan", "Replicate", "Row", "Sequence", "Vocabulary"}
    assert styles <= exported(tf_hvd.tensor)


@pytest.mark.parametrize(
    "module, misspelled, near",
    [
        ("commlib_tensorflow", "allreducee", "allreduce"),
        ("commlib_tensorflow.horovod", "Averagee", "Average"),
        ("commlib_tensorflow.keras", "load_modl", "load_model"),
        ("commlib_tensorflow.keras.callbacks", "MetricAverage", "MetricAverageCallback"),
        ("commlib_tensorflow.tensor", "parallelizee", "parallelize"),
    ],
)
def test_a_misspelled_name_gets_the_nearest_one(module: str, misspelled: str, near: str) -> None:
    check_misspelled(module, misspelled, near)
