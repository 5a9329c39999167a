"""Data parallelism without a framework: the GradientReducer that every adapter drives, and its components."""

from commlib.comparison.parameter_check import check_agreement
from commlib.data_parallel.bucket_reducer import BucketPlan, BucketRanks, BucketReducer, MakePlan
from commlib.data_parallel.buckets import (
    BUCKET_CAP_MIB,
    FIRST_BUCKET_MIB,
    Bucket,
    Parameter,
    Slot,
    complete_order,
    make_buckets,
)
from commlib.data_parallel.groups import Groups, place_groups, read_groups
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.reducer_ranks import OrderedRanks, ReducerRanks
from commlib.data_parallel.report import Reporting, Statistics, StepClock, StepReport
from commlib.data_parallel.slots import Slots
from commlib.data_parallel.state import load_compression, save_compression
from commlib.data_parallel.tracker import Tracker
from commlib.data_parallel.values import Values
from commlib.group.overlap import cores_per_rank, overlap_pays
from commlib.group.single_rank import SingleRank

__all__ = [
    "BUCKET_CAP_MIB",
    "FIRST_BUCKET_MIB",
    "SingleRank",
    "Bucket",
    "BucketReducer",
    "Gradient",
    "GradientReducer",
    "Groups",
    "OrderedRanks",
    "MakePlan",
    "Options",
    "Parameter",
    "BucketPlan",
    "ReducerRanks",
    "BucketRanks",
    "Reporting",
    "Slot",
    "Slots",
    "Statistics",
    "StepClock",
    "StepReport",
    "Tracker",
    "Values",
    "check_agreement",
    "complete_order",
    "cores_per_rank",
    "load_compression",
    "make_buckets",
    "overlap_pays",
    "place_groups",
    "read_groups",
    "save_compression",
]
