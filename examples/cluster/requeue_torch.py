"""Train in PyTorch, save and exit when a signal arrives, and resume when the job starts again.

    sbatch examples/cluster/requeue.sbatch                           # Slurm sends the signal, and requeues the job
    until mpirun -n 2 python examples/cluster/requeue_torch.py; do   # elsewhere: 75 requests another run
        [ $? = 75 ] || break
    done

At the end it prints a digest of the weights. The weights have the same bits, however often the run was interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import commlib

STEPS = 200
BATCH = 32  # of each rank


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", default="checkpoints", help="folder that all ranks see")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    with commlib.Preemption() as preemption:  # before slow imports: until here a signal ends the process
        import torch

        import commlib_torch as ct

        ct.init()
        torch.manual_seed(ct.rank())  # for dropout, different on each rank
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
        )
        ct.broadcast_parameters(model.state_dict(), root=0)
        optimizer = ct.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-3), model.named_parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

        checkpoint = ct.Checkpoint(arguments.checkpoints, model=model, optimizer=optimizer, schedule=schedule)
        done = checkpoint.resume()
        if ct.rank() == 0:
            print(f"from step {done} on", flush=True)

        teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
        for step in range(done, arguments.steps):
            generator = torch.Generator().manual_seed(step * ct.size() + ct.rank())  # data by step: it resumes, too
            images = torch.randn(BATCH, 64, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), (images @ teacher).argmax(1)).backward()
            optimizer.step()
            schedule.step()
            if preemption.requested():
                checkpoint.save(step + 1)
                preemption.leave()

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    if ct.rank() == 0:
        print("weights", hashlib.blake2b(weights, digest_size=8).hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
