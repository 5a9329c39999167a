"""Add the repository's own Markdown files to the site, and rewrite links between files of the checkout for the site.

Links are written for the checkout, relative to the file that contains them. A link to a file that is not on the site
becomes the file's path as text; a link to a file that does not exist fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = "docs/pages"
ADDED = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md")
RESULTS = "benchmarks/results"  # pages written by benchmarks/pages.py, and pictures

# Code has no links. The first match in the text counts, so a link's text may be code.
LINK = re.compile(r"^```.*?^```|(!?)\[([^\]\n]*)\]\(([^)\s]+)\)|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's pages outside docs/, under their own paths. Called by mkdocs."""
    from mkdocs.structure.files import File

    results = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / RESULTS).iterdir()))
    for path in (*ADDED, *(name for name in results if name.endswith((".md", ".svg")))):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Rewrite the links of one page. Called by mkdocs."""
    own = page.file.src_uri
    place = own if (ROOT / own).exists() else f"{PAGES}/{own}"
    return rewrite(markdown, place, own, {file.src_uri for file in files})


def rewrite(markdown: str, place: str, own: str, on_site: set[str]) -> str:
    """Return a text with every link rewritten for the site; see `link`."""
    return LINK.sub(lambda match: link(match, place, own, on_site) if match[3] else match[0], markdown)


def link(match: re.Match[str], place: str, own: str, on_site: set[str]) -> str:
    """Return one link rewritten for the site. place: the page's path in the checkout. own: its path on the site.

    Raises ValueError for a link to a file that does not exist.
    """
    mark, text, whole = match.groups()
    target, hash_mark, anchor = whole.partition("#")
    if not target or "://" in target:
        return match[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    if not (ROOT / path).exists():
        raise ValueError(f"{place}: the link to {target} leads to {path}, which does not exist")
    site_path = path.removeprefix(f"{PAGES}/")
    if site_path in on_site:
        relative = posixpath.relpath(site_path, posixpath.dirname(own) or ".")
        return f"{mark}[{text}]({relative}{hash_mark}{anchor})"
    return f"{text} (`{path}`)" if text.strip("`") != path else text
