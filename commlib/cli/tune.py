"""`commlib tune`: measure this cluster, so that commlib chooses algorithms by measured times."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlib import folders
from commlib.cli.prediction import rate
from commlib.console.progress import show_progress
from commlib.console.text import bytes_text, columns, seconds_text
from commlib.cost.chooser import Chooser
from commlib.cost.hierarchical import RAIL_BYTES
from commlib.cost.model import DEFAULT
from commlib.cost.records import Entry, FittedMachine
from commlib.cost.table import Table, default_path
from commlib.errors import CommlibError, UsageError
from commlib.schedule import algorithms

if TYPE_CHECKING:
    from commlib.communicator import Communicator
    from commlib.devices.protocol import Device


def tune(
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the measurement.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: COMMLIB_TUNING_FILE, or in ~/.cache]")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Measure the paths of arrays on such devices: cuda, one GPU for each rank.")
    ] = "",
) -> None:
    """Measure this cluster: mpirun -n 8 commlib tune, and with GPUs also commlib tune --device cuda.

    Run it on as many nodes and ranks as the programs that will use the result. Measurements in the file for other
    numbers of nodes and ranks, or for other MPI libraries, are kept.

    The time includes compilation and connection at the first use; the smallest size is always measured.
    """
    setting = os.environ.get("COMMLIB_TUNING_FILE", "")
    named = out or (Path(setting) if setting not in ("", "none") else None)
    os.environ["COMMLIB_TUNING_FILE"] = "none"  # it may not exist yet, and must not influence the measurement
    os.environ.setdefault("COMMLIB_CHECK_FIRST", "0")  # the measurement would include the comparison of calls
    try:
        _tune(named, seconds, device)
    except CommlibError as error:
        if error.at_start:
            raise
        typer.echo(f"commlib tune: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error


def _tune(named: Path | None, seconds: float, device: str) -> None:
    import commlib

    comm = commlib.init()  # reports problems with MPI, where the next import would only fail
    from commlib.tune.measure import check_ranks, measure, measure_on

    check_ranks(comm)
    path, private = named or default_path(), named is None
    known = Table()

    def load() -> None:
        nonlocal known
        known = _open(path, private)

    if not _on_first_rank(comm, load):
        raise typer.Exit(2)
    on = _device(comm, device) if device else None
    if comm.rank == 0:
        nodes = len(comm.topology.nodes)
        where = f"{comm.size} ranks on {nodes} node{'s' * (nodes > 1)}" + f", arrays on {device}" * bool(device)
        typer.echo(f"commlib tune: measuring {where} for {seconds:g} s", err=True)
    with show_progress("commlib tune", seconds, silent=comm.rank != 0) as progress:
        table = measure(comm, seconds, progress) if on is None else measure_on(comm, on, seconds, progress)
    saved = _on_first_rank(comm, lambda: known.updated(table).save(path, private=private))
    if comm.rank == 0:
        typer.echo(summary(table) + (f"\n\nwritten to {path}" if saved else ""))
    commlib.shutdown()
    if not saved:
        raise typer.Exit(2)


def _device(comm: Communicator, kind: str) -> Device:
    """Return this rank's device. Raises Exit on all ranks if one of them has none; rank 0 names it."""
    from commlib.devices.selection import select_device

    nodes, rank = comm.topology.nodes, comm.rank
    try:
        selected: Device = select_device(
            kind, "tune", nodes[comm.topology.node(rank)].index(rank), comm.all_gather_object
        )
    except UsageError as error:
        if rank == 0:
            typer.echo(f"commlib tune: {error}", err=True)
        raise typer.Exit(2) from None
    return selected


def _on_first_rank(comm: Communicator, do: Callable[[], None]) -> bool:
    """Call `do` on rank 0 alone; print its UsageError. Return on all ranks whether it succeeded."""
    good = True
    if comm.rank == 0:
        try:
            do()
        except UsageError as error:
            typer.echo(f"commlib tune: {error}", err=True)
            good = False
    return bool(comm.broadcast_object(good))


def _open(path: Path, private: bool) -> Table:
    """Return the table in a file, an empty one if the file does not exist. Raises UsageError if it cannot be written.

    private: require that only this user can change the file and its folder.
    """
    try:
        if private:
            with suppress(FileNotFoundError), folders.open_private(path.parent):
                pass
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise UsageError(f"cannot write {path}: {folder} is not a writable folder")
        return Table.load(path, private=private) if path.exists() else Table()
    except OSError as error:
        raise UsageError(f"cannot use the tuning table {path} ({error}): name another file with --out") from error


