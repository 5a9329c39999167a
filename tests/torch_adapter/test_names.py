"""Names of `commlib_torch`: the module exports all earlier names, and none by accident."""

from typing import Any

import pytest

import commlib.horovod
import commlib_torch as hvd
import commlib_torch.horovod
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
    "all_gather_v_async", "all_reduce", "all_reduce_", "all_reduce_async", "all_reduce_async_", "all_to_all",
    "all_to_all_async", "all_to_all_v", "all_to_all_v_async", "barrier_async", "broadcast_object_async",
    "gather", "gather_async", "recv", "recv_async", "reduce", "reduce_async", "reduce_scatter",
    "reduce_scatter_async", "scatter", "scatter_async", "send", "send_async", "send_recv", "send_recv_async",
}  # fmt: skip

OWN = {
    "Compression", "DataParallel", "DistributedOptimizer", "OneBitAdam", "OneBitLAMB", "Pipeline",
    "SyncBatchNorm",
    "__version__", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "clip_grad_norm_", "convert_sync_batchnorm", "elastic", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join", "pipeline",
    "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async", "synchronize",
}  # fmt: skip

DIVIDED = {
    "Column", "GradScaler", "ParallelAttention", "ParallelMLP", "Row",
    "Vocabulary", "context", "gather_optimizer_state", "gather_state_dict", "load_optimizer_state", "parallelize",
    "streams", "tensor", "vocabulary_cross_entropy",
}  # fmt: skip

EXPERTS = {
    "Experts", "MoE", "auxiliary_loss", "expert_stats", "expertize", "load_experts", "rebalance_experts",
    "save_experts",
}  # fmt: skip


INTERRUPTED = {"Checkpoint"}

TYPES = {"WrappedOptimizer"}


def exported(module: Any) -> set[str]:
    """Return the names in `__all__`, each of which exists and appears once."""
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)
    return set(module.__all__)


def test_exported_names() -> None:
    assert exported(hvd) == HOROVOD | ORDERED | OWN | DIVIDED | EXPERTS | INTERRUPTED | TYPES
    assert set(commlib.horovod.__all__) == HOROVOD


def test_horovod_has_a_module_of_its_own() -> None:
    """`allreduce` is a mean and `all_reduce` a sum: programs that import this module cannot confuse them."""
    ours = {
        "DataParallel",
        "OneBitAdam",
        "OneBitLAMB",
        "Pipeline",
        "clip_grad_norm_",
        "convert_sync_batchnorm",
        "pipeline",
    }
    assert exported(commlib_torch.horovod) == HOROVOD | OWN - ours
    assert all(getattr(commlib_torch.horovod, name) is getattr(hvd, name) for name in commlib_torch.horovod.__all__)


def test_names_are_not_modules_of_the_same_name() -> None:
    assert callable(hvd.broadcast) and callable(hvd.join) and callable(hvd.elastic.run) and callable(hvd.pipeline)
    for name in ORDERED:
        assert getattr(hvd, name).__doc__


def test_generic_names_of_styles_are_not_at_top_level() -> None:
    """Regression: `from commlib_torch import *` replaced typing's `Sequence`."""
    assert not {"PerRank", "Plan", "Replicate", "Sequence", "Slice"} & set(hvd.__all__)
    styles = {"Column", "PerRank", "Plan", "Replicate", "Row", "Sequence", "Vocabulary"}
    assert styles <= exported(hvd.tensor)


@pytest.mark.parametrize(
    "module, misspelled, near",
    [
        ("commlib_torch", "allreducee", "allreduce"),
        ("commlib_torch.horovod", "Averagee", "Average"),
        ("commlib_torch.tensor", "parallelizee", "parallelize"),
    ],
)
def test_a_misspelled_name_gets_the_nearest_one(module: str, misspelled: str, near: str) -> None:
    check_misspelled(module, misspelled, near)
