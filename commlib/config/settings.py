"""Every COMMLIB_* setting, in one table: name, type, default, meaning.

Settings are read once, at `commlib.init`: from the environment here, and from a file by `settings_file`. `compare` says
which of them the ranks do not share, except for those that may differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from commlib.errors import MismatchError, UsageError

# Environment variables of others that all ranks must have alike, as they are written.
ALSO_COMPARED: tuple[str, ...] = ()

_PER_RANK, _RANK_0 = "per rank", "read by rank 0"


def _setting(
    default: Any,
    meaning: str,
    choices: tuple[str, ...] = (),
    *,
    least: float = 0,
    most: float = 1_000_000_000,
    differs: str = "",
) -> Any:
    """Describe a setting. `differs` says in which sense ranks may have different ones; "": they may not."""
    limits = {"choices": choices, "least": least, "most": most}
    return field(default=default, metadata={"meaning": meaning, "differs": differs, **limits})


@dataclass(frozen=True, slots=True)
class Config:
    """The settings. Field `x` is read from the environment variable `COMMLIB_X`."""

    check: str = _setting(
        "auto",
        "compare the calls of all ranks: 'auto' always within a node, in a group's first calls across nodes, "
        "and whenever a wait is long; 'always'; 'never'",
        ("auto", "always", "never"),
    )
    check_first: int = _setting(64, "calls of a group across nodes that 'auto' compares before any data is sent")
    stall_warning: float = _setting(60.0, "seconds of waiting after which the late ranks are named in the log")
    timeout: float = _setting(0.0, "seconds after which a wait raises StallError; 0 waits for ever")
    hang_after: float = _setting(
        300.0,
        "seconds without progress after which every rank writes what it has done and where its code is, and one rank "
        "says why; where a timeout is set, half of it at most; 0 never",
    )
    hang_folder: str = _setting(
        "commlib-hangs", "folder that they write to, made when it is needed; all hosts must see it"
    )
    exit_timeout: float = _setting(5.0, "seconds that shutdown and interpreter exit wait for work in flight")
    node_path: bool = _setting(True, "use shared memory between the ranks of a node")
    peer_reads: bool = _setting(
        True,
        "let the ranks of a node read large ordinary arrays out of each other's memory (process_vm_readv), where the "
        "system lets them",
    )
    slot_kib: int = _setting(
        512, "KiB of each rank's two shared slots through which ordinary arrays are reduced", least=1, most=1 << 20
    )
    native_kib: int = _setting(
        1024, "KiB of each piece in which a large array is handed to MPI's own all-reduce", least=1, most=1 << 20
    )
    staging_kib: int = _setting(
        2048, "KiB of each piece in which a large array of a device goes through host memory", least=1, most=1 << 20
    )
    device_peers: bool = _setting(
        True, "let the devices of a node's ranks exchange data themselves, where they can; else the host's cores do"
    )
    device_ipc: bool = _setting(
        True,
        "let them read and write each other's memory (CUDA IPC), where they can; else memory of the host lies between",
    )
    device_slot_kib: int = _setting(
        16384,
        "KiB of each rank's two slots of device memory through which ordinary arrays go to the other devices of a node",
        least=64,
        most=1 << 22,
    )
    mpi_devices: str = _setting(
        "",
        "kinds of devices, with commas between them, whose memory MPI sends and receives as it is, beside what "
        "COMMLIB_CUDA_AWARE says of GPUs; arrays of others go through host memory",
    )
    cuda_aware: str = _setting(
        "auto",
        "whether MPI sends and receives memory of GPUs as it is: 'auto' asks the library and tries it in a process of "
        "its own, where there is a GPU; 'yes' or 'no' as you say",
        ("auto", "yes", "no"),
    )
    nccl: bool = _setting(
        True, "let NCCL move data of GPUs between nodes, and on a node where their memory is not shared, if it can"
    )
    spins: int = _setting(
        -1, "polls before a waiting rank yields its core; -1 chooses by cores per rank", least=-1, differs=_PER_RANK
    )
    tuning_file: str = _setting(
        "",
        "file of measured times ('commlib tune' writes it) that algorithms are chosen by; empty is "
        "commlib/tuning.json in the user's cache folder, unless other users can change it, 'none' is the cost model "
        "alone",
        differs=_RANK_0,
    )
    fusion_mib: int = _setting(
        64,
        "MiB up to which small named tensors that are ready together are reduced as one array between nodes "
        "(on a node 1 at most)",
        least=1,
        most=1 << 20,
    )
    known_names: int = _setting(
        4096, "names of operations that ranks remember, to ask for them again by a bit each", least=1, most=1 << 20
    )
    events: int = _setting(
        0,
        "events of operations that are kept, to tell what ranks did last when they wait too long, and to count calls; "
        "0 records none",
        differs=_PER_RANK,
    )
    timeline: str = _setting(
        "",
        "file of a Chrome trace of all operations, written by rank 0; by each rank where {rank} stands in it for the "
        "number",
        differs=_PER_RANK,
    )
    kernels: str = _setting(
        "",
        "folder of compiled kernels ('commlib warm' fills it), before those of caches; it is read also where this user "
        "cannot write to it, and only if nobody but this user and root can",
    )
    log_level: str = _setting(
        "warning", "level of the 'commlib' logger", ("debug", "info", "warning", "error"), differs=_PER_RANK
    )


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


CONFIG_FILE = "COMMLIB_CONFIG"  # no setting: it names the file that the others can stand in


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold the settings and, by field of `Config`, where those come from that were given: "environment", "file ..."."""

    config: Config
    origins: Mapping[str, str]


