"""Probe: report in one table the capabilities of a machine's GPU that commlib depends on.

    mpiexec -n 2 python benchmarks/gpu_probe.py [--nccl] [--tiny] [--out FILE.json]

The time of a meeting (a synchronisation of streams) is measured in a loop of meetings on one stream of each rank; no
other work runs meanwhile. --nccl finally tries whether NCCL lets the ranks share a GPU: a library without this support
may hang here.
"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import commlib
from benchmarks.gpu_machine import Machine, copy_rate, one_way_rates, pinned_rate
from commlib.bench import cases, nccl_peer, record
from commlib.bench.cases import wrong_elements
from commlib.buffers.views import address_of
from commlib.errors import CommlibError
from commlib.group.operation import Operation
from commlib.node.device_board import DeviceBoard
from commlib.transport import cuda_aware, cuda_probe

MIB, TINY_BYTES = 256, 64 << 10
MEETINGS, LAUNCHES, TINY_CALLS = 2000, 2000, 5
_PORTABLE_AND_MAPPED = 3  # of cudaHostRegister


class Probe:
    """A collection of the rows of the table: name, figures and text."""

    def __init__(self, comm: Any, machine: Machine, *, tiny: bool) -> None:
        self._comm, self._machine = comm, machine
        self._nbytes = TINY_BYTES if tiny else MIB << 20
        self._launches, self._meetings = (TINY_CALLS, TINY_CALLS) if tiny else (LAUNCHES, MEETINGS)
        self.rows: list[dict[str, Any]] = []

    def note(self, what: str, result: str, **figures: float) -> None:
        self.rows.append({"what": what, "result": result, **figures})
        if self._comm.rank == 0:
            print(f"{what:<48}{result}", flush=True)

    def memory(self) -> None:
        """Measure copies; those within the GPU on the first rank alone."""
        machine, world = self._machine, MPI.COMM_WORLD
        alone: list[float] = []
        if world.rank == 0:
            alone = [copy_rate(machine, self._nbytes, 10), *one_way_rates(machine, self._nbytes)]
        within, to, back = world.bcast(alone)
        self.note("copy within the GPU, read and written", f"{within:.1f} GB/s", gb_s=within)
        self.note("copy to the GPU, pinned", f"{to:.1f} GB/s", gb_s=to)
        self.note("copy from the GPU, pinned", f"{back:.1f} GB/s", gb_s=back)
        both = pinned_rate(machine, world, self._nbytes)
        self.note("copies both ways, all ranks at once", f"{both:.1f} GB/s for each rank", gb_s=both)

    def launches(self) -> None:
        """Measure the cost of a kernel of one element."""
        machine, kernels = self._machine, self._machine.gpu.kernels
        one = machine.gpu.wrap(machine.empty(1, "float32"), "probe")
        launch = partial(kernels.fill, one, 0)
        launch()
        _, each = machine.seconds(launch, self._launches)

        def alone() -> None:
            launch()
            machine.finish()

        elapsed, _ = machine.seconds(alone, self._launches)
        self.note("launch of a kernel, queued one after another", f"{each * 1e6:.2f} us", us=each * 1e6)
        self.note("launch of a kernel, and the wait for it", f"{elapsed * 1e6:.2f} us", us=elapsed * 1e6)

    def registering(self) -> None:
        """Try to register memory that processes share with the GPU."""
        runtime = self._machine.cuda.runtime
        with mmap.mmap(-1, 4096) as page:
            array = np.frombuffer(page, np.uint8)
            address = address_of(array)
            del array
            try:
                runtime.hostRegister(address, 4096, _PORTABLE_AND_MAPPED)
                runtime.hostUnregister(address)
                self.note("shared host memory is registered", "works")
            except runtime.CUDARuntimeError as error:
                self.note("shared host memory is registered", f"no: {error}")

    def peers(self) -> None:
        """Try to open each other's memory, and to synchronise streams. Collective."""
        group, device = self._comm.group, self._machine.gpu
        if group.size == 1:
            self.note("meetings, IPC", "not measured: only one rank")
            return

        def share() -> None:
            device.share(self._nbytes, group.rank, group.programs.gather_objects).close()

        def open_board() -> DeviceBoard:
            context, memory = group.open(), group.symmetric_on(device)
            return DeviceBoard.make(
                device, context.board, memory, group.transport, group.programs.gather_objects, lambda: None
            )

        self._try("memory of other ranks' GPUs is opened (IPC)", share)
        board = self._try("streams meet (cuStreamBatchMemOp)", open_board)
        if board is None:
            return
        board.barrier()
        self._machine.finish()
        self._comm.barrier()
        host, _ = self._machine.seconds(board.barrier, self._meetings)
        each = max(self._comm.all_gather_object(host))
        self.note(f"meeting of {group.size} ranks", f"{each * 1e6:.1f} us", us=each * 1e6)

        def alone() -> None:
            board.barrier()
            self._machine.finish()

        self._comm.barrier()
        host, _ = self._machine.seconds(alone, max(1, self._meetings // 10))
        elapsed = max(self._comm.all_gather_object(host))
        self.note(f"meeting of {group.size} ranks, and the wait", f"{elapsed * 1e6:.1f} us", us=elapsed * 1e6)
        board.close()

    def _try(self, what: str, run: Callable[[], Any]) -> Any:
        """Run a function as one operation of all ranks; return its value, None if it failed."""

        def run_checked() -> tuple[Any, str]:
            try:
                return run(), ""
            except CommlibError as error:
                return None, str(error)

        value, problem = self._comm.group.run(Operation(f"probe: {what}", run_checked, must_match=True))
        self.note(what, f"no: {problem}" if problem else "works")
        return value

    def mpi(self) -> None:
        """Check whether MPI is CUDA-aware; if so, try it in another process, which may crash. Collective."""
        answer, failure = cuda_aware.query_loaded(MPI), ""
        if answer.is_supported and MPI.COMM_WORLD.rank == 0:
            failure = cuda_probe.probe(seconds=15).failure
        failure = MPI.COMM_WORLD.bcast(failure)
        text = "works" if answer.is_supported and not failure else f"no: {failure or answer.how}"
        self.note("MPI takes memory of a GPU", text)

    def nccl(self) -> None:
        """Try an all-reduce by NCCL among all ranks. Collective."""
        world, machine = MPI.COMM_WORLD, self._machine
        case = cases.make(
            "all_reduce",
            rank=world.rank,
            size=world.size,
            allocate=machine.empty,
            nbytes=4096,
            in_place=True,
            memory=machine,
        )
        problem = ""
        with nccl_peer.join_nccl(world):
            try:
                wrong = wrong_elements(world, case, nccl_peer.call(case), machine.timer("nccl"))
                problem = f"{wrong} wrong elements" if wrong else ""
            except Exception as error:  # NCCL's own error, or a missing library
                problem = (str(error) or repr(error)).splitlines()[0]
        first_problem = next(filter(None, world.allgather(problem)), "")
        self.note(
            f"NCCL among {world.size} ranks",
            f"no: {first_problem}" if first_problem else "works",
            yes=float(not first_problem),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="on an emulated GPU in host memory")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    comm = commlib.init()
    machine = Machine(comm, tiny=arguments.tiny)
    facts = {**record.gather_program_facts(MPI.COMM_WORLD), **machine.facts()}
    probe = Probe(comm, machine, tiny=arguments.tiny)
    with machine.gpu.using(machine.gpu.stream()):
        for step in (probe.memory, probe.launches, probe.registering, probe.peers, probe.mpi):
            step()
            if comm.rank == 0 and arguments.out:  # write the results so far, in case the next probe hangs
                record.write(arguments.out, "gpu probe", facts, arguments, rows=probe.rows)
        if arguments.nccl:
            probe.nccl()
            if comm.rank == 0 and arguments.out:
                record.write(arguments.out, "gpu probe", facts, arguments, rows=probe.rows)


if __name__ == "__main__":
    main()
