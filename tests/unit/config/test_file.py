"""The file of settings: its contents, its precedence, and helpful errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commlib.config.file import check_unchanged, find_settings, read_file
from commlib.config.settings import Config, Settings, collect_compared, compare
from commlib.errors import MismatchError, UsageError


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    """The user's file, in a config folder of its own."""
    path = tmp_path / "xdg" / "commlib" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def in_config_folder(path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(path.parents[1])}


def test_defaults_apply_without_a_file(users_file):
    settings = find_settings(in_config_folder(users_file))
    assert settings.config == Config() and not settings.origins


def test_the_environment_wins_over_the_file_and_the_file_over_the_program(users_file):
    users_file.write_text("timeout = 7\nslot_kib = 64\nnode_path = false\n")
    environment = in_config_folder(users_file) | {"COMMLIB_TIMEOUT": "9"}
    settings = find_settings(environment, {"COMMLIB_TIMEOUT": "1", "COMMLIB_SLOT_KIB": "2", "COMMLIB_SPINS": "3"})
    assert settings.config == Config(timeout=9.0, slot_kib=64, node_path=False, spins=3)
    in_file = f"file {users_file}"
    assert settings.origins == {"timeout": "environment", "slot_kib": in_file, "node_path": in_file, "spins": "program"}
    assert type(settings.config.timeout) is float


@pytest.mark.parametrize("given_by", ["environment", "program"])
def test_a_named_file_is_read_instead_of_the_users(users_file, tmp_path, given_by):
    users_file.write_text("timeout = 7\n")
    named = tmp_path / "mine.toml"
    named.write_text("spins = 5\n")
    name = {"COMMLIB_CONFIG": str(named)}
    environment = in_config_folder(users_file)
    settings = find_settings(environment | name) if given_by == "environment" else find_settings(environment, name)
    assert settings.config == Config(spins=5) and settings.origins == {"spins": f"file {named}"}


def test_none_reads_no_file(users_file):
    users_file.write_text("nonsense")
    assert find_settings(in_config_folder(users_file) | {"COMMLIB_CONFIG": "none"}).config == Config()


def test_the_working_folder_is_not_searched(users_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("commlib.toml", "config.toml"):
        Path(name).write_text("timeline = '/somewhere'\n")
    assert find_settings(in_config_folder(users_file)).config == Config()


@pytest.mark.parametrize(
    "line, field, value", [("cuda_aware = false", "cuda_aware", "no"), ("check = 'NEVER'", "check", "never")]
)
def test_words_are_parsed(tmp_path, line, field, value):
    path = tmp_path / "a.toml"
    path.write_text(line)
    assert read_file(path) == {field: value}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("timeout =", "is not valid TOML"),
        ("timeout = 'long'", "timeout = 'long': expected float from 0 to"),
        ("timeout = -1", "expected float from 0 to"),
        ("timeout = nan", "expected float from 0 to"),
        ("timeout = true", "expected float from 0 to"),
        ("slot_kib = 1.5", "slot_kib = 1.5: expected int from 1 to 1048576"),
        ("slot_kib = 0", "expected int from 1 to 1048576"),
        ("node_path = 1", "node_path = 1: expected true or false"),
        ("check = 'sometimes'", "expected one of auto, always, never"),
        ("check = true", "expected one of auto, always, never in quotation marks"),
        ("tuning_file = 3", "expected text in quotation marks"),
        ("timeouts = 3", "timeouts (did you mean timeout?)"),
        ("[timeout]\nx = 1", "expected float"),
        ("[xyzzy]\nx = 1", "unknown setting xyzzy; known are "),
        ("COMMLIB_SPINS = 1", "COMMLIB_SPINS (did you mean spins?)"),
    ],
)
def test_errors_in_a_file_are_located(tmp_path, text, expected):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        find_settings({"COMMLIB_CONFIG": str(path)})
    assert str(path) in str(caught.value) and expected in str(caught.value)


