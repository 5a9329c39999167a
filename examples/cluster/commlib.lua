-- A module file for Lmod: commlib/0.1.0.lua in a folder of MODULEPATH. The lines with "site" are yours to change.
--
--   python -m venv /apps/commlib/0.1.0                                      # made by the site, once
--   /apps/commlib/0.1.0/bin/pip install "PATH_OF_CHECKOUT[cli,torch]"       # without an MPI of wheels
--   COMMLIB_KERNELS=/apps/commlib/0.1.0/kernels /apps/commlib/0.1.0/bin/commlib warm --all --cpu x86-64-v3
--   chmod -R go+rX /apps/commlib/0.1.0/kernels

help([[commlib: collectives for training on clusters, for PyTorch and TensorFlow.
Type "commlib info" in a job to see what it finds here.]])

whatis("Name: commlib")
whatis("Version: 0.1.0")
whatis("Category: library, machine learning, MPI")

family("commlib")
depends_on("openmpi")                          -- site: the MPI that knows the network; mpi4py loads its library

local root = "/apps/commlib/0.1.0"             -- site: the virtual environment

prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)

-- Kernels that are compiled already, for a CPU that every node of the site can stand in for.
setenv("COMMLIB_KERNELS", pathJoin(root, "kernels"))
setenv("NUMBA_CPU_NAME", "x86-64-v3")          -- site
setenv("NUMBA_CPU_FEATURES", "")
