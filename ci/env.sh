# shellcheck shell=bash
# Source this before mpiexec on a laptop, in a container or in CI. Existing values are not changed.
# It is for scripts and tests only: the library never sets these variables, because on a cluster they would be wrong.

# Open MPI's mpirun refuses root; in a container root is the only user.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"

# The tests run up to 4 ranks on any number of cores: for Open MPI 5, and for 4.
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
# By default up to 2 ranks are bound, with all their threads, to one core each.
export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"

# One host needs no fabric. Probing for UCX and libfabric costs a second per start. Transports are excluded, not
# selected, because shared memory has two names: sm in Open MPI 5 and vader in 4, where a request for sm ends every job.
export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}"
export OMPI_MCA_btl="${OMPI_MCA_btl:-^openib,uct,ofi,usnic,smcuda}"
# Otherwise every shared window prints a harmless "OSC UCX component priority" error.
export OMPI_MCA_osc="${OMPI_MCA_osc:-^ucx}"

# One thread per rank: the ranks use the cores, and a sum over several threads has another order.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
