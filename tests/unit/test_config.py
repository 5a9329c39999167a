"""The table of settings: parsing, bounds, and words that help."""

from __future__ import annotations

from dataclasses import fields

import pytest

from commlib.config import Config, load
from commlib.errors import UsageError


def test_defaults():
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
    ],
)
def test_values(name, text, value):
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
    ],
)
def test_bad_values(name, text, expected):
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
def test_values_out_of_range(name, text):
    with pytest.raises(UsageError, match=f"COMMLIB_{name}"):
        load({f"COMMLIB_{name}": text})


def test_unknown_settings_are_named_with_the_known_ones():
    with pytest.raises(UsageError) as caught:
        load({"COMMLIB_TIMEOUTS": "1", "COMMLIB_A": "", "COMMLIB_TIMEOUT": "1"})
    text = str(caught.value)
    assert "COMMLIB_A, COMMLIB_TIMEOUTS" in text and "COMMLIB_SLOT_KIB" in text
