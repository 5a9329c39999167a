#!/bin/bash
# A Slurm job whose ranks are started by srun: sbatch examples/slurm/srun.sh python train.py
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00

set -e
# module load openmpi                # whatever your site calls it
# source ~/venv/bin/activate

trap : TERM  # scancel and the time limit also signal the ranks: let them end

# pmix for Open MPI, pmi2 for MPICH and its relatives; commlib.init reports if it is the wrong one.
# Without --kill-on-bad-exit the other ranks wait forever for a dead rank.
srun --mpi="${MPI_TYPE:-pmix}" --kill-on-bad-exit=1 "$@"
