"""Collectives, staging, kernels and training steps on GPUs, against peers and the memory bound.

    mpiexec -n 2 python benchmarks/gpu.py verbs [--sizes BYTES ...] [--peers gloo nccl mpi] [--out FILE.json]
    COMMLIB_DEVICE_IPC=0 mpiexec -n 2 python benchmarks/gpu.py staging
    python benchmarks/gpu.py kernels
    mpiexec -n 2 python benchmarks/gpu.py step

`ci/gpu` runs all of them. Ranks share the current GPU, unless each has a different one. A line per contender has the
columns of nccl-tests: size, count, type, the time of a call on the host ("time us") and by CUDA events on the caller's
stream ("event us"; not for peers with internal streams), each the median over rounds of the mean of a burst, of the
slowest rank; algbw, busbw, wrong elements (after the last round), and the ratio of its time to the first contender's.
Contenders take turns, in rounds whose order rotates.

verbs      "symmetric" is commlib on memory of comm.empty, "ordinary" on CuPy arrays, which all peers use. The bound
           is the bytes that must be read and written, 2 P N for an all_reduce of P ranks that share a GPU, at the rate
           of a copy within its memory, which counts both. Between several GPUs there is no bound.
staging    all_reduce through host memory, by the GPUs ("between", COMMLIB_DEVICE_IPC=0) or by the host's cores
           ("staged", COMMLIB_DEVICE_PEERS=0). The bound is the time in which all ranks at once copy as many bytes to
           pinned memory, and on another stream as many back.
kernels    one process. GB/s counts the bytes that must be read and written, "of copy" compares with a copy of those.
step       an MLP of torch on the GPU; exposed communication is the additional time of a step, in per cent of a step
           without communication.

--tiny runs every line of this on an emulated GPU in host memory: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mpi4py import MPI

import commlib
from benchmarks import record
from benchmarks.gpu_contenders import PEERS
from benchmarks.gpu_data import NAMES, VerbJob
from benchmarks.gpu_kernels import measure as measure_kernels
from benchmarks.gpu_machine import Machine, copy_rate, pinned_rate
from benchmarks.gpu_session import HEADER, Bound, Session, show
from benchmarks.gpu_step import measure as measure_step
from commlib.bench import gloo_peer

# Sizes with performance goals come first: time may run out.
SIZES = [4 << 10, 256 << 20, 64 << 10, 1 << 20, 16 << 20]
FEWER = [4 << 10, 64 << 20, 1 << 20]  # of other verbs
TINY = [512, 1 << 20]
DTYPES = ["float32", "bfloat16"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("verbs", "staging", "kernels", "step"))
    parser.add_argument("--verbs", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--sizes", type=int, nargs="*", help="bytes")
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES, help="of all_reduce; others: float32")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600, help="begin no further row after this time")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on an emulated GPU")
    parser.add_argument("--out", type=Path, help="write raw figures to this JSON file")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.sizes, arguments.rounds = TINY, 1
    return arguments


def jobs_of(arguments: argparse.Namespace, ranks: int) -> list[VerbJob]:
    """Return the jobs to measure, in order."""
    staging = arguments.part == "staging"
    jobs = []
    for verb in ["all_reduce"] if staging else arguments.verbs:
        sizes = arguments.sizes or (SIZES if verb == "all_reduce" else FEWER)
        for dtype in arguments.dtypes[: 1 if staging or verb != "all_reduce" else None]:
            jobs += [VerbJob.of(verb, dtype, nbytes, ranks) for nbytes in sizes]
    return jobs


def run_verbs(arguments: argparse.Namespace, machine: Machine, comm: Any, stack: ExitStack) -> dict[str, Any]:
    """Measure verbs between the ranks' GPUs, or through the host. Collective."""
    world, until = MPI.COMM_WORLD, time.monotonic() + arguments.seconds
    jobs = jobs_of(arguments, comm.size)
    longest = max(job.nbytes for job in jobs)
    ordinary = machine.empty(longest, "uint8"), machine.empty(longest, "uint8")
    rates: dict[str, float] = {}
    if arguments.part == "staging":
        if comm.config.device_peers and comm.config.device_ipc:
            raise SystemExit("gpu.py staging: set COMMLIB_DEVICE_IPC=0 or COMMLIB_DEVICE_PEERS=0; see --help")
        rates["pinned, both ways"] = pinned_rate(machine, world, longest)
        own = {"between" if comm.config.device_peers else "staged": ordinary}
        bound: Bound = lambda job: 2 * job.nbytes / rates["pinned, both ways"] / 1e9  # noqa: E731
    else:
        shares = len(set(world.allgather(machine.where()))) == 1
        rates["copy"] = world.bcast(copy_rate(machine, longest, 10) if world.rank == 0 else None)
        symmetric = [comm.empty((longest,), "uint8", device=machine.device) for _ in range(2)]
        own = {"symmetric": (symmetric[0], symmetric[1]), "ordinary": ordinary}
        bound = lambda job: job.moved() / rates["copy"] / 1e9 if shares else 0.0  # noqa: E731
    if "gloo" in arguments.peers:
        if problem := gloo_peer.problem():
            raise SystemExit(problem)
        stack.enter_context(gloo_peer.join_gloo(world, one_node=comm.one_node))
    peers = arguments.peers
    session = Session(machine, comm, world, own, peers, bound, rounds=arguments.rounds, until=until)
    rows = []
    if world.rank == 0:
        print("GB/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
        print(HEADER, flush=True)
    for found in session.rows(jobs):
        rows += found
        if world.rank == 0:
            show(found)
    if world.rank == 0:
        print("".join(f"# {note}\n" for note in session.notes), end="", flush=True)
    wrong = {row.contender: row.wrong for row in rows if row.wrong}
    return {"rows": [row.figures() for row in rows], "rates": rates, "notes": session.notes, "wrong": wrong}


def main() -> None:
    arguments = parse()
    comm, world = commlib.init(), MPI.COMM_WORLD
    facts = record.find_facts(world)
    with ExitStack() as stack:
        if arguments.part == "step":
            measured = measure_step(comm, stack, tiny=arguments.tiny, rounds=arguments.rounds)
        else:
            machine = Machine(tiny=arguments.tiny)
            facts["gpu"] = machine.facts()
            stack.enter_context(machine.device.using(machine.device.stream()))
            if arguments.part == "kernels":
                measured = measure_kernels(machine, tiny=arguments.tiny)
            else:
                measured = run_verbs(arguments, machine, comm, stack)
        if world.rank == 0 and arguments.out:
            record.write(arguments.out, f"gpu {arguments.part}", facts, arguments, **measured)
    if wrong := measured.get("wrong"):
        raise SystemExit(f"wrong elements: {wrong}")


if __name__ == "__main__":
    main()