def test_a_file_must_be_text(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_bytes(b"log_level = '\xff'")
    with pytest.raises(UsageError, match="is not valid TOML"):
        read_file(path)


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(
        UsageError, match=r"cannot read the file of settings /.*/no.toml \(No such file .*COMMLIB_CONFIG=none"
    ):
        find_settings({"COMMLIB_CONFIG": str(tmp_path / "no.toml")})


def test_a_file_that_other_users_can_change_is_ignored(users_file):
    users_file.write_text("timeout = 7\n")
    users_file.chmod(0o666)
    with pytest.raises(UsageError, match=r"another user can change it: .*chmod go-w .*COMMLIB_CONFIG="):
        find_settings(in_config_folder(users_file))
    assert find_settings({"COMMLIB_CONFIG": str(users_file)}).config.timeout == 7


@pytest.mark.parametrize(
    "name, near",
    [
        ("COMMLIB_TIMEOUTS", "COMMLIB_TIMEOUT"),
        ("COMMLIB_SLOTS_KB", "COMMLIB_SLOT_KIB"),
        ("COMMLIB_CONFIGS", "COMMLIB_CONFIG"),
    ],
)
def test_errors_suggest_the_nearest_name(name, near):
    with pytest.raises(UsageError, match=f"{name} \\(did you mean {near}\\?\\)"):
        find_settings({name: "1", "COMMLIB_CONFIG": "none"})


def test_an_error_names_the_program_as_source_of_a_default():
    with pytest.raises(UsageError, match="the program's default COMMLIB_SPINS='many': expected int"):
        find_settings({"COMMLIB_CONFIG": "none"}, {"COMMLIB_SPINS": "many"})


def test_differences_name_the_source_of_settings():
    ours, theirs = collect_compared(Config()), collect_compared(Config(slot_kib=4, timeout=3.0))
    origins = [{"timeout": "environment"}, {"slot_kib": "file /etc/c.toml", "timeout": "environment"}]
    with pytest.raises(MismatchError) as caught:
        compare([("", ours), ("", theirs)], origins)
    text = str(caught.value)
    assert "  COMMLIB_SLOT_KIB: 512 (default) on rank 0; 4 (file /etc/c.toml) on rank 1\n" in text
    assert "  COMMLIB_TIMEOUT: 0.0 on rank 0; 3.0 on rank 1\n" in text  # the environment's, as always


def test_the_source_of_a_setting_does_not_matter():
    one = collect_compared(Config(slot_kib=4))
    compare([("", one), ("", one)], [{"slot_kib": "environment"}, {"slot_kib": "file /x"}])


IN_FORCE = Settings(
    Config(timeout=9, slot_kib=64, spins=3), {"timeout": "environment", "slot_kib": "file f"}, Path("f")
)


@pytest.mark.parametrize(
    "defaults",
    [{}, {"COMMLIB_SPINS": "3"}, {"COMMLIB_TIMEOUT": "1", "COMMLIB_SLOT_KIB": "2", "COMMLIB_NODE_PATH": "yes"}],
)
def test_late_defaults_that_change_nothing_are_accepted(defaults):
    """The environment and the file take precedence over defaults, early or late."""
    check_unchanged(IN_FORCE, defaults, {})


@pytest.mark.parametrize(
    "defaults, text",
    [
        (
            {"COMMLIB_SPINS": "4"},
            "already with COMMLIB_SPINS=3, but the argument defaults has 4: give defaults to the first",
        ),
        ({"COMMLIB_NODE_PATH": "no"}, "COMMLIB_NODE_PATH=1, but the argument defaults has 0"),
        ({"COMMLIB_CONFIG": "/g"}, "COMMLIB_CONFIG=f, but the argument defaults has /g"),
        ({"COMMLIB_SPINS": "many"}, "the program's default COMMLIB_SPINS='many': expected int from -1"),
    ],
)
def test_late_defaults_that_would_change_a_setting_are_refused(defaults, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        check_unchanged(IN_FORCE, defaults, {})


@pytest.mark.parametrize(
    "defaults, text",
    [
        ({"timeout": "300"}, "unknown setting timeout (did you mean COMMLIB_TIMEOUT?)"),
        ({"COMMLIB_TIMEOUT": 300}, "the program's default COMMLIB_TIMEOUT=300: expected text, as in the environment"),
    ],
)
def test_defaults_are_given_as_in_the_environment(users_file, defaults, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        find_settings(in_config_folder(users_file), defaults)
