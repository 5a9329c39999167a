"""Settings file: its location, its format, and the precedence of settings.

    timeout = 300          # as COMMLIB_TIMEOUT=300
    log_level = "info"

`COMMLIB_CONFIG` names it; else it is commlib/config.toml in the user's config folder (XDG). commlib does not search the
working directory: it may belong to another user or differ between ranks, and a setting can name a file to write. The
environment takes precedence over the file, and the file over the program's defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from commlib import folders
from commlib.config.settings import (
    CONFIG_FILE,
    Config,
    Settings,
    from_value,
    read_environment,
    unknown_settings,
    variable,
)
from commlib.errors import UsageError

NONE = "none"  # as COMMLIB_CONFIG: read no file


def find_settings(environment: Mapping[str, str] = os.environ, defaults: Mapping[str, str] | None = None) -> Settings:
    """Return the settings from the environment, else the file, else `defaults` (names as in the environment).

    Raises UsageError for an unknown name or a bad value in any of them, and for a file that cannot be used.
    """
    defaults = defaults or {}
    given = _read_defaults(defaults)
    origins = dict.fromkeys(given, "program")
    path = find_file({**defaults, **environment})
    if path is not None:
        from_file = read_file(path, private=path == _users_file(environment))
        given |= from_file
        origins |= dict.fromkeys(from_file, f"file {path}")
    from_environment = read_environment(environment)
    given |= from_environment
    origins |= dict.fromkeys(from_environment, "environment")
    return Settings(Config(**given), origins, path)


def check_unchanged(
    in_force: Settings, defaults: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> None:
    """Raise UsageError for bad `defaults`, and for those given too late to change a setting in force.

    Those that the environment or the file takes precedence over are right.
    """
    from commlib.config.rows import value_text

    given = _read_defaults(defaults)
    changed = {
        variable(name): (getattr(in_force.config, name), value)
        for name, value in given.items()
        if in_force.origins.get(name, "program") == "program"
    }
    if CONFIG_FILE in defaults and CONFIG_FILE not in environment:
        changed[CONFIG_FILE] = in_force.file or NONE, find_file({**environment, **defaults}) or NONE
    for name, (now, new) in changed.items():
        if now != new:
            raise UsageError(
                f"init: commlib is initialised already with {name}={value_text(now)}, but the argument defaults has "
                f"{value_text(new)}: give defaults to the first commlib.init, or call commlib.shutdown before"
            )


def _read_defaults(defaults: Mapping[str, str]) -> dict[str, Any]:
    if unknown := sorted(str(name) for name in defaults if not str(name).startswith("COMMLIB_")):
        raise unknown_settings(unknown, [*(variable(setting.name) for setting in fields(Config)), CONFIG_FILE])
    return read_environment(defaults, "the program's default")


def find_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of settings: the one that COMMLIB_CONFIG names, or the user's if there is one."""
    named = environment.get(CONFIG_FILE, "")
    if named:
        return None if named == NONE else Path(named).absolute()
    path = _users_file(environment)
    return path if path.exists() else None


def _users_file(environment: Mapping[str, str]) -> Path:
    return folders.user_config(environment) / "config.toml"


def read_file(path: Path, *, private: bool = False) -> dict[str, Any]:
    """Read the settings of a file, by field of `Config`. private: refuse a file that another user can change.

    Raises UsageError that names the file and the key.
    """
    import tomllib

    try:
        document = tomllib.loads(_bytes(path, private).decode())
    except folders.NotPrivateError as error:
        raise UsageError(
            f"the file of settings {path} is not used, because another user can change it: {error}. Fix that, or use "
            f"it nevertheless with {CONFIG_FILE}={path}, or use none with {CONFIG_FILE}={NONE}"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot read the file of settings {path} ({error.strerror}): it must exist on every host; "
            f"{CONFIG_FILE}={NONE} reads none"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}; expected lines such as timeout = 300") from None
    known = {setting.name: setting for setting in fields(Config)}
    if unknown := sorted(document.keys() - known.keys()):
        raise unknown_settings(unknown, sorted(known), str(path))
    values = {}
    for key, value in document.items():
        try:
            values[key] = from_value(known[key], value)
        except ValueError as error:
            raise UsageError(f"{path}: {key} = {value!r}: {error}") from None
    return values


def _bytes(path: Path, private: bool) -> bytes:
    if not private:
        return path.read_bytes()
    with folders.open_private(path.parent) as folder:
        return folders.read_private(path.name, folder)
