"""The argument `ranks` is a Communicator, a Mesh with one axis or a process set in every call, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commlib.checkpoint.checkpoint import Checkpoint, CheckpointPart
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.expert.expert_ranks import ExpertRanks
from commlib.mesh_groups import Mesh
from commlib.preemption import Preemption
from commlib.ranks import check_one_choice, communicator_of
from commlib.sharding.axis import ParallelAxis, axis_of
from tests.bodies.loopback import run

EXPECTED = (
    r"expected a Communicator such as commlib.init\(\) or mesh\['tp'\], a Mesh with one axis, "
    "or a registered ProcessSet"
)


class Pair:
    """Ranks with a communicator, as a process set has."""

    def __init__(self, comm: Communicator) -> None:
        self.comm_of_pair = comm

    def communicator(self, verb: str) -> Communicator:
        assert verb == "pipeline"
        return self.comm_of_pair


def test_ranks_have_one_communicator() -> None:
    def check(comm: Any) -> None:
        mesh = Mesh(ranks=comm, dp=2)
        assert communicator_of(comm, "pipeline") is comm
        assert communicator_of(mesh["dp"], "pipeline") is mesh["dp"]
        assert communicator_of(mesh, "pipeline") is mesh["dp"]
        assert communicator_of(Pair(comm), "pipeline") is comm
        assert axis_of(mesh, "gather").comm is mesh["dp"]
        axis = ParallelAxis(mesh)
        assert axis_of(axis, "gather") is axis and axis.comm is mesh["dp"]
        assert ExpertRanks.of(Mesh(ranks=comm, ep=2), 2).axis.size == 2
        assert Mesh(ranks=mesh, tp=2)["tp"].size == 2

    run(2, check)


def test_a_mesh_of_several_axes_counts_as_one_group_only_where_intended() -> None:
    def check(comm: Any) -> None:
        mesh = Mesh(ranks=comm, pp=2, tp=2)
        assert communicator_of(mesh, "GradScaler", whole=True) is comm
        assert Preemption(ranks=mesh).comm is comm
        with pytest.raises(UsageError, match=rf"pipeline: ranks is the whole Mesh\(pp=2, tp=2\).*{EXPECTED}"):
            communicator_of(mesh, "pipeline")

    run(4, check)


@pytest.mark.parametrize("given", ["tp", 3, [0, 1], None])
def test_every_call_refuses_with_one_text(given: Any, tmp_path: Path) -> None:
    part = CheckpointPart(dict, lambda state: None)
    calls = {
        "pipeline": lambda: communicator_of(given, "pipeline"),
        "gather": lambda: axis_of(given, "gather"),
        "ParallelAxis": lambda: ParallelAxis(given),
        "experts": lambda: ExpertRanks.of(given, 2),
    }
    if given is not None:  # all ranks
        calls["Mesh"] = lambda: Mesh(ranks=given, dp=-1)
        calls["Preemption"] = lambda: Preemption(ranks=given)
        calls["Checkpoint"] = lambda: Checkpoint(tmp_path, {"model": part}, ranks=given)
    for verb, call in calls.items():
        with pytest.raises(UsageError, match=rf"^{verb}: ranks is the {type(given).__name__}.*{EXPECTED}$"):
            call()


def test_ranks_can_be_given_only_once() -> None:
    check_one_choice("DistributedOptimizer", process_set=None, ranks=3, mesh=None)
    with pytest.raises(UsageError, match="DistributedOptimizer: process_set= and mesh= both say which ranks"):
        check_one_choice("DistributedOptimizer", process_set=1, ranks=None, mesh=2)
