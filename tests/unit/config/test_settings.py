"""The table of settings: parsing, bounds, and helpful errors."""

from __future__ import annotations

from dataclasses import fields

import pytest

from commlib.config.settings import Config, collect_compared, compare, load, ranks_text
from commlib.errors import MismatchError, UsageError


def test_defaults_are_used():
    assert load({}) == Config()
    assert load({"PATH": "/bin", "commlib_check": "x"}) == Config()


def test_every_setting_has_a_default_of_its_type_and_a_meaning():
    for field in fields(Config):
        assert type(getattr(Config(), field.name)).__name__ == field.type
        assert len(field.metadata["meaning"]) > 20


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("check", "never", "never"),
        ("check_first", "0", 0),
        ("timeout", "2.5", 2.5),
        ("timeout", "3", 3.0),
        ("spins", "-1", -1),
        ("slot_kib", "64", 64),
        *[("node_path", text, True) for text in ("1", "true", "YES", "On")],
        *[("node_path", text, False) for text in ("0", "false", "NO", "Off")],
        *[("cuda_aware", text, "yes") for text in ("yes", "1", "True")],
        *[("cuda_aware", text, "no") for text in ("No", "0", "false")],
        ("cuda_aware", "AUTO", "auto"),
    ],
)
def test_values_are_parsed(name, text, value):
    config = load({f"COMMLIB_{name.upper()}": text})
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("NODE_PATH", "maybe", "expected bool"),
        ("NODE_PATH", "", "expected bool"),
        ("SLOT_KIB", "64k", "expected int"),
        ("SLOT_KIB", "1.5", "expected int"),
        ("TIMEOUT", "long", "expected float"),
        ("CHECK", "sometimes", "expected one of auto, always, never"),
        ("LOG_LEVEL", "loud", "expected one of debug, info, warning, error"),
        ("CUDA_AWARE", "maybe", "expected one of auto, yes, no"),
    ],
)
def test_bad_values_are_refused(name, text, expected):
    with pytest.raises(UsageError) as caught:
        load({f"COMMLIB_{name}": text})
    assert f"COMMLIB_{name}={text!r}" in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize(
    "name, text",
    [
        ("SLOT_KIB", "0"),  # once an endless loop in the kernel
        ("SLOT_KIB", "-4"),
        ("NATIVE_KIB", "0"),
        ("CHECK_FIRST", "-1"),
        ("TIMEOUT", "-1"),
        ("TIMEOUT", "nan"),
        ("EXIT_TIMEOUT", "-0.5"),
        ("STALL_WARNING", "-1"),
        ("SPINS", "-2"),
    ],
)
def test_values_out_of_range_are_refused(name, text):
    with pytest.raises(UsageError, match=f"COMMLIB_{name}"):
        load({f"COMMLIB_{name}": text})


def test_unknown_settings_are_named_with_the_known_ones():
    with pytest.raises(UsageError) as caught:
        load({"COMMLIB_TIMEOUTS": "1", "COMMLIB_A": "", "COMMLIB_TIMEOUT": "1"})
    text = str(caught.value)
    assert "COMMLIB_A, COMMLIB_TIMEOUTS" in text and "COMMLIB_SLOT_KIB" in text


@pytest.mark.parametrize(
    "name, text",
    [
        ("SLOT_KIB", str(2**62)),  # once an OverflowError
        ("SLOT_KIB", "1048577"),
        ("SPINS", str(2**63)),
        ("NATIVE_KIB", "1e3"),
        ("FUSION_MIB", str(2**40)),
        ("KNOWN_NAMES", str(2**40)),
        ("CHECK_FIRST", str(10**10)),
        ("TIMEOUT", "inf"),
        ("EXIT_TIMEOUT", "1e12"),  # more than a lock can wait
    ],
)
def test_extreme_values_are_refused(name, text):
    with pytest.raises(UsageError, match=f"COMMLIB_{name}.*expected (int|float) from"):
        load({f"COMMLIB_{name}": text})


def test_words_may_be_in_capitals():
    assert load({"COMMLIB_LOG_LEVEL": "INFO", "COMMLIB_CHECK": "Never"}) == Config(log_level="info", check="never")


def test_every_setting_is_compared_or_has_a_reason():
    free = {field.name for field in fields(Config) if field.metadata["differs"]}
    assert free == {"spins", "log_level", "tuning_file", "events", "timeline", "traceback"}
    names = {f"COMMLIB_{field.name.upper()}" for field in fields(Config) if field.name not in free}
    assert set(collect_compared(Config(), {})) == names


def test_variables_of_other_software_are_compared_as_text(monkeypatch):
    monkeypatch.setattr("commlib.config.settings.ALSO_COMPARED", ("OTHER_SETTING",))
    ours, theirs = collect_compared(Config(), {"OTHER_SETTING": "1"}), collect_compared(Config(), {})
    compare([("", ours), ("", ours)])
    with pytest.raises(MismatchError, match="OTHER_SETTING: 1 on rank 0; unset on rank 1"):
        compare([("", ours), ("", theirs)])


def test_all_differences_are_in_one_error():
    usual, odd = collect_compared(Config()), collect_compared(Config(slot_kib=4, node_path=False, timeout=2.5, spins=7))
    with pytest.raises(MismatchError) as caught:
        compare([("", odd if rank in (1, 700) else usual) for rank in range(4096)])
    lines = str(caught.value).splitlines()
    assert lines[0] == "commlib.init: these settings must be the same on all ranks:"
    assert sorted(lines[1:-1]) == [
        "  COMMLIB_NODE_PATH: 1 on ranks 0, 2-699, 701-4095; 0 on ranks 1, 700",
        "  COMMLIB_SLOT_KIB: 512 on ranks 0, 2-699, 701-4095; 4 on ranks 1, 700",
        "  COMMLIB_TIMEOUT: 0.0 on ranks 0, 2-699, 701-4095; 2.5 on ranks 1, 700",
    ]


def test_bad_settings_come_before_different_ones():
    ours, theirs = collect_compared(Config()), collect_compared(Config(slot_kib=4))
    with pytest.raises(UsageError) as caught:
        compare([("", ours), ("no number", theirs), ("no number", ours), ("no word", ours)])
    assert str(caught.value) == "no number (ranks 1-2); no word (rank 3)"


@pytest.mark.parametrize(
    "ranks, text",
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 2, 3, 4, 9], "ranks 0, 2-4, 9"),
        (range(4096), "ranks 0-4095"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_are_written_as_ranges(ranks, text):
    assert ranks_text(ranks) == text