def summary(table: Table) -> str:
    """Return the measurements as text, and the model's predictions for the same machine."""
    fitted = table.machines[0] if table.machines else None
    parts = [] if fitted is None else [_links(fitted)]
    chooser = Chooser(DEFAULT if fitted is None else fitted.machine)
    for place in dict.fromkeys(map(_place, table.entries)):
        parts.append(_place_text(*place))
        for entry in table.entries:
            if _place(entry) == place:
                parts.append(columns(_way_rows(entry) if entry.device else _entry_rows(entry, chooser), left=2))
    return "\n\n".join([*parts, *_left_out(table)])


def _links(fitted: FittedMachine) -> str:
    rows = [["link", "alpha", "bandwidth"]]
    for name, link in (("node", fitted.node), ("network", fitted.network)):
        rows.append([name, *((seconds_text(link.alpha), rate(link.beta)) if link else ("not measured", ""))])
    rows.append(["combining", "", rate(fitted.gamma)])
    return f"measured with {fitted.library}\n\n{columns(rows)}"


def _place(entry: Entry) -> tuple[int, int, str]:
    return entry.nodes, entry.ranks_per_node, entry.device


def _left_out(table: Table) -> list[str]:
    """Return a text about the sizes that the time did not suffice for."""
    from commlib.tune.measure import DEVICE_SIZES, SIZES

    in_rails = {entry.nodes for entry in table.entries if entry.nodes > 1 and entry.ranks_per_node > 1}
    reached: dict[tuple[int, int, str], int] = {}
    for entry in table.entries:
        place = _place(entry)
        nbytes = max(time.up_to for time in entry.times) // 2
        # If there are several rails, a single one only carries small data.
        on_one_rail = not entry.device and entry.ranks_per_node == 1 and entry.nodes in in_rails
        whole = RAIL_BYTES if on_one_rail else (DEVICE_SIZES if entry.device else SIZES)[-1]
        if nbytes < whole:
            reached[place] = min(nbytes, reached.get(place, nbytes))
    if not reached:
        return []
    lines = [f"{_place_text(*place)}: no time for all beyond {bytes_text(nbytes)}" for place, nbytes in reached.items()]
    instead = "the order of the paths" if any(device for *_, device in reached) else "the model"
    return ["\n".join([*lines, f"{instead} decides for those: more --seconds measure them"])]


def _place_text(nodes: int, ranks_per_node: int, device: str = "") -> str:
    if device:
        where = "a node" if nodes == 1 else f"{nodes} nodes, up to {ranks_per_node} on each"
        count = f"the {ranks_per_node}" if nodes == 1 else "all"
        return f"arrays on {device}, among {count} ranks of {where}"
    if nodes == 1:
        return f"among the {ranks_per_node} ranks of a node"
    times = f", {ranks_per_node} times in parallel" if ranks_per_node > 1 else ""
    return f"between {nodes} nodes, one rank of each{times}"


def _way_rows(entry: Entry) -> list[list[str]]:
    rows = [[entry.verb, "fastest", "took", "next", "took"]]
    for up_to in dict.fromkeys(time.up_to for time in entry.times):
        first, *others = entry.competitors(up_to)
        second = [others[0].algorithm, seconds_text(others[0].seconds)] if others else ["-", ""]
        rows.append([bytes_text(up_to // 2), first.algorithm, seconds_text(first.seconds), *second])
    return rows


def _entry_rows(entry: Entry, chooser: Chooser) -> list[list[str]]:
    on_node = entry.nodes == 1
    choose = partial(
        chooser.choose,
        entry.verb,
        entry.ranks_per_node if on_node else entry.nodes,
        kind="node" if on_node else "network",
        sharing=1 if on_node else entry.ranks_per_node,
    )
    rows = [[entry.verb, "fastest", "took", "predicted", "by the model", "predicted"]]
    for up_to in dict.fromkeys(time.up_to for time in entry.times):
        winner, nbytes = entry.competitors(up_to)[0], up_to // 2  # the measured size
        same = choose(nbytes, among=(winner.algorithm,)) if winner.algorithm in algorithms(entry.verb) else None
        choice = choose(nbytes)
        predicted = seconds_text(same.seconds) if same else "-"
        measured = [bytes_text(nbytes), winner.algorithm, seconds_text(winner.seconds), predicted]
        rows.append([*measured, choice.algorithm, seconds_text(choice.seconds)])
    return rows