def from_text(setting: Field[Any], text: str) -> Any:
    """Return a setting's value that is written as text. Raises ValueError that says what is expected."""
    kind, choices = str(setting.type), setting.metadata["choices"]
    word = text.lower()
    if kind == "bool":
        if word not in _TRUE + _FALSE:
            raise ValueError("expected bool (1 or 0)")
        return word in _TRUE
    if kind in ("int", "float"):
        try:
            return _within(setting, {"int": int, "float": float}[kind](text))
        except ValueError:
            raise ValueError(_bounds(setting)) from None
    if "yes" in choices and "no" in choices:
        word = "yes" if word in _TRUE else "no" if word in _FALSE else word
    if choices and word not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}")
    return word if choices else text


def from_value(setting: Field[Any], value: Any) -> Any:
    """Return a setting's value that has a type already, as in a TOML file. Raises ValueError as `from_text` does."""
    kind, choices = str(setting.type), setting.metadata["choices"]
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int if kind == "int" else (int, float)):
            raise ValueError(_bounds(setting))
        return _within(setting, value if kind == "int" else float(value))
    if isinstance(value, bool) and "yes" in choices:
        return "yes" if value else "no"
    if not isinstance(value, str):
        raise ValueError(f"expected {'one of ' + ', '.join(choices) if choices else 'text'} in quotation marks")
    return from_text(setting, value)


def _within(setting: Field[Any], value: float) -> float:
    if not setting.metadata["least"] <= value <= setting.metadata["most"]:
        raise ValueError(_bounds(setting))
    return value


def _bounds(setting: Field[Any]) -> str:
    return f"expected {setting.type} from {setting.metadata['least']} to {setting.metadata['most']}"


def load(environment: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of `environment`. Raises UsageError for a bad value or an unknown COMMLIB_ name."""
    return Config(**read_environment(environment))


def read_environment(environment: Mapping[str, str], where: str = "environment variable") -> dict[str, Any]:
    """Return what `environment` gives, by field of `Config`; `where` is what an error calls it. Raises UsageError."""
    known = {variable(setting.name): setting for setting in fields(Config)}
    given = {name: text for name, text in environment.items() if name.startswith("COMMLIB_") and name != CONFIG_FILE}
    if unknown := sorted(given.keys() - known.keys()):
        raise unknown_settings(unknown, sorted([*known, CONFIG_FILE]))
    values = {}
    for name, text in given.items():
        try:
            values[known[name].name] = from_text(known[name], text)
        except ValueError as error:
            raise UsageError(f"{where} {name}={text!r}: {error}") from None
    return values


def unknown_settings(unknown: Sequence[str], known: Sequence[str], where: str = "") -> UsageError:
    """Return an error that names what is unknown, each with the nearest known name if one is near. where: a file."""
    from difflib import get_close_matches  # brings `re`; errors are rare

    written = {name: name.removeprefix("COMMLIB_").lower() if where else name for name in unknown}
    near = {name: get_close_matches(text, known, 1, 0.7) for name, text in written.items()}
    hints = "".join(f"; for {name}, did you mean {found[0]}?" for name, found in near.items() if found)
    before = f"{where}: " if where else ""
    return UsageError(f"{before}unknown setting {', '.join(unknown)}; known are {', '.join(known)}{hints}")


def variable(name: str) -> str:
    """Return the environment variable that field `name` of `Config` is read from."""
    return f"COMMLIB_{name.upper()}"


def compared(config: Config, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what all ranks must have alike, by the names of the environment variables."""
    own = {f.name: getattr(config, f.name) for f in fields(Config) if not f.metadata["differs"]}
    texts = {
        variable(name): str(int(value) if value is True or value is False else value) for name, value in own.items()
    }
    return texts | {name: environment.get(name, "unset") for name in ALSO_COMPARED}


def compare(everyone: Sequence[tuple[str, Mapping[str, str]]], origins: Sequence[Mapping[str, str]] = ()) -> None:
    """Compare what the ranks, in their order, have found: what is wrong with their own settings or "", and `compared`.

    origins: each rank's, by field (`Settings.origins`). Raises UsageError for wrong ones, MismatchError for those that
    differ; it names them all, with their ranks, and where they come from if that is not the environment of all.
    """
    wrong = _by_value(text for text, _ in everyone)
    wrong.pop("", None)
    if wrong:
        raise UsageError("; ".join(f"{text} ({ranks_text(ranks)})" for text, ranks in wrong.items()))
    lines = []
    for name in everyone[0][1]:
        values = [settings[name] for _, settings in everyone]
        if len(set(values)) == 1:
            continue
        found = [origin.get(name.removeprefix("COMMLIB_").lower(), "default") for origin in origins]
        if set(found) - {"environment"}:
            values = [f"{value} ({origin})" for value, origin in zip(values, found, strict=True)]
        lines.append(f"  {name}: " + "; ".join(f"{v} on {ranks_text(on)}" for v, on in _by_value(values).items()))
    if lines:
        raise MismatchError(
            "commlib.init: these settings must be the same on all ranks:\n" + "\n".join(lines) + "\nGive the "
            "environment variable to all of them (Open MPI: mpirun -x NAME=VALUE; MPICH: mpiexec -genv NAME VALUE), "
            "and let a file of settings be the same on all hosts"
        )


def _by_value(values: Iterable[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


_MOST_RANGES = 8


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks in words: "rank 3", "ranks 0-5, 7", and of very many the first."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ranges[:_MOST_RANGES]
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in shown)
    more = len(ranks) - sum(last - first + 1 for first, last in shown)
    return f"rank{'s' * (len(ranks) > 1)} {text}{f' and {more} more' if more else ''}"
