"""Data parallelism without a framework: buckets of gradients, when to reduce them, and the engine that does."""

from commlib.data_parallel.agreement import check_agreement
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB, Bucket, Parameter, Slot, make_buckets
from commlib.data_parallel.engine import Engine, Reducer, Statistics, cores_per_rank, overlap_pays
from commlib.data_parallel.tracker import Tracker

__all__ = [
    "BUCKET_CAP_MIB",
    "FIRST_BUCKET_MIB",
    "Bucket",
    "Engine",
    "Parameter",
    "Reducer",
    "Slot",
    "Statistics",
    "Tracker",
    "check_agreement",
    "make_buckets",
    "cores_per_rank",
    "overlap_pays",
]
