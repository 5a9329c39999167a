"""BenchOptions: check the command's options, as far as one rank can."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commlib.arguments import suggest
from commlib.bench.verbs import ONLY_MPI, VERBS, BenchVerb
from commlib.dtypes import DTYPES, kernel_operation
from commlib.errors import UsageError

PEERS = ("mpi", "pieces", "gloo", "nccl", "ordinary")
DEVICES = ("host", "cuda")
ONLY_ON = {"pieces": "host", "nccl": "cuda"}  # peers of one kind of memory
FORMATS = ("nccl", "osu")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BenchOptionsError(UsageError):
    """The options are invalid. Raised on all ranks together, before any measurement."""


def parse_size(text: str) -> int:
    """Return a number of bytes: digits, optionally with K, M or G (powers of 1024). Raises Refused."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise BenchOptionsError(
            f"size {text!r}: expected a positive whole number of bytes, optionally with K, M or G, such as 64K"
        )
    return int(match[1]) * _UNITS[match[2]]


def sizes_between(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """Return begin, begin * factor, ... up to end. Raises Refused."""
    if factor < 2:
        raise BenchOptionsError(f"--factor is {factor}: expected at least 2")
    if begin > end:
        raise BenchOptionsError(f"--begin {begin} is more than --end {end}")
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of one run. None means the usual value of the verb (see `check`)."""

    verb: str
    sizes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    peers: tuple[str, ...] = ()
    in_place: bool | None = None
    symmetric: bool | None = None
    asynchronous: bool = False
    plan: bool = False
    algorithm: str | None = None
    root: int | None = None
    rounds: int = 9
    check: bool = True
    fresh: bool = False
    out: Path | None = None
    iters: int | None = None
    warmup_iters: int | None = None
    percentiles: bool = False
    side_by_side: bool = False
    csv: bool = False
    format: str | None = None
    device: str = "host"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The options of one run, with all defaults filled in."""

    verb: BenchVerb
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    peers: tuple[str, ...]
    in_place: bool
    symmetric: bool
    asynchronous: bool
    plan: bool
    algorithm: str
    root: int
    rounds: int
    check: bool
    fresh: bool
    out: Path | None
    iters: int | None = None
    warmup_iters: int | None = None
    percentiles: bool = False
    side_by_side: bool = False
    csv: bool = False
    format: str | None = None
    device: str = "host"

    @property
    def places(self) -> tuple[bool, ...]:
        """For each figure of a row, whether it is measured in place."""
        return (False, True) if self.side_by_side else (self.in_place,)


DEFAULT_SIZES = sizes_between(4, 64 << 20, 4)
_COMMANDS = ("all", "compare", "pairs", "report", "step", "sweep")  # the other words after `commlib bench`


def check(options: BenchOptions, ranks: int) -> BenchSettings:
    """Return complete settings. Raises Refused for options that are unknown, contradictory or without effect."""
    verb = _known("verb", [options.verb], VERBS, _COMMANDS)[0]
    kind = VERBS[verb]
    _refuse_what_has_no_effect(options, kind)
    dtypes = _known("--dtype", options.dtypes or ("float32",), DTYPES)
    ops = tuple(dict.fromkeys(options.ops or ("sum",)))
    peers = _known("--peer", options.peers, PEERS)
    if kind.reduces:
        for dtype in dtypes:
            for op in ops:
                try:
                    kernel_operation(dtype, op)
                except UsageError as error:
                    raise BenchOptionsError(str(error)) from None
    _check_device(options, peers)
    if "pieces" in peers and verb != "all_reduce":
        raise BenchOptionsError(f"--peer pieces is MPI_Allreduce in pieces: {verb} has no such peer")
    root = options.root or 0
    if not 0 <= root < ranks:
        raise BenchOptionsError(f"--root is {root}: expected a rank from 0 to {ranks - 1}")
    if options.rounds < 1:
        raise BenchOptionsError(f"--rounds is {options.rounds}: expected at least 1")
    if options.iters is not None and options.iters < 1:
        raise BenchOptionsError(f"--iters is {options.iters}: expected at least 1")
    if options.warmup_iters is not None and options.warmup_iters < 0:
        raise BenchOptionsError(f"--warmup-iters is {options.warmup_iters}: expected at least 0")
    if options.side_by_side and options.in_place is not None:
        raise BenchOptionsError(
            "--side-by-side measures out of place and in place: leave out --in-place and --out-of-place"
        )
    options = _as_the_format_has_it(options, kind)
    sizes = (0,) if verb == "barrier" else tuple(dict.fromkeys(options.sizes or DEFAULT_SIZES))
    in_place = kind.in_place in ("usual", "only") if options.in_place is None else options.in_place
    return BenchSettings(
        verb=kind,
        sizes=sizes,
        dtypes=dtypes,
        ops=ops if kind.reduces else ("",),
        peers=peers,
        in_place=in_place,
        symmetric=options.symmetric is not False and verb != "barrier",
        asynchronous=options.asynchronous,
        plan=options.plan,
        algorithm=options.algorithm or "auto",
        root=root,
        rounds=options.rounds,
        check=options.check,
        fresh=options.fresh,
        out=options.out,
        iters=options.iters,
        warmup_iters=options.warmup_iters,
        percentiles=options.percentiles,
        side_by_side=options.side_by_side,
        csv=options.csv,
        format=options.format,
        device=options.device,
    )


def _check_device(options: BenchOptions, peers: Sequence[str]) -> None:
    """Raise BenchOptionsError for an unknown device, and for peers that its arrays do not have."""
    _known("--device", [options.device], DEVICES)
    if options.verb == "barrier" and options.device != "host":
        raise BenchOptionsError(f"--device {options.device}: a barrier has no arrays; leave it out")
    for peer in peers:
        if (only_on := ONLY_ON.get(peer, options.device)) != options.device:
            raise BenchOptionsError(f"--peer {peer} is for --device {only_on}, not {options.device}: leave it out")
    if "ordinary" in peers and (options.symmetric is False or options.verb == "barrier"):
        raise BenchOptionsError(
            "--peer ordinary measures commlib on ordinary arrays next to symmetric ones: leave out --ordinary, and "
            "choose a verb with arrays"
        )


def _as_the_format_has_it(options: BenchOptions, verb: BenchVerb) -> BenchOptions:
    """Return the options adapted to another benchmark's format. Raises Refused if the format does not support them."""
    if options.format is None:
        return options
    _known("--format", [options.format], FORMATS)
    useless = {"--csv": options.csv, "--percentiles": options.percentiles, "--peer": bool(options.peers)}
    for what, is_useless in useless.items():
        if is_useless:
            raise BenchOptionsError(f"--format {options.format} does not support {what}: leave one of them out")
    if verb.name in (*ONLY_MPI, "all_to_all_v") or (options.format == "nccl" and verb.name == "barrier"):
        raise BenchOptionsError(f"--format {options.format} has no {verb.name}: leave one of them out")
    if options.format == "nccl":  # its heading prints nccl-tests' defaults
        both = options.in_place is None and verb.in_place in ("usual", "able")
        calls = 20 if options.iters is None else options.iters
        before = 5 if options.warmup_iters is None else options.warmup_iters
        return replace(options, side_by_side=options.side_by_side or both, iters=calls, warmup_iters=before)
    if verb.name == "send_recv":
        raise BenchOptionsError("--format osu has no ring of send_recv: leave one of them out")
    if options.side_by_side or len(options.ops or ()) > 1:
        raise BenchOptionsError(
            "--format osu prints one figure per size: leave out --side-by-side, and give only one --op"
        )
    is_out = options.in_place is None and verb.in_place == "usual"  # as in OSU's benchmarks
    return replace(options, in_place=False) if is_out else options


def _known(
    what: str, given: Sequence[str], known: Sequence[str] | dict[str, BenchVerb], similar: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names without repetitions; `similar` may be meant by an unknown one, too. Raises BenchOptionsError."""
    for name in given:
        if name not in known:
            hint = suggest(name, (*known, *similar))
            raise BenchOptionsError(f"{what} {name!r} is unknown; known are {', '.join(known)}{hint}")
    return tuple(dict.fromkeys(given))


def _refuse_what_has_no_effect(options: BenchOptions, verb: BenchVerb) -> None:
    moves_data = verb.name != "barrier"
    useless = {
        "--size, --begin, --end and --factor": options.sizes is not None and not moves_data,
        "--dtype": options.dtypes is not None and not moves_data,
        "--symmetric and --ordinary": options.symmetric is not None and not moves_data,
        "--fresh": options.fresh and not moves_data,
        "--op": options.ops is not None and not verb.reduces,
        "--root": options.root is not None and not verb.rooted,
        "--algorithm": options.algorithm is not None and not verb.has_algorithms,
        "--plan": options.plan and not verb.has_plan,
        "--in-place": options.in_place is True and verb.in_place == "not",
        "--side-by-side": options.side_by_side and verb.in_place not in ("usual", "able"),
        "--out-of-place": options.in_place is False and verb.in_place == "only",
    }
    for what, is_useless in useless.items():
        if is_useless:
            raise BenchOptionsError(f"{verb.name} has no {what}: leave it out")
