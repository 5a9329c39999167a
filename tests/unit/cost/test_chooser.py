"""The chooser consults the table, then the model, and chooses the same on all ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from commlib.config.settings import Config
from commlib.cost.chooser import Choice, Chooser, LinkKind, Tuning, usual_machine
from commlib.cost.model import DEFAULT, ETHERNET, Machine, best
from commlib.cost.records import MOST_SEGMENTS, Entry, FittedMachine, MeasuredTime
from commlib.cost.table import Table
from commlib.errors import UsageError
from commlib.schedule import LinkCost, algorithms, verbs

SLOW = Machine(LinkCost(1e-6, 1e-9), LinkCost(1e-4, 1e-8), 1e-9)


@pytest.mark.parametrize("verb", verbs())
@pytest.mark.parametrize(("kind", "sharing"), [("node", 1), ("network", 1), ("network", 8)])
def test_the_model_s_choice_is_the_fastest_it_predicts(verb: str, kind: LinkKind, sharing: int) -> None:
    chooser = Chooser(DEFAULT)
    link = DEFAULT.node if kind == "node" else LinkCost(DEFAULT.network.alpha, DEFAULT.network.beta * sharing)
    for size in (1, 2, 7, 16):
        for nbytes in (1, 4096, 1 << 20, 1 << 26):  # powers of two: nothing is rounded
            choice = chooser.choose(verb, size, nbytes, kind=kind, sharing=sharing)
            times = {name: best(verb, name, size, nbytes, link, DEFAULT.gamma) for name in algorithms(verb)}
            assert choice.source == "model"
            assert (choice.segments, choice.seconds) == times[choice.algorithm]
            assert choice.seconds <= min(seconds for _, seconds in times.values()) * (1 + 1e-9)


def test_small_data_needs_few_messages_and_large_data_few_bytes() -> None:
    chooser = Chooser(DEFAULT)
    assert chooser.choose("all_reduce", 12, 8, kind="network").algorithm == "recursive_doubling"
    assert chooser.choose("all_reduce", 12, 1 << 28, kind="network").algorithm in ("ring", "bruck")
    assert chooser.choose("all_to_all", 12, 12, kind="network").algorithm == "bruck"
    assert chooser.choose("all_to_all", 12, 1 << 28, kind="network").algorithm == "pairwise"


def test_ties_go_to_the_first_registered() -> None:
    """Between two ranks all all-gathers are one exchange."""
    assert Chooser(DEFAULT).choose("all_gather", 2, 1 << 20, kind="node").algorithm == algorithms("all_gather")[0]


def test_algorithms_are_ranked_by_the_power_of_two_and_segments_by_the_size() -> None:
    chooser = Chooser(DEFAULT)
    for nbytes in ((1 << 25) + 1, 3 << 24, 1 << 26):
        choice = chooser.choose("all_reduce", 6, nbytes, kind="node", among=("ring",))
        assert (choice.segments, choice.seconds) == best("all_reduce", "ring", 6, nbytes, DEFAULT.node, DEFAULT.gamma)


def test_only_allowed_algorithms_are_chosen() -> None:
    chooser = Chooser(DEFAULT)
    assert chooser.choose("all_reduce", 8, 8, kind="node", among=("ring", "native")).algorithm == "ring"
    with pytest.raises(UsageError, match="all_reduce: none of native has a schedule; expected one of"):
        chooser.choose("all_reduce", 8, 8, kind="node", among=("native",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "moon"}, "kind must be 'node' or 'network', got 'moon'"),
        ({"sharing": 0}, "sharing must be at least 1, got 0"),
        ({"verb": "all_shrink"}, "no collective is called"),
        ({"size": 0}, "size must be at least 1"),
        ({"nbytes": -1}, "nbytes must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    given = {"verb": "all_reduce", "size": 2, "nbytes": 8, "kind": "network", **arguments}
    with pytest.raises(UsageError, match=message):
        Chooser(DEFAULT).choose(**given)  # type: ignore[arg-type]


# The table

TIMES = (
    MeasuredTime(1024, "node", 0, 1e-6),
    MeasuredTime(1024, "ring", 3, 2e-6),
    MeasuredTime(1 << 26, "double_tree", 0, 1e-3),
)
TABLE = Table(
    (
        Entry("all_reduce", 1, 4, "", "any", TIMES),
        Entry("all_reduce", 4, 2, "", "any", (MeasuredTime(1024, "bruck", 0, 5e-6),)),
    ),
    (FittedMachine("", SLOW.node, SLOW.network, SLOW.gamma),),
)


def test_the_table_wins_where_it_has_measurements() -> None:
    chooser = Chooser(SLOW, TABLE)
    assert chooser.choose("all_reduce", 4, 1000, kind="node") == Choice("ring", 3, 2e-6, "table")
    assert chooser.choose("all_reduce", 4, 1000, kind="network", sharing=2) == Choice("bruck", 1, 5e-6, "table")
    elsewhere = [
        chooser.choose("all_reduce", 5, 1000, kind="node"),
        chooser.choose("all_reduce", 4, 1000, kind="network"),
        chooser.choose("all_reduce", 4, 1 << 27, kind="node"),
        chooser.choose("broadcast", 4, 1000, kind="node"),
        chooser.choose("all_reduce", 4, 1000, kind="node", among=("bruck",)),
    ]
    assert {choice.source for choice in elsewhere} == {"model"}


def test_algorithms_without_a_schedule_must_be_allowed_by_name() -> None:
    chooser = Chooser(SLOW, TABLE)
    choice = chooser.choose("all_reduce", 4, 1000, kind="node", among=("bruck", "ring", "node"))
    assert choice == Choice("node", 1, 1e-6, "table")


def test_the_model_fills_in_segments_missing_from_the_table() -> None:
    choice = Chooser(SLOW, TABLE).choose("all_reduce", 4, 1 << 24, kind="node")
    segments, _ = best("all_reduce", "double_tree", 4, 1 << 24, SLOW.node, SLOW.gamma)
    assert segments > 1
    assert choice == Choice("double_tree", segments, 1e-3, "table")


def test_no_segment_of_a_table_is_empty() -> None:
    """An entry applies to all smaller data too; a pipeline of 10^9 segments never finished 8 bytes."""
    entry = Entry("all_reduce", 1, 4, "", "any", (MeasuredTime(1 << 20, "double_tree", MOST_SEGMENTS, 1e-3),))
    chooser = Chooser(SLOW, Table((entry,)))
    assert chooser.choose("all_reduce", 4, 8, kind="node").segments == 8
    assert chooser.choose("all_reduce", 4, 1 << 20, kind="node").segments == MOST_SEGMENTS


@pytest.mark.parametrize("alpha", [0.0, 5e-324, 1e6])
@pytest.mark.parametrize("beta", [0.0, 5e-324, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 5e-324, 1.0])
def test_every_machine_that_a_table_may_hold_has_a_fastest_algorithm(alpha: float, beta: float, gamma: float) -> None:
    """sqrt(gamma c / alpha) was rounded before it was bounded: OverflowError."""
    chooser = Chooser(Machine(LinkCost(alpha, beta), LinkCost(alpha, beta), gamma))
    for verb in ("all_reduce", "all_gather", "broadcast"):
        for nbytes in (0, 1, 1 << 34):
            assert chooser.choose(verb, 4, nbytes, kind="network").algorithm


# The tuning that all ranks get


@dataclass
class Settings:
    tuning_file: str


def test_a_tuning_survives_serialisation() -> None:
    for tuning in (Tuning(), Tuning(Machine(LinkCost(0.1, 1 / 3), LinkCost(2 / 3, 1e-300), 1 / 7), TABLE)):
        assert Tuning.from_bytes(tuning.to_bytes()) == tuning


def test_a_table_is_loaded_for_the_machine_and_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine comes from the fit; entries of other MPI libraries than the loaded one are ignored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("commlib.cost.chooser.mpi_library", lambda: "")
    monkeypatch.setattr("commlib.cost.chooser.usual_machine", lambda: DEFAULT)
    assert Tuning.load(Settings("")) == Tuning()
    foreign = Entry("all_reduce", 1, 8, "Some MPI 1.0", "any", TIMES)
    mixed = Table((*TABLE.entries, foreign), (FittedMachine("Some MPI 1.0", None, None, 1.0), *TABLE.machines))
    mixed.save(tmp_path / "commlib" / "tuning.json")
    assert Tuning.load(Settings("")) == Tuning(SLOW, TABLE)
    assert Tuning.load(Config()) == Tuning(SLOW, TABLE)
    assert Tuning.load(Settings("none")) == Tuning()
    monkeypatch.setattr("commlib.cost.chooser.mpi_library", lambda: "Third MPI 1.0")
    assert Tuning.load(Settings("")) == Tuning(DEFAULT, Table())
    with pytest.raises(UsageError, match=r"missing\.json"):
        Tuning.load(Settings(str(tmp_path / "missing.json")))


def test_a_table_that_others_can_change_is_used_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of the default table was not checked for other users' write access."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("commlib.cost.chooser.mpi_library", lambda: "")
    file = tmp_path / "cache" / "commlib" / "tuning.json"
    TABLE.save(file)
    (tmp_path / "cache").chmod(0o777)
    assert Tuning.load(Settings("")) == Tuning(usual_machine())
    (record,) = caplog.records
    reason = f"{tmp_path / 'cache'} may be written by everyone (chmod go-w {tmp_path / 'cache'})"
    assert f"the tuning table {file} is ignored: {reason}. Set COMMLIB_TUNING_FILE={file} to use" in record.getMessage()
    assert Tuning.load(Settings(str(file))) == Tuning(SLOW, TABLE)
    (tmp_path / "cache").chmod(0o755)
    assert Tuning.load(Settings("")) == Tuning(SLOW, TABLE)


def test_a_missing_table_gives_no_warning_about_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Tuning.load(Settings("")) == Tuning(usual_machine())
    assert not caplog.records


def test_network_cards_determine_the_kind_of_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tmp_path / "infiniband"
    monkeypatch.setattr("commlib.cost.chooser.FABRICS", (tmp_path / "cxi", cards))
    assert usual_machine() == ETHERNET
    cards.mkdir()
    assert usual_machine() == ETHERNET  # there is a driver, but no card
    (cards / "mlx5_0").touch()
    assert usual_machine() == DEFAULT


def test_choosing_imports_nothing_heavy() -> None:
    code = "import sys, commlib.cost.chooser; print(*(m for m in ('numpy', 'mpi4py', 'threading') if m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


@pytest.mark.parametrize("verb, best", [("all_gather", "ring"), ("all_to_all", "pairwise"), ("all_reduce", "ring")])
def test_on_a_slow_link_messages_are_sent_eagerly(verb, best):
    """Open MPI uses a rendezvous above 64 KiB over TCP, which took up to twice as long."""
    nbytes, size = 3 << 20, 4
    choice = Chooser(ETHERNET).choose(verb, size, nbytes, kind="network")
    assert choice.algorithm == best
    assert nbytes / size / choice.segments <= 60 << 10
    if verb != "all_reduce":  # nothing is combined, so on a fabric there is nothing to cut for
        assert Chooser(DEFAULT).choose(verb, size, nbytes, kind="network", among=(best,)).segments == 1
    direct = Chooser(ETHERNET).choose("all_reduce", size, nbytes, kind="network", among=("direct",))
    assert nbytes / size / direct.segments <= 60 << 10


def test_device_paths_are_sorted_by_time() -> None:
    """The fastest first; unmeasured paths have no entry, and these times do not decide for the host."""
    fast, slow = MeasuredTime(1024, "nccl", 0, 1e-5), MeasuredTime(1024, "host", 0, 2e-5)
    chooser = Chooser(table=Table((Entry("all_reduce", 1, 4, "", "any", (fast, slow), "cuda"),)))
    assert chooser.measured("all_reduce", 1, 4, 1000, device="cuda") == (fast, slow)
    assert not chooser.measured("all_reduce", 1, 4, 1025, device="cuda")
    assert not chooser.measured("all_reduce", 1, 4, 1000, device="")
    assert not chooser.measured("broadcast", 1, 4, 1000, device="cuda")
    assert not Chooser().measured("all_reduce", 1, 4, 1000, device="cuda")
    assert chooser.choose("all_reduce", 4, 1000, kind="node").source == "model"
