"""Environments that launchers give to their processes, as data: this process is always the fourth."""

from __future__ import annotations

from typing import Any

# The variables of a step of srun: 5 tasks on 3 nodes, this one the second on the second node.
STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5",
}  # fmt: skip
# The variables of mpirun's daemon on the second of two nodes, which its ranks inherit.
DAEMON = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "8",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_HOSTNAME": "b",
}  # fmt: skip

# name: the environment; command, rank, size, local rank, local size, node; whether it helps MPI.
CASES: dict[str, tuple[dict[str, str], tuple[Any, ...], bool]] = {
    "Open MPI 4": (OPEN_MPI | {"PMIX_RANK": "3", "ORTE_SCHIZO_DETECTION": "ORTE"}, ("mpirun", 3, 4, 1, 2, None), True),
    "Open MPI 5": (
        OPEN_MPI | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-b-7@1", "PRTE_LAUNCHED": "1"},
        ("mpirun", 3, 4, 1, 2, None),
        True,
    ),
    "Open MPI in an allocation": (OPEN_MPI | {"PMIX_RANK": "3"} | DAEMON, ("mpirun", 3, 4, 1, 2, None), True),
    "MPICH": (HYDRA, ("mpiexec", 3, 4, 1, 2, None), True),
    "MPICH in an allocation": (HYDRA | DAEMON, ("mpiexec", 3, 4, 1, 2, None), True),
    "Intel MPI": (HYDRA | {"I_MPI_ROOT": "/opt/intel/mpi", "PMI_PORT": "b:40"}, ("mpiexec", 3, 4, 1, 2, None), True),
    "MVAPICH2": (
        {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
         "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        ("mpirun_rsh", 3, 4, 1, 2, None),
        True,
    ),
    "MVAPICH 3": (
        {"MVP_COMM_WORLD_RANK": "3", "MVP_COMM_WORLD_SIZE": "4", "MVP_COMM_WORLD_LOCAL_RANK": "1",
         "MVP_COMM_WORLD_LOCAL_SIZE": "2"},
        ("mpirun_rsh", 3, 4, 1, 2, None),
        True,
    ),
    "srun --mpi=pmi2": (
        STEP | {"PMI_RANK": "3", "PMI_SIZE": "5", "PMI_JOBID": "12.0"}, ("srun --mpi=pmi2", 3, 5, 1, 2, 1), True,
    ),
    "srun --mpi=pmix": (
        STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.12.0"}, ("srun --mpi=pmix", 3, 5, 1, 2, 1), True,
    ),
    "srun --mpi=none": (STEP, ("srun", 3, 5, 1, 2, 1), False),
    "srun --mpi=cray_shasta": (
        STEP | {"PALS_RANKID": "3", "PALS_NODEID": "1", "PMI_RANK": "3", "PMI_SIZE": "5"},
        ("srun --mpi=cray_shasta", 3, 5, 1, 2, 1),
        True,
    ),
    "PALS": (
        {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1", "PMI_SIZE": "4",
         "PMI_RANK": "3"},
        ("mpiexec of PALS", 3, 4, 1, 2, 1),
        True,
    ),
    "PALS with PMIx": (
        {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMIX_RANK": "3"},
        ("mpiexec of PALS", 3, None, 1, None, None),
        True,
    ),
    "jsrun": (
        OPEN_MPI | {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
                    "JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": "3"},
        ("jsrun", 3, 4, 1, 2, None),
        True,
    ),
    "Flux": (
        {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"},
        ("flux run", 3, 4, 1, None, None),
        True,
    ),
    "another with PMIx": ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prun.7"}, ("prun", 3, None, None, None, None), True),
}  # fmt: skip
