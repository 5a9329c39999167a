"""The `commlib` command: one verb per file."""

from __future__ import annotations


def main() -> None:
    """Run the command. What it needs beyond the library is the extra 'cli'."""
    try:
        from commlib.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"commlib: the command needs {error.name}: install this project with its extra 'cli'"
        ) from None
    app()
