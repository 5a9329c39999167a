"""Every COMMLIB_* setting, in one table: name, type, default, meaning.

`commlib.init` reads the settings once: from the environment here, and from a file by `settings_file`. `compare` reports
all differences between ranks in one error, except for settings allowed to differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from commlib.arguments import nearest, suggest
from commlib.errors import MismatchError, UsageError

# Environment variables of other libraries that must have the same text on all ranks.
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
    """Describe a setting. `differs`: how ranks may have different values ("per rank", ...); "": they may not."""
    limits = {"choices": choices, "least": least, "most": most}
    return field(default=default, metadata={"meaning": meaning, "differs": differs, **limits})


@dataclass(frozen=True, slots=True)
class Config:
    """The settings. Field `x` is read from the environment variable `COMMLIB_X`."""

    check: str = _setting(
        "auto",
        "compare the calls of all ranks: 'auto' (always within a node, for a group's first calls across nodes, "
        "and whenever a wait is long), 'always' or 'never'",
        ("auto", "always", "never"),
    )
    check_first: int = _setting(64, "first calls of a group across nodes that 'auto' compares before any data is sent")
    stall_warning: float = _setting(60.0, "seconds of waiting after which a warning names the late ranks")
    timeout: float = _setting(0.0, "seconds after which a wait raises StallError; 0 waits forever")
    hang_after: float = _setting(
        300.0,
        "seconds without progress after which every rank dumps its recent calls and stacks, and one rank prints the "
        "diagnosis; at most half of the timeout, if one is set; 0 never",
    )
    hang_folder: str = _setting("commlib-hangs", "folder for these dumps, created when needed; all hosts must see it")
    exit_timeout: float = _setting(5.0, "seconds that shutdown and interpreter exit wait for work in flight")
    node_path: bool = _setting(True, "use shared memory between the ranks of a node")
    peer_reads: bool = _setting(
        True,
        "let the ranks of a node read large ordinary arrays from each other's memory (process_vm_readv), if the "
        "system allows it",
    )
    slot_kib: int = _setting(
        512, "KiB of each rank's two shared slots for the reduction of ordinary arrays", least=1, most=1 << 20
    )
    native_kib: int = _setting(
        1024, "KiB of each chunk of a large array that goes to MPI's own all-reduce", least=1, most=1 << 20
    )
    staging_kib: int = _setting(
        2048, "KiB of each chunk of a large device array that is staged through host memory", least=1, most=1 << 20
    )
    device_peers: bool = _setting(
        True, "let the devices of a node exchange data directly, if they can; else the host's cores copy it"
    )
    device_ipc: bool = _setting(
        True,
        "let these devices access each other's memory (CUDA IPC), if they can; else they go through host memory",
    )
    device_slot_kib: int = _setting(
        16384,
        "KiB of each rank's two slots of device memory that stage ordinary arrays for the other devices of a node",
        least=64,
        most=1 << 22,
    )
    mpi_devices: str = _setting(
        "",
        "comma-separated kinds of devices whose memory MPI sends and receives directly, in addition to GPUs "
        "(COMMLIB_CUDA_AWARE); arrays of other devices go through host memory",
    )
    cuda_aware: str = _setting(
        "auto",
        "whether MPI sends and receives GPU memory directly (CUDA-aware MPI): 'auto' queries the library and probes it "
        "in a separate process, if there is a GPU; 'yes' or 'no' decide it",
        ("auto", "yes", "no"),
    )
    nccl: bool = _setting(
        True, "let NCCL move GPU data between nodes, and within a node whose GPUs cannot share memory, if it can"
    )
    spins: int = _setting(
        -1, "polls before a waiting rank yields its core; -1: by cores per rank", least=-1, differs=_PER_RANK
    )
    tuning_file: str = _setting(
        "",
        "file of measured times ('commlib tune' writes it) for the choice of algorithms; empty: commlib/tuning.json in "
        "the user's cache folder, unless other users can change it; 'none': use the cost model only",
        differs=_RANK_0,
    )
    fusion_mib: int = _setting(
        64,
        "MiB of small named tensors, ready at the same time, that are fused into one reduction between nodes "
        "(at most 1 within a node)",
        least=1,
        most=1 << 20,
    )
    known_names: int = _setting(
        4096, "names of operations that ranks cache, to request each again with one bit", least=1, most=1 << 20
    )
    events: int = _setting(
        0,
        "recent events of operations that each rank keeps, for reports of its last calls in long waits and for call "
        "counters; 0 records none",
        differs=_PER_RANK,
    )
    timeline: str = _setting(
        "",
        "file of a Chrome trace of all operations, written by rank 0, or by each rank if the name contains {rank}",
        differs=_PER_RANK,
    )
    kernels: str = _setting(
        "",
        "folder of compiled kernels ('commlib warm' fills it), searched before the caches; it may be read-only for the "
        "user, and is used only if no other user except root can write to it",
    )
    traceback: str = _setting(
        "short",
        "what failing ranks of a job print: 'short', one rank its error, without the frames inside commlib; or 'full', "
        "every failing rank with all frames",
        ("short", "full"),
        differs=_PER_RANK,
    )
    log_level: str = _setting(
        "warning", "level of the 'commlib' logger", ("debug", "info", "warning", "error"), differs=_PER_RANK
    )


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


CONFIG_FILE = "COMMLIB_CONFIG"  # not a setting: it names the file of settings


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings and, by field of `Config`, the origin of each given one: "environment", "file ...", "program"."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None = None


def from_text(setting: Field[Any], text: str) -> Any:
    """Parse a setting's value from text. The ValueError for a bad text states the expected values."""
    kind, choices = str(setting.type), setting.metadata["choices"]
    word = text.lower()
    if kind == "bool":
        if word not in _TRUE + _FALSE:
            raise ValueError("expected bool (1 or 0)")
        return word in _TRUE
    if kind in ("int", "float"):
        try:
            return _check_bounds(setting, {"int": int, "float": float}[kind](text))
        except ValueError:
            raise ValueError(_bounds(setting)) from None
    if "yes" in choices and "no" in choices:
        word = "yes" if word in _TRUE else "no" if word in _FALSE else word
    if choices and word not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}{suggest(word, choices)}")
    return word if choices else text


