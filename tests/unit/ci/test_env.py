"""ci/env.sh: what lets mpiexec run on one machine, whichever Open MPI it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "ci" / "env.sh"


def sourced(**environment):
    command = 'set -eu; source "$0" && env -0'
    done = subprocess.run(
        ["bash", "-c", command, SCRIPT], env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def test_transports_are_left_out_by_name_never_asked_for():
    """Shared memory is called sm in Open MPI 5 and vader in 4, which ended every job that asked for sm."""
    assert sourced()["OMPI_MCA_btl"].startswith("^")
    assert {"sm", "vader", "self", "tcp"}.isdisjoint(sourced()["OMPI_MCA_btl"][1:].split(","))


def test_more_ranks_than_cores_and_root_under_open_mpi_4_and_5():
    settings = sourced()
    assert settings["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert settings["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert settings["PRTE_MCA_hwloc_default_binding_policy"] == settings["OMPI_MCA_hwloc_base_binding_policy"] == "none"
    assert settings["OMPI_ALLOW_RUN_AS_ROOT"] == settings["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_a_value_that_is_set_wins():
    assert sourced(OMPI_MCA_btl="self,vader")["OMPI_MCA_btl"] == "self,vader"
