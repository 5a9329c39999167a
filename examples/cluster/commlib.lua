-- A module file for Lmod: commlib/0.1.0.lua in a folder of MODULEPATH. Adapt the lines with "site".
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
depends_on("openmpi")                          -- site: the MPI that supports the network; mpi4py loads its library

local root = "/apps/commlib/0.1.0"             -- site: the virtual environment

prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)

-- Precompiled kernels, for a CPU level that all nodes of the site support.
setenv("COMMLIB_KERNELS", pathJoin(root, "kernels"))
setenv("NUMBA_CPU_NAME", "x86-64-v3")          -- site
setenv("NUMBA_CPU_FEATURES", "")
