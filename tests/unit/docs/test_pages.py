"""The documents are correct: generated tables, links, decisions."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from ci import matrix
from commlib.config.settings import Config, variable
from docs import hooks, settings

ROOT = Path(__file__).parents[3]
AT_THE_TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
DECISIONS = sorted((ROOT / "docs/pages/decisions").glob("*.md"))
STATUS = re.compile(r"\*(2\d{3}-\d\d-\d\d), (in force|superseded|tried, and left)([^*]*)\*")
ON_SITE = {"cluster.md", "ARCHITECTURE.md", "decisions/node.md"}


def test_the_table_of_settings_matches_the_code() -> None:
    text = settings.PAGE.read_text()
    assert settings.page(text) == text, "python docs/settings.py writes it anew"
    assert all(f"`{variable(field.name)}`" in text for field in fields(Config))


def test_the_index_has_every_guide() -> None:
    pages = ROOT / "docs/pages"
    text = (pages / "index.md").read_text()
    guides = [path.name for path in pages.glob("*.md") if path.name != "index.md"]
    assert len(guides) > 15 and not [name for name in guides if f"]({name})" not in text]
    lives = (pages / "lives/index.md").read_text()
    assert not [path.name for path in (pages / "lives").glob("*.md") if f"({path.name})" not in lives + "(index.md)"]


def test_the_map_is_short_and_has_every_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 120
    folders = [path.parent.relative_to(ROOT / "commlib") for path in (ROOT / "commlib").glob("*/__init__.py")]
    assert len(folders) > 30 and not [name for name in folders if f"{name}/" not in text]


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no"):
        settings.page("# Settings\n")


@pytest.mark.parametrize("name", AT_THE_TOP)
def test_links_in_top_level_documents_resolve(name: str) -> None:
    for link in hooks.LINK.finditer((ROOT / name).read_text()):
        target = (link[3] or "").partition("#")[0]
        assert "://" in target or (ROOT / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](cluster.md#b)", "[a](../cluster.md#b)"),
        ("[a](../../../ARCHITECTURE.md)", "[a](../ARCHITECTURE.md)"),
        ("[`b`](../decisions/node.md)", "[`b`](../decisions/node.md)"),
        ("[the start](../../../ci/test)", "the start (`ci/test`)"),
        ("[`ci/test`](../../../ci/test)", "`ci/test`"),
        ("[w](https://example.org) [h](#here)", "[w](https://example.org) [h](#here)"),
        ("`[a](none.md)`\n```\n[a](none.md)\n```\n", "`[a](none.md)`\n```\n[a](none.md)\n```\n"),
    ],
)
def test_links_of_the_checkout_become_links_of_the_site(text: str, expected: str) -> None:
    text = text.replace("(cluster", "(../cluster")
    assert hooks.rewrite(text, "docs/pages/api/x.md", "api/x.md", ON_SITE) == expected


def test_a_broken_link_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"docs/pages/api/x.md: the link to none.md leads to docs/pages/api/none.md"):
        hooks.rewrite("[a](none.md)", "docs/pages/api/x.md", "api/x.md", ON_SITE)


def headings(text: str) -> list[tuple[str, str]]:
    """Return each heading of the second level with its text."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_every_decision_has_a_date_and_a_status_that_names_decisions() -> None:
    decisions = [(path.name, title, body) for path in DECISIONS for title, body in headings(path.read_text())]
    assert len(decisions) > 100
    titles = {title for _, title, _ in decisions}
    for name, title, body in decisions:
        status = STATUS.match(body.strip())
        assert status, f"{name}: {title}: expected a date and a status first"
        assert set(re.findall(r'"([^"]+)"', status[3])) <= titles, f"{name}: {title}: no decision of that title"
        assert len(body.strip().splitlines()) > 2, f"{name}: {title}: no reason"


def test_a_warning_fails_the_build_of_documents(tmp_path: Path) -> None:
    """mkdocs counts no warnings under --quiet: two pages missing from the navigation were not noticed."""
    (command,) = (check.command for check in matrix.CHECKS if check.name == "docs")
    (validation,) = re.findall(r"^validation:\n(?: .*\n)+", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/mkdocs.yml").write_text(f"site_name: x\ndocs_dir: pages\ntheme: mkdocs\n{validation}")
    (tmp_path / "docs/pages").mkdir()
    for link, code in (("#here", 0), ("#nowhere", 1)):
        (tmp_path / "docs/pages/index.md").write_text(f"# Here\n\n[a]({link})\n")
        built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert built.returncode == code, built.stderr
        assert ("contains a link '#nowhere'" in built.stderr) == bool(code)
