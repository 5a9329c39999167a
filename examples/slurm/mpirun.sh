#!/bin/bash
# A Slurm job whose ranks are started by MPI's launcher. Slurm signals it two minutes before the limit, and the job is
# requeued: sbatch examples/slurm/mpirun.sh python train.py
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue

set -e
# module load openmpi                # whatever your site calls it
# source ~/venv/bin/activate

trap : TERM  # scancel and the time limit also signal the ranks: let them end

# Without the B: above Slurm would signal mpirun's daemons, and the signal would end them. So this shell gets the signal
# and forwards it to mpirun and the ranks: commlib.Preemption saves their state, and the job is requeued.
trap 'for job in $(jobs -p); do kill -USR1 $job; done' USR1

# Open MPI's mpirun would bind one or two ranks of a node, with all their threads, to a core each. For MPICH and Intel
# MPI use mpiexec -n "$SLURM_NTASKS".
${LAUNCH:-mpirun --bind-to none -n "$SLURM_NTASKS"} "$@" &
ranks=$!
while kill -0 $ranks 2>/dev/null; do
    wait $ranks || true  # a signal ends the wait, too
done
wait $ranks
