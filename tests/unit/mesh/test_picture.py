"""Pictures of meshes, compared letter by letter with tests/golden/mesh/.

To accept new pictures: COMMLIB_GOLDEN=write python -m pytest tests/unit/mesh/test_picture.py, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commlib.errors import UsageError
from commlib.mesh import MeshShape
from commlib.topology import Topology

GOLDEN = Path(__file__).parents[2] / "golden" / "mesh"

MESH = MeshShape.of({"pp": 2, "dp": -1, "tp": 2}, 16)
PICTURES = {
    "pp2_dp4_tp2": MESH.picture(),
    "pp2_dp4_tp2_nodes_of_8": MESH.picture(ranks_per_node=8),
    "pp2_dp4_tp2_nodes_of_6": MESH.picture(ranks_per_node=6),
    "pp2_dp4_tp2_round_robin": MESH.picture(topology=Topology.of([rank % 2 for rank in range(16)])),
    "dp4_tp2_nodes_of_3": MeshShape.of({"dp": 4, "tp": 2}, 8).picture(ranks_per_node=3),
    "dp5": MeshShape.of({"dp": -1}, 5).picture(ranks_per_node=5),
    "pp2_dp4_tp2_experts": MESH.refactor({"dp": {"edp": -1, "ep": 2}}).picture(ranks_per_node=4),
    "dp4_tp8_nodes_of_8": MeshShape.of({"dp": 4, "tp": 8}, 32).picture(ranks_per_node=8),
    "pp8_dp16_tp8_nodes_of_8": MeshShape.of({"pp": 8, "dp": -1, "tp": 8}, 1024).picture(ranks_per_node=8),
    "dp4_cp64": MeshShape.of({"dp": 4, "cp": 64}, 256).picture(ranks_per_node=4),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_match_the_golden_files(name: str) -> None:
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("COMMLIB_GOLDEN") == "write":
        file.write_text(PICTURES[name], encoding="utf-8")
    assert PICTURES[name] == file.read_text(encoding="utf-8"), f"see the top of {__file__}"


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(PICTURES)


def test_a_small_mesh_is_drawn_whole() -> None:
    grid, groups = PICTURES["dp4_tp8_nodes_of_8"].split("\n\n")
    cells = [cell.strip() for row in grid.splitlines()[2:] for cell in row.split("│")[1:-1]]
    assert cells == [str(rank) for rank in range(32)]
    assert "…" not in grid + groups


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="the topology has 4 ranks, the mesh 16"):
        MESH.picture(topology=Topology.of([0, 0, 1, 1]))
