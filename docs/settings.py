"""Write the table of docs/pages/settings.md from the fields of `commlib.config.settings.Config`.

python docs/settings.py            # after a change of commlib/config/settings.py; a unit test compares the two
"""

from __future__ import annotations

from pathlib import Path

from commlib.config.rows import SettingRow, rows

PAGE = Path(__file__).parent / "pages" / "settings.md"
BEGIN, END = "<!-- begin: written by docs/settings.py -->", "<!-- end -->"


def table() -> str:
    """Return every setting as a row of a Markdown table."""
    lines = ["| variable | default | values | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *(line(row) for row in rows())])


def line(row: SettingRow) -> str:
    """Return the Markdown of one setting."""
    default = f"`{row.default}`" if row.default else "empty"
    differs = f" (*{row.differs}*)" if row.differs else ""
    meaning = row.meaning.replace("|", "\\|")
    return f"| `{row.variable}` | {default} | {row.values} | {meaning}{differs} |"


def page(text: str) -> str:
    """Return the text of the page with the current table."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE}")
