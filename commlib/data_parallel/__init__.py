"""Data parallelism without a framework: buckets of gradients, when to reduce them, and the engine that does."""

from commlib.data_parallel.agreement import check_agreement
from commlib.data_parallel.alone import Alone
from commlib.data_parallel.buckets import (
    BUCKET_CAP_MIB,
    FIRST_BUCKET_MIB,
    Bucket,
    Parameter,
    Slot,
    complete_order,
    make_buckets,
)
from commlib.data_parallel.engine import Engine, MakePlan, Plan, Reducer
from commlib.data_parallel.overlap import cores_per_rank, overlap_pays
from commlib.data_parallel.report import Statistics, StepClock, StepReport
from commlib.data_parallel.tracker import Tracker

__all__ = [
    "BUCKET_CAP_MIB",
    "FIRST_BUCKET_MIB",
    "Alone",
    "Bucket",
    "Engine",
    "MakePlan",
    "Parameter",
    "Plan",
    "Reducer",
    "Slot",
    "Statistics",
    "StepClock",
    "StepReport",
    "Tracker",
    "check_agreement",
    "complete_order",
    "cores_per_rank",
    "make_buckets",
    "overlap_pays",
]
