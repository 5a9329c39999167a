"""This process: versions, available cores, variables of launcher and MPI, settings."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import commlib
from commlib.config.file import find_settings
from commlib.config.rows import value_text
from commlib.config.settings import Config, Settings, variable
from commlib.diagnosis.facts import LaunchFacts, RankFacts
from commlib.diagnosis.machine import read_host, read_limits
from commlib.errors import UsageError
from commlib.folders import user_cache
from commlib.launch.launchers import find_launcher

PACKAGES = ("numpy", "numba", "ml_dtypes", "mpi4py", "torch", "tensorflow", "tensorflow-cpu", "keras", "tf_keras")

# Variables that control launchers, MPI and its transports: prefixes, then full names.
_STEERING = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPIR_CVAR_", "I_MPI_", "MPICH_", "MV2_", "MVP_", "UCX_", "FI_")
_NAMES = (
    "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "MPI4PY_LIBMPI", "MPI4PY_MPIABI", "OMP_NUM_THREADS", "OPAL_PREFIX",
    "PMIX_NAMESPACE", "SLURM_CPU_BIND", "SLURM_JOB_ID", "SLURM_KILL_BAD_EXIT", "SLURM_MPI_TYPE",
)  # fmt: skip
# Variables that launchers or commlib set themselves: noise.
_NOISE = (
    "OMPI_MCA_ess_", "OMPI_MCA_hwloc_base_report", "OMPI_MCA_opal_abort_delay", "OMPI_MCA_orte_", "OMPI_MCA_plm_",
    "OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "I_MPI_HYDRA_UUID",
    "MV2_COMM_WORLD_", "MVP_COMM_WORLD_", "PMIX_MCA_gds", "PMIX_MCA_psec", "PMIX_MCA_hwloc_base",
)  # fmt: skip


def read_rank(environment: Mapping[str, str] = os.environ) -> RankFacts:
    """Return the facts of this process, without MPI. Starts no process."""
    settings, wrong = Settings(Config(), {}), ""
    try:
        settings = find_settings(environment)
    except UsageError as error:
        wrong = str(error)
    start = read_start(environment)
    return RankFacts(
        rank=0 if start is None else start.rank,
        host=read_host(),
        commlib=commlib.__version__,
        folder=str(Path(commlib.__file__).parent),
        python=platform.python_version(),
        packages={name: installed for name in PACKAGES if (installed := _version(name))},
        cores=tuple(sorted(os.sched_getaffinity(0))),
        limits=read_limits(),
        cache=str(user_cache(environment)),
        environment=control_variables(environment),
        settings={variable(name): value_text(getattr(settings.config, name)) for name in settings.origins},
        origins={variable(name): origin for name, origin in settings.origins.items()},
        start=start,
        wrong_settings=wrong,
    )


def read_start(environment: Mapping[str, str]) -> LaunchFacts | None:
    """Return the launcher's description of this process; None without a launcher."""
    match = find_launcher(environment)
    if match is None:
        return None
    launcher = match.launcher
    return LaunchFacts(
        launcher.command, launcher.protocol, match.rank, match.size, match.local_rank, match.local_size, match.node
    )


def read_slurm(seconds: float = 5.0) -> dict[str, str]:
    """Return Slurm's defaults that matter to MPI; {} if Slurm does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(re.findall(r"^(KillOnBadExit|MpiDefault)\s*=\s*(\S+)", done.stdout, re.MULTILINE))


def control_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that control launchers, MPI and its transports."""
    return {
        name: text
        for name, text in sorted(environment.items())
        if name in _NAMES or (name.startswith(_STEERING) and not name.startswith(_NOISE))
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
