"""mpiexec -n 4 python -m tests.soak: see the package."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections import Counter

import numpy as np
from mpi4py import MPI

import commlib
from commlib import Communicator
from commlib.dtypes import kernel_operation
from commlib.kernels.reductions import reduction
from tests.bodies import checks
from tests.oracles.oracle import REDUCIBLE
from tests.soak.calls import Seat
from tests.soak.player import Player
from tests.soak.resources import Usage, growth, keep_no_free_memory, measure
from tests.soak.script import SLOTS, Script, Team, splits, teams

PHASES = 20  # how often everything pauses, and is measured
WARM_UP = 4  # phases, after which nothing may grow any more
SPEECH = 3.0  # seconds between the first rank's last words and the end of the job: the others may have some, too


class Soak:
    """One rank's part of the soak."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.world = commlib.init()
        self.rank, self.size = self.world.rank, self.world.size
        all_teams = teams(self.size)
        self.players = []
        for number in range(options.threads):
            script = Script(options.seed, number, all_teams, options.novelty)
            self.players.append(Player(self.rank, options.seed, number, script, self._seats(all_teams, number)))
        self.usage: list[Usage] = []
        self._last_output = self.started

    def _seats(self, all_teams: list[Team], thread: int) -> dict[int, Seat]:
        """Make one thread's communicators. The first thread uses the world itself."""
        seats = {}
        for name, split in splits(self.size).items():
            color = next((color for color, members in enumerate(split) if self.rank in members), -1)
            key = split[color].index(self.rank) if color >= 0 else 0
            group = self.world if name == "world" and thread == 0 else self.world.split(color, key)
            for team in all_teams:
                if team.name == name and self.rank in team.members:
                    assert group is not None and group.rank == team.members.index(self.rank)
                    seats[team.number] = Seat(group)
        return seats

    def run(self) -> int:
        """Play all steps; return the exit code."""
        faulthandler.enable()
        self._print(f"{self.size} ranks, {MPI.Get_library_version().split(',')[0].strip()}, {self.options}")
        compile_everything(self.world)
        for player in self.players:
            for seat in player.seats.values():
                seat.comm.barrier_async().wait()  # its thread, if it has one, is there
                use_lanes(seat.comm)
        self._print(f"compiled, {self._measure()}")
        for player in self.players:
            player.start()
        self._print("allocating")
        self._play([len(teams(self.size)) * len(SLOTS)] * len(self.players))
        for phase in range(PHASES):
            self._play([self._share(phase, player.number) for player in self.players])
            self.usage.append(self._measure())
            self._print(f"phase {phase + 1} of {PHASES}, {self.usage[-1]}")
        return self._report()

    def _measure(self) -> Usage:
        seats = [seat for player in self.players for seat in player.seats.values()]
        return measure(sum(seat.ordinary_bytes for seat in seats), sum(seat.symmetric_bytes for seat in seats))

    def _share(self, phase: int, thread: int) -> int:
        """Return how many steps a thread plays in a phase: together they are the requested number."""
        operations: int = self.options.operations
        parts = PHASES * len(self.players)
        part = phase * len(self.players) + thread
        return operations * (part + 1) // parts - operations * part // parts

    def _play(self, steps: list[int]) -> None:
        """Let every thread play, and wait until all pause; end the job if one fails or hangs."""
        for player, count in zip(self.players, steps, strict=True):
            player.go(count)
        for player in self.players:
            while not player.resting.wait(0.1):
                self._look_around()

    def _look_around(self) -> None:
        # If Python itself is stuck, nobody gets here any more.
        faulthandler.dump_traceback_later(2 * self.options.patience, exit=True)
        for player in self.players:
            if player.failure is not None:
                where = f"thread {player.number}, {player.step}"
                self._end(f"FAILED: {where}\n" + "".join(traceback.format_exception(player.failure)))
            if not player.resting.is_set() and time.monotonic() - player.moved > self.options.patience:
                where = "\n".join(
                    f"  thread {other.number} is at {other.step}, {len(other.pending)} works outstanding"
                    for other in self.players
                )
                faulthandler.dump_traceback(all_threads=True)
                self._end(f"HANGS: thread {player.number} has not moved for {self.options.patience} s\n{where}")
        if time.monotonic() - self._last_output > self.options.every:
            self._print(f"{sum(sum(player.played.values()) for player in self.players)} operations")

    def _end(self, text: str) -> None:
        """End the job, from a rank whose communicators are no longer usable."""
        print(f"soak: rank {self.rank}, --seed {self.options.seed}: {text}", file=sys.stderr, flush=True)
        time.sleep(SPEECH)
        faulthandler.dump_traceback_later(5, exit=True)  # should MPI be stuck, too
        MPI.COMM_WORLD.Abort(1)

    def _report(self) -> int:
        """Compare the ranks' resources with those after the warm-up."""
        faulthandler.cancel_dump_traceback_later()
        before, after = self.usage[WARM_UP - 1], self.usage[-1]
        grown = growth(before, after, self.options.operations)
        for text in grown:
            print(f"soak: rank {self.rank}, --seed {self.options.seed}: LEAKS: {text}", file=sys.stderr, flush=True)
        failed = bool(MPI.COMM_WORLD.allreduce(bool(grown), MPI.LOR))
        played: Counter[str] = sum((player.played for player in self.players), Counter())
        seconds = time.monotonic() - self.started
        slowest = max(MPI.COMM_WORLD.allgather(max(player.slowest for player in self.players)))
        self._print(", ".join(f"{count} {verb}" for verb, count in played.most_common()))
        self._print(f"the longest call or wait took {slowest[0]:.1f} s: {slowest[1]}")
        self._print(f"after the warm-up: {before}; at the end: {after}")
        self._print(f"{'FAILED' if failed else 'ok'}: {sum(played.values())} operations in {seconds:.0f} s")
        # The end must not hang either, and there is no Python any more when MPI ends.
        signal.alarm(round(self.options.patience))
        return int(failed)

    def _print(self, text: str) -> None:
        self._last_output = time.monotonic()
        if self.rank == 0:
            print(f"soak: {self._last_output - self.started:5.0f} s  {text}", flush=True)


