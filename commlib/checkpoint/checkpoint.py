"""Checkpoint: save the state of all ranks at a step, and resume from the newest complete checkpoint.

State that is equal on several ranks, such as the model of data-parallel ranks, is written once, by the first of them.
State that differs (shards of layers, residuals of compression, random generators) is written by each rank. So the user
need not declare which state is sharded.
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

from commlib.checkpoint import folders, packed_state
from commlib.config.settings import ranks_text
from commlib.errors import CommlibError, UsageError
from commlib.ranks import Ranks, communicator_of
from commlib.world import world

if TYPE_CHECKING:
    from commlib.communicator import Communicator

log = logging.getLogger("commlib")


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One part of a checkpoint: `state()` returns its state for `packed`, `load(state)` restores it."""

    state: Callable[[], Any]
    load: Callable[[Any], None]
    is_needed: bool = True
    """False: a job with another number of ranks resumes without it."""


class Checkpoint:
    """The checkpoints of a job in a folder that all ranks see. Adapters provide the parts of models and optimizers.

    keep: the number of newest complete checkpoints to keep. ranks: those that save together, by default all; a
    mesh means all its ranks. Raises UsageError for keep < 1, for no parts, and for wrong ranks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, CheckpointPart],
        *,
        keep: int = 2,
        ranks: Ranks | None = None,
    ) -> None:
        if keep < 1 or not parts:
            raise UsageError(f"Checkpoint: expected something to save and keep >= 1, got {sorted(parts)} and {keep}")
        self.folder, self.parts, self.keep = Path(folder), dict(parts), keep
        self._comm = None if ranks is None else communicator_of(ranks, "Checkpoint", whole=True)
        self._damaged: set[int] = set()

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(sorted(self.parts))} in {self.folder}, the last {self.keep}>"

    def save(self, step: int) -> Path:
        """Save all parts as the checkpoint of a step, and return its folder. Collective.

        Saving is atomic: a job killed meanwhile resumes from the previous checkpoint. Raises CommlibError on all ranks,
        with the failed ranks and the reasons, and UsageError for state that cannot be saved, or a wrong step.
        """
        with ExitStack() as held:
            return self._save(step, held)

    def _save(self, step: int, held: ExitStack) -> Path:
        comm = self._ranks()
        what = f"checkpoint of step {step} in {self.folder}"
        states: dict[str, Any] = {}
        digests: dict[str, str] = {}

        def look() -> None:
            if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
                raise UsageError(f"step must be an integer of at least 0, got {step!r}")
            if comm.rank == 0:
                held.enter_context(folders.create_checkpoint(self.folder, step))
                self._warn_about_newer(step, what)
            for name, part in self.parts.items():
                states[name] = part.state()
                digests[name] = packed_state.digest(states[name], name)

        answers = _on_all_ranks(comm, what, look, lambda: (step, digests))
        if len(steps := sorted({their_step for their_step, _ in answers})) > 1:
            raise UsageError(f"{what}: ranks save different steps, {', '.join(map(str, steps))}")
        everyone = [theirs for _, theirs in answers]
        writers = find_writers(everyone)

        def write() -> None:
            for name, state in states.items():
                if writers[name][comm.rank] == comm.rank:
                    with folders.open_flushed(
                        folders.unfinished_path(self.folder, step) / file_name(name, comm.rank)
                    ) as file:
                        packed_state.write(file, state, name)

        _on_all_ranks(comm, what, write)

        def finish() -> None:
            if comm.rank == 0:
                by_file = {
                    file_name(name, rank): theirs[name]
                    for name, ranks in writers.items()
                    for rank, theirs in enumerate(everyone)
                    if ranks[rank] == rank
                }
                index = {"step": int(step), "ranks": comm.size, "writers": writers, "digests": by_file}
                with folders.open_flushed(folders.unfinished_path(self.folder, step) / folders.INDEX) as file:
                    file.write(json.dumps(index).encode())
                folders.finish(self.folder, step, self.keep, self._damaged - {step})

        _on_all_ranks(comm, what, finish)
        self._damaged.discard(step)
        return folders.checkpoint_path(self.folder, step)

    def _warn_about_newer(self, step: int, what: str) -> None:
        """Warn that a job would resume from another, newer checkpoint, which is kept."""
        newer = [one for one in folders.complete_steps(self.folder) if one > step and one not in self._damaged]
        if newer and self.keep > 1:
            log.warning(
                "%s: jobs resume from the newer checkpoint of step %d: remove that, or use another folder",
                what,
                newer[-1],
            )

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint, as rank 0 sees it, or None. Collective.

        It does not read the files, which may still be damaged.
        """
        steps = self._list_steps(folders.complete_steps)
        return steps[-1] if steps else None

    def resume(self) -> int:
        """Load the newest intact checkpoint, and return its step; 0 if there is no checkpoint. Collective.

        If a checkpoint is truncated, mixed or damaged on any rank, all ranks skip it, with a warning on rank 0, and try
        the previous one. Raises CommlibError on all ranks, with the failed ranks and the reasons, if none of the
        checkpoints is intact. Raises UsageError if a checkpoint has other parts than this job, or if another number of
        ranks saved a part that differs between ranks. After an error some parts may already be loaded.
        """
        comm = self._ranks()
        problems: list[str] = []
        for step in reversed(self._list_steps(folders.steps)):
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
                    log.warning("%s; so this checkpoint is damaged, and the job resumes from step %d", problem, step)
                if left := sorted(self.parts.keys() - loaded.keys()):
                    names = ", ".join(left)
                    log.warning(
                        "%s: saved by another number of ranks, different on each, and not loaded: %s", what, names
                    )

            def load(loaded: dict[str, Any] = loaded) -> None:
                for name, state in loaded.items():
                    self.parts[name].load(state)

            _on_all_ranks(comm, what, load)
            return step
        if problems:
            raise CommlibError(f"no checkpoint is intact: {'; '.join(problems)}. Remove them to start over")
        return 0

    def _list_steps(self, find: Callable[[Path], list[int]]) -> list[int]:
        """Return the steps that rank 0 finds in the folder. Collective."""
        comm = self._ranks()
        steps: list[int] = []

        def look() -> None:
            if comm.rank == 0:
                folders.restore_replaced(self.folder)
                steps.extend(find(self.folder))

        shared: list[int] = _on_all_ranks(comm, f"checkpoints in {self.folder}", look, lambda: steps)[0]
        return shared

    def _read(self, step: int, what: str) -> dict[str, Any]:
        """Return the parts of a checkpoint for this rank. Collective; errors are raised on all ranks."""
        comm, folder = self._ranks(), folders.checkpoint_path(self.folder, step)
        loaded: dict[str, Any] = {}

        def read() -> None:
            index = json.loads((folder / folders.INDEX).read_text())
            for name, part in self.parts.items():
                if (writer := find_writer(index, name, comm.rank, comm.size)) is not None:
                    own_file = file_name(name, writer)
                    with open(folder / own_file, "rb") as file:
                        try:
                            loaded[name] = packed_state.read(file)
                        except (KeyError, ValueError) as error:
                            raise CommlibError(f"{own_file} is not a file written by Checkpoint: {error}") from error
                    expected = index.get("digests", {}).get(own_file)
                    if expected is not None and packed_state.digest(loaded[name], name) != expected:
                        raise CommlibError(f"{own_file} does not match its digest in the index")
                elif part.is_needed:
                    raise UsageError(
                        f"each of {index['ranks']} ranks saved a different {name}, but this job has {comm.size} ranks: "
                        f"start it on {index['ranks']} ranks"
                    )

        _on_all_ranks(comm, what, read)
        return loaded

    def _ranks(self) -> Communicator:
        return world() if self._comm is None else self._comm


