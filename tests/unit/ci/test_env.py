"""ci/env.sh: settings that let mpiexec run on one machine, with any Open MPI."""

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


def test_transports_are_excluded_by_name_and_never_requested():
    """Shared memory is called sm in Open MPI 5 and vader in 4, which ended every job that requested sm."""
    assert sourced()["OMPI_MCA_btl"].startswith("^")
    assert {"sm", "vader", "self", "tcp"}.isdisjoint(sourced()["OMPI_MCA_btl"][1:].split(","))


def test_open_mpi_4_and_5_allow_root_and_oversubscription():
    settings = sourced()
    assert settings["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert settings["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert settings["PRTE_MCA_hwloc_default_binding_policy"] == settings["OMPI_MCA_hwloc_base_binding_policy"] == "none"
    assert settings["OMPI_ALLOW_RUN_AS_ROOT"] == settings["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_an_existing_value_wins():
    assert sourced(OMPI_MCA_btl="self,vader")["OMPI_MCA_btl"] == "self,vader"