def compile_everything(comm: Communicator) -> None:
    """Load every kernel, so that none is loaded while memory is watched. One rank compiles those not yet cached."""
    if comm.rank == 0:
        for dtype, op in REDUCIBLE:
            reduction(dtype, kernel_operation(dtype, op))
    comm.barrier()
    for dtype, op in REDUCIBLE:
        for count in (3, 5000):
            checks.all_reduce(comm, dtype, (count,), op)
        checks.reduce(comm, dtype, (3,), op)


def use_lanes(comm: Communicator) -> None:
    """Send enough between every two ranks to create the lanes and to write their memory to its end."""
    x, received = np.zeros(5000), np.zeros(5000)
    for step in range(1, comm.size):
        for _ in range(10):
            comm.send_recv(x, (comm.rank + step) % comm.size, received, (comm.rank - step) % comm.size)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mpiexec -n 4 python -m tests.soak", description=__doc__)
    parser.add_argument("--operations", type=int, default=3000, help="collectives and messages of all threads together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--novelty", type=float, default=0.02, help="share of calls of new kinds, which fill caches")
    parser.add_argument("--patience", type=float, default=120, help="seconds without a step after which it hangs")
    parser.add_argument("--every", type=float, default=10, help="seconds between two lines of progress, at most")
    options = parser.parse_args(arguments)
    if options.operations < 1 or options.threads < 1 or options.patience <= 0:
        parser.error("--operations, --threads and --patience must be positive")
    keep_no_free_memory()
    # Late ranks and their operations are known before everything is torn down.
    os.environ.setdefault("COMMLIB_STALL_WARNING", str(options.patience / 2))
    return Soak(options).run()


if __name__ == "__main__":
    sys.exit(main())
