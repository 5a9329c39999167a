"""Training steps for `commlib bench step`: one Keras model, trained with each kind of parallelism."""

from __future__ import annotations

import os
from typing import Any

from commlib.bench.steps.contract import Contenders, StepSizes


def contenders(kind: str, comm: Any, sizes: StepSizes, *, peer: bool) -> Contenders:
    """Return the steps of a kind: "dp", "tp", "pp" or "moe". Collective. There is no peer: the core refuses one."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before the import of TensorFlow
    from commlib_tensorflow.bench_step import kinds

    makers = {
        "dp": kinds.data_parallel,
        "tp": kinds.tensor_parallel,
        "pp": kinds.pipeline_parallel,
        "moe": kinds.experts,
    }
    return makers[kind](comm, sizes)
