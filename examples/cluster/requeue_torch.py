"""Train in PyTorch until a signal comes, save, leave, and go on where it was when the job is started again.

    sbatch examples/cluster/requeue.sbatch                           # Slurm sends the signal, and requeues the job
    until mpirun -n 2 python examples/cluster/requeue_torch.py; do   # elsewhere: 75 asks for another start
        [ $? = 75 ] || break
    done

It prints a digest of the weights at the end: the same, to the last bit, however often it was interrupted.
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
    with commlib.Preemption() as preemption:  # before what takes long to import: until here a signal ends the process
        import torch

        import commlib_torch as ct

        ct.init()
        torch.manual_seed(ct.rank())  # of dropout, on each rank its own
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
            generator = torch.Generator().manual_seed(step * ct.size() + ct.rank())  # data by step: it goes on, too
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
