"""Data parallelism without a framework: the GradientReducer that every adapter drives, and what it is made of."""

from commlib.comparison.parameter_check import check_agreement
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
from commlib.data_parallel.groups import Groups, place_groups, read_groups
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.ranks import InOrder, Ranks
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.report import Statistics, StepClock, StepReport
from commlib.data_parallel.reporting import Reporting
from commlib.data_parallel.slots import Slots
from commlib.data_parallel.state import load_compression, save_compression
from commlib.data_parallel.tracker import Tracker
from commlib.data_parallel.values import Values
from commlib.group.overlap import cores_per_rank, overlap_pays
from commlib.group.single_rank import Alone

__all__ = [
    "BUCKET_CAP_MIB",
    "FIRST_BUCKET_MIB",
    "Alone",
    "Bucket",
    "Engine",
    "Gradient",
    "GradientReducer",
    "Groups",
    "InOrder",
    "MakePlan",
    "Options",
    "Parameter",
    "Plan",
    "Ranks",
    "Reducer",
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
