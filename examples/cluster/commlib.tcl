#%Module1.0
# A module file for Environment Modules (and Lmod, which reads it, too): commlib/0.1.0 in a folder of MODULEPATH.
# It does the same as commlib.lua. Adapt the lines with "site".

proc ModulesHelp { } {
    puts stderr "commlib: collectives for training on clusters, for PyTorch and TensorFlow."
    puts stderr "Type \"commlib info\" in a job to see what it finds here."
}

module-whatis "Name: commlib"
module-whatis "Version: 0.1.0"
module-whatis "Category: library, machine learning, MPI"

conflict commlib
prereq openmpi                                 ;# site: the MPI that supports the network; mpi4py loads its library

set root /apps/commlib/0.1.0                   ;# site: the virtual environment

prepend-path PATH $root/bin
setenv VIRTUAL_ENV $root

# Precompiled kernels, for a CPU level that all nodes of the site support.
setenv COMMLIB_KERNELS $root/kernels
setenv NUMBA_CPU_NAME x86-64-v3                ;# site
setenv NUMBA_CPU_FEATURES ""