def from_value(setting: Field[Any], value: Any) -> Any:
    """Check a setting's value that has a type already, as in a TOML file. Raises ValueError as `from_text` does."""
    kind, choices = str(setting.type), setting.metadata["choices"]
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int if kind == "int" else (int, float)):
            raise ValueError(_bounds(setting))
        return _check_bounds(setting, value if kind == "int" else float(value))
    if isinstance(value, bool) and "yes" in choices:
        return "yes" if value else "no"
    if not isinstance(value, str):
        raise ValueError(f"expected {'one of ' + ', '.join(choices) if choices else 'text'} in quotation marks")
    return from_text(setting, value)


def _check_bounds(setting: Field[Any], value: float) -> float:
    if not setting.metadata["least"] <= value <= setting.metadata["most"]:
        raise ValueError(_bounds(setting))
    return value


def _bounds(setting: Field[Any]) -> str:
    return f"expected {setting.type} from {setting.metadata['least']} to {setting.metadata['most']}"


def load(environment: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of `environment`. Raises UsageError for a bad value or an unknown COMMLIB_ name."""
    return Config(**read_environment(environment))


def read_environment(environment: Mapping[str, str], where: str = "environment variable") -> dict[str, Any]:
    """Parse the settings in `environment`, by field of `Config`; errors call it `where`. Raises UsageError."""
    known = {variable(setting.name): setting for setting in fields(Config)}
    given = {name: text for name, text in environment.items() if name.startswith("COMMLIB_") and name != CONFIG_FILE}
    if unknown := sorted(given.keys() - known.keys()):
        raise unknown_settings(unknown, sorted([*known, CONFIG_FILE]))
    values = {}
    for name, text in given.items():
        if not isinstance(text, str):
            raise UsageError(f"{where} {name}={text!r}: expected text, as in the environment, such as {str(text)!r}")
        try:
            values[known[name].name] = from_text(known[name], text)
        except ValueError as error:
            raise UsageError(f"{where} {name}={text!r}: {error}") from None
    return values


def unknown_settings(unknown: Sequence[str], known: Sequence[str], where: str = "") -> UsageError:
    """Return an error that lists the unknown settings, each with the nearest known name if any. where: a file."""
    by_end = {name.removeprefix("COMMLIB_"): name for name in known}  # the same beginning makes all names similar
    near = {name: nearest(name.removeprefix("COMMLIB_"), by_end) for name in unknown}
    texts = [f"{name} (did you mean {by_end[match]}?)" if match else name for name, match in near.items()]
    before = f"{where}: " if where else ""
    return UsageError(f"{before}unknown setting {', '.join(texts)}; known are {', '.join(known)}")


def variable(name: str) -> str:
    """Return the environment variable that field `name` of `Config` is read from."""
    return f"COMMLIB_{name.upper()}"


def collect_compared(config: Config, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that must be the same on all ranks, by environment variable."""
    own = {f.name: getattr(config, f.name) for f in fields(Config) if not f.metadata["differs"]}
    texts = {
        variable(name): str(int(value) if value is True or value is False else value) for name, value in own.items()
    }
    return texts | {name: environment.get(name, "unset") for name in ALSO_COMPARED}


def compare(everyone: Sequence[tuple[str, Mapping[str, str]]], origins: Sequence[Mapping[str, str]] = ()) -> None:
    """Compare the settings of all ranks. everyone: for each rank, an error text or "", and `collect_compared`.

    origins: each rank's origins, by field (`Settings.origins`). Raises UsageError for bad settings, MismatchError for
    different ones. The error lists all of them with their ranks, and with their origins unless every value comes from
    the environment.
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
        sources = [origin.get(name.removeprefix("COMMLIB_").lower(), "default") for origin in origins]
        if set(sources) - {"environment"}:
            values = [f"{value} ({origin})" for value, origin in zip(values, sources, strict=True)]
        lines.append(f"  {name}: " + "; ".join(f"{v} on {ranks_text(on)}" for v, on in _by_value(values).items()))
    if lines:
        raise MismatchError(
            "commlib.init: these settings must be the same on all ranks:\n" + "\n".join(lines) + "\nGive the "
            "environment variable to all ranks (Open MPI: mpirun -x NAME=VALUE; MPICH: mpiexec -genv NAME VALUE), "
            "and use the same file of settings on all hosts"
        )


def _by_value(values: Iterable[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


_MOST_RANGES = 8


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ascending ranks: "rank 3", "ranks 0-5, 7"; very many are cut short ("and 9 more")."""
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