def find_writers(everyone: list[dict[str, str]]) -> dict[str, list[int | None]]:
    """Return, for each part and rank, the first rank whose part has the same digest; None: the rank lacks the part.

    everyone: the digests of each rank's parts, by rank.
    """
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    writers: dict[str, list[int | None]] = {}
    for name in names:
        first: dict[str, int] = {}
        for rank, theirs in enumerate(everyone):
            if name in theirs:
                first.setdefault(theirs[name], rank)
        writers[name] = [first[theirs[name]] if name in theirs else None for theirs in everyone]
    return writers


def find_writer(index: dict[str, Any], name: str, rank: int, size: int) -> int | None:
    """Return the rank whose file a rank reads; None: another number of ranks saved the part, different on each.

    size: the number of ranks of this job. Raises UsageError if no rank has saved this part.
    """
    writers: list[int | None] = index["writers"].get(name, [])
    if not any(writer is not None for writer in writers):
        raise UsageError(f"the checkpoint has no {name}, only {', '.join(sorted(index['writers']))}")
    if size == len(writers):
        if writers[rank] is None:
            raise UsageError(f"rank {rank} saved no {name}")
        return writers[rank]
    return writers[0] if len(set(writers)) == 1 else None


def file_name(name: str, rank: int) -> str:
    """Return the name of a rank's file for a part."""
    return f"{name}.{rank}.npz"


def _on_all_ranks(
    comm: Communicator, what: str, do: Callable[[], None], report: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Call `do` on each rank; return all ranks' values of `report`. An error on any rank raises on all ranks."""
    problem: tuple[str, bool] | None = None
    try:
        do()
    except CommlibError as error:
        problem = str(error), isinstance(error, UsageError)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}", False
    everyone = comm.all_gather_object((problem, None if problem else report()))
    ranks: dict[tuple[str, bool], list[int]] = {}
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is not None:
            ranks.setdefault(theirs, []).append(rank)
    if ranks:
        reasons = "; ".join(f"{text} ({ranks_text(on)})" for (text, _), on in ranks.items())
        kind = UsageError if all(is_usage for _, is_usage in ranks) else CommlibError
        raise kind(f"{what}: {reasons}")
    return [answer for _, answer in everyone]
