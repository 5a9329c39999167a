#!/bin/bash
# A job of Slurm whose ranks MPI's own launcher starts, with a signal two minutes before the limit, after which it comes
# back: sbatch examples/slurm/mpirun.sh python train.py
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

trap : TERM  # scancel and the time limit tell the ranks as well: let them end

# Without the B: above Slurm would signal mpirun's daemons, which the signal ends. So this shell gets it, and tells mpirun,
# which tells all ranks: commlib.Preemption has them save their state, and the job is put into the queue again.
trap 'for job in $(jobs -p); do kill -USR1 $job; done' USR1

# mpirun of Open MPI would bind one or two ranks of a node to a core each, and all their threads with them. MPICH's and
# Intel's is mpiexec -n "$SLURM_NTASKS".
${LAUNCH:-mpirun --bind-to none -n "$SLURM_NTASKS"} "$@" &
ranks=$!
while kill -0 $ranks 2>/dev/null; do
    wait $ranks || true  # a signal ends the wait, too
done
wait $ranks
