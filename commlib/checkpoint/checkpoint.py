"""Checkpoint: save what all ranks hold at a step, and go on from the newest one that is complete.

What several ranks hold alike, such as the model of data-parallel ranks, is written once, by the first of them. What
each has for itself (its part of a divided layer, residuals of compression, states of random generators) is written by
each. So nobody has to say what is divided.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlib.checkpoint import folders, packed
from commlib.config.settings import ranks_text
from commlib.errors import CommlibError, UsageError
from commlib.world import world

if TYPE_CHECKING:
    from commlib.communicator import Communicator

log = logging.getLogger("commlib")


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to be saved: `state()` returns it as `packed` takes it, `load(state)` takes it back."""

    state: Callable[[], Any]
    load: Callable[[Any], None]
    is_needed: bool = True
    """False: a job of another size goes on without it."""


class Checkpoint:
    """The checkpoints of a job in a folder that all ranks see. Adapters make the parts of models and optimizers.

    keep: how many of the newest complete checkpoints stay. comm: the ranks that save together, by default all.
    Raises UsageError for keep < 1 and for no parts.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Part],
        *,
        keep: int = 2,
        comm: Communicator | None = None,
    ) -> None:
        if keep < 1 or not parts:
            raise UsageError(f"Checkpoint: expected something to save and keep >= 1, got {sorted(parts)} and {keep}")
        self.folder, self.parts, self.keep = Path(folder), dict(parts), keep
        self._comm = comm
        self._damaged: set[int] = set()

    def save(self, step: int) -> Path:
        """Save all parts as the checkpoint of a step, and return its folder. Collective.

        It is there as a whole, or not at all: a job that is killed meanwhile goes on from the one before. Raises
        CommlibError on all ranks, with the ranks that failed and why, UsageError for what cannot be saved.
        """
        with ExitStack() as held:
            return self._save(step, held)

    def _save(self, step: int, held: ExitStack) -> Path:
        comm = self._ranks()
        what = f"checkpoint of step {step} in {self.folder}"
        states: dict[str, Any] = {}
        digests: dict[str, str] = {}

        def look() -> None:
            if comm.rank == 0:
                held.enter_context(folders.making(self.folder, step))
                self._warn_of_newer(step, what)
            for name, part in self.parts.items():
                states[name] = part.state()
                digests[name] = packed.digest(states[name], name)

        told = _together(comm, what, look, lambda: (step, digests))
        if len(steps := sorted({their_step for their_step, _ in told})) > 1:
            raise UsageError(f"{what}: ranks save different steps, {', '.join(map(str, steps))}")
        everyone = [theirs for _, theirs in told]
        writers = first_with(everyone)

        def write() -> None:
            for name, state in states.items():
                if writers[name][comm.rank] == comm.rank:
                    with folders.flushed(folders.unfinished(self.folder, step) / file_name(name, comm.rank)) as file:
                        packed.write(file, state, name)

        _together(comm, what, write)

        def finish() -> None:
            if comm.rank == 0:
                by_file = {
                    file_name(name, rank): theirs[name]
                    for name, ranks in writers.items()
                    for rank, theirs in enumerate(everyone)
                    if ranks[rank] == rank
                }
                index = {"step": step, "ranks": comm.size, "writers": writers, "digests": by_file}
                with folders.flushed(folders.unfinished(self.folder, step) / folders.INDEX) as file:
                    file.write(json.dumps(index).encode())
                folders.finish(self.folder, step, self.keep, self._damaged - {step})

        _together(comm, what, finish)
        self._damaged.discard(step)
        return folders.place(self.folder, step)

    def _warn_of_newer(self, step: int, what: str) -> None:
        """Say that a job would resume from another checkpoint, which stays."""
        newer = [one for one in folders.complete(self.folder) if one > step and one not in self._damaged]
        if newer and self.keep > 1:
            log.warning(
                "%s: there is one of step %d, from which a job resumes: remove it, or use another folder",
                what,
                newer[-1],
            )

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint, as rank 0 sees it, or None. Collective.

        Its files are not read: one of them may be damaged all the same.
        """
        found = self._seen(folders.complete)
        return found[-1] if found else None

    def resume(self) -> int:
        """Load the newest checkpoint that is whole, and return its step; 0 if there is none at all. Collective.

        One that is cut short, mixed or damaged on any rank is left by all, with a warning of rank 0, for the one
        before. Raises CommlibError on all ranks, with those that failed and why, if there are some, but none is whole;
        UsageError if one holds other things than this job, or what ranks hold apart was saved by another number of
        them. Then some parts may be loaded, some not.
        """
        comm = self._ranks()
        problems: list[str] = []
        for step in reversed(self._seen(folders.steps)):
            what = f"checkpoint of step {step} in {self.folder}"
            try:
                loaded = self._read(step, what)
            except UsageError:
                raise
            except CommlibError as error:
                problems.append(str(error))
                self._damaged.add(step)
                continue
            if comm.rank == 0:
                for problem in problems:
                    log.warning("%s; so it is not whole, and this job goes on from step %d", problem, step)
                if left := sorted(self.parts.keys() - loaded.keys()):
                    names = ", ".join(left)
                    log.warning(
                        "%s: saved by another number of ranks, each for itself, and not loaded: %s", what, names
                    )

            def load(loaded: dict[str, Any] = loaded) -> None:
                for name, state in loaded.items():
                    self.parts[name].load(state)

            _together(comm, what, load)
            return step
        if problems:
            raise CommlibError(f"no checkpoint is whole: {'; '.join(problems)}. Remove them to begin anew")
        return 0

    def _seen(self, find: Callable[[Path], list[int]]) -> list[int]:
        """Return the steps that rank 0 finds in the folder. Collective."""
        comm = self._ranks()
        found: list[int] = []

        def look() -> None:
            if comm.rank == 0:
                folders.put_back(self.folder)
                found.extend(find(self.folder))

        seen: list[int] = _together(comm, f"checkpoints in {self.folder}", look, lambda: found)[0]
        return seen

    def _read(self, step: int, what: str) -> dict[str, Any]:
        """Return the parts of a checkpoint for this rank. Collective; raises what it raises on all ranks."""
        comm, folder = self._ranks(), folders.place(self.folder, step)
        loaded: dict[str, Any] = {}

        def read() -> None:
            index = json.loads((folder / folders.INDEX).read_text())
            for name, part in self.parts.items():
                if (writer := writer_for(index, name, comm.rank, comm.size)) is not None:
                    with open(folder / file_name(name, writer), "rb") as file:
                        loaded[name] = packed.read(file)
                    expected = index.get("digests", {}).get(file_name(name, writer))
                    if expected is not None and packed.digest(loaded[name], name) != expected:
                        raise CommlibError(f"{file_name(name, writer)} is not what was saved with the others")
                elif part.is_needed:
                    raise UsageError(
                        f"each of {index['ranks']} ranks has saved its own {name}, and these are {comm.size}: start "
                        f"the job on {index['ranks']} ranks"
                    )

        _together(comm, what, read)
        return loaded

    def _ranks(self) -> Communicator:
        return world() if self._comm is None else self._comm


