# shellcheck shell=bash
# Source this before mpiexec on a laptop, in a container or in CI. A value that is already set wins.
# It is for scripts and tests only: the library never sets any of these, on a cluster they would be wrong.

# Open MPI's mpirun refuses root; in a container root is the only user.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"

# The tests run up to 4 ranks, whatever the number of cores: for Open MPI 5, and for 4.
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
# Up to 2 ranks are bound to one core each by default, and so would be all their threads.
export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"

# One host needs no fabric. Probing for UCX and libfabric costs a second a start. What is not wanted is named, because
# what is has two names: shared memory is sm in Open MPI 5 and vader in 4, where asking for sm ends every job.
export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}"
export OMPI_MCA_btl="${OMPI_MCA_btl:-^openib,uct,ofi,usnic,smcuda}"
# Else every shared window prints a harmless "OSC UCX component priority" error.
export OMPI_MCA_osc="${OMPI_MCA_osc:-^ucx}"

# One thread per rank: ranks are the parallelism here, and a sum over threads is another sum.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
