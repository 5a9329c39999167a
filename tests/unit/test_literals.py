"""Type checkers accept exactly the words that calls accept."""

from __future__ import annotations

from typing import get_args

from commlib import literals
from commlib.collectives.call_table import PATHS
from commlib.dtypes import BITWISE, OPERATIONS
from commlib.horovod.reductions import OpName, OptimizerOpName, ReduceOp, reduction_name, resolve_op
from commlib.pipeline.schedule.registry import table
from commlib.schedule.registry import algorithms, verbs

ON_DEVICES = {"nccl", "messages", "host"}


def test_types_have_all_operations() -> None:
    assert get_args(literals.Op) == (*OPERATIONS, *BITWISE)
    assert {resolve_op(name) for name in get_args(OpName)} == set(ReduceOp)
    assert {ReduceOp(op).core for op in ReduceOp} == set(get_args(OpName))


def test_scans_have_all_operations_except_the_mean() -> None:
    assert set(get_args(literals.ScanOp)) == set(get_args(literals.Op)) - {"mean"}


def test_optimizers_have_operations_on_gradients() -> None:
    assert {reduction_name(name) for name in get_args(literals.AveragingOp)} == {"mean", "sum"}
    assert set(get_args(OptimizerOpName)) == {"adasum", *get_args(literals.AveragingOp)}


def test_types_have_all_algorithms() -> None:
    """A new algorithm or path needs its name in the type."""
    scheduled = {name for verb in verbs() for name in algorithms(verb)}
    paths = {path.name for path in PATHS if path.name}
    assert set(get_args(literals.AlgorithmName)) == {"auto"} | scheduled | paths | ON_DEVICES


def test_types_have_all_schedules() -> None:
    assert set(get_args(literals.ScheduleName)) == {"auto", *table}