def first_with(everyone: list[dict[str, str]]) -> dict[str, list[int | None]]:
    """Return, for each part and rank, the first rank whose part has the same digest; None: this rank has no such part.

    everyone: the digests of each rank's parts, by rank.
    """
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    found: dict[str, list[int | None]] = {}
    for name in names:
        first: dict[str, int] = {}
        for rank, theirs in enumerate(everyone):
            if name in theirs:
                first.setdefault(theirs[name], rank)
        found[name] = [first[theirs[name]] if name in theirs else None for theirs in everyone]
    return found


def writer_for(index: dict[str, Any], name: str, rank: int, size: int) -> int | None:
    """Return whose file a rank of a job of `size` reads; None: it was saved by another number, and not alike on all.

    Raises UsageError if nobody has saved this part.
    """
    writers: list[int | None] = index["writers"].get(name, [])
    if not any(writer is not None for writer in writers):
        raise UsageError(f"it has no {name}, only {', '.join(sorted(index['writers']))}")
    if size == len(writers):
        if writers[rank] is None:
            raise UsageError(f"rank {rank} has saved no {name}")
        return writers[rank]
    return writers[0] if len(set(writers)) == 1 else None


def file_name(name: str, rank: int) -> str:
    """Return the name of the file in which a rank saves a part."""
    return f"{name}.{rank}.npz"


def _together(
    comm: Communicator, what: str, do: Callable[[], None], tell: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Do something on each rank; return what all tell afterwards. Raises on all what went wrong on any of them."""
    problem: tuple[str, bool] | None = None
    try:
        do()
    except CommlibError as error:
        problem = str(error), isinstance(error, UsageError)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}", False
    everyone = comm.all_gather_object((problem, None if problem else tell()))
    ranks: dict[tuple[str, bool], list[int]] = {}
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is not None:
            ranks.setdefault(theirs, []).append(rank)
    if ranks:
        said = "; ".join(f"{text} ({ranks_text(on)})" for (text, _), on in ranks.items())
        kind = UsageError if all(is_usage for _, is_usage in ranks) else CommlibError
        raise kind(f"{what}: {said}")
    return [answer for _, answer in everyone]
