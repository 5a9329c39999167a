"""Headings name a part by a noun and say what it does: first lines of modules, and headings of documents."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = ("commlib", "adapters", "benchmarks", "examples")
COLUMNS = 120
QUESTION = re.compile(r"(What|Which|Who|Whom|Whose|How|Where|Whether|When|Why|Do|Does|Is|Are)\b")
PREPOSITION = re.compile(
    r"\b(about|after|among|around|as|at|before|behind|beside|between|by|during|for|from|in|into|of|on|over|per|than|that|"
    r"through|to|under|until|which|while|whose|with|within|without)\b(?!-)",
    re.IGNORECASE,
)
ENDS_LIKE_A_PARTICIPLE = re.compile(r"\w+[^e]ed")  # not need, speed, feed, seed
PARTICIPLES = (
    *(
        "asked",
        "begun",
        "broken",
        "built",
        "chosen",
        "done",
        "drawn",
        "found",
        "given",
        "gone",
        "held",
        "kept",
        "known",
    ),
    *("left", "lent", "made", "meant", "read", "said", "sent", "shown", "spent", "standing", "taken", "thrown", "told"),
    *("understood", "written"),
)
ADVERBS = (
    *("again", "alone", "already", "anew", "apart", "aside", "away", "back", "here", "last", "not", "now", "once"),
    *("still", "then", "there", "together", "yet"),
)
END = re.compile(r"[.:]( \[pure\])?$")  # [pure]: the file does no input or output


def sources() -> list[Path]:
    """Return every Python file that users or benchmarks run."""
    return sorted(path for base in BASES for path in (ROOT / base).rglob("*.py"))


def faults(source: str) -> list[str]:
    """Return what is wrong with the heading of a file. A file without a docstring has no heading to be wrong."""
    tree = ast.parse(source)
    text = ast.get_docstring(tree)
    if text is None:
        return []
    first, *rest = text.split("\n")
    line = source.splitlines()[tree.body[0].lineno - 1]
    wrong = []
    if QUESTION.match(first):
        wrong.append(f"begins with the question word {first.split()[0]!r}: begin with the part and what it does")
    if not names_something(first):
        wrong.append(
            f"names nothing: {first.partition(':')[0]!r} has no noun; say what the part is, as in 'Split sizes:'"
        )
    if rest and rest[0]:
        wrong.append("is longer than one line: put the rest behind an empty line")
    if not END.search(first):
        wrong.append("has no full stop or colon at its end")
    if len(line) > COLUMNS:
        wrong.append(f"has {len(line)} columns, expected at most {COLUMNS}")
    return wrong


def names_something(heading: str) -> bool:
    """Return whether the title of a heading, up to its colon, has another word than participles and adverbs.

    Only words before the first preposition count: "Told of others:" names nothing. A heading without a title is a
    sentence.
    """
    title = re.match(r"([^.:]+):", heading)
    if title is None:
        return True
    words = re.findall(r"[\w`'-]+", PREPOSITION.split(title[1])[0].lower())
    return any(word not in PARTICIPLES + ADVERBS and not ENDS_LIKE_A_PARTICIPLE.fullmatch(word) for word in words)


@pytest.mark.parametrize("base", BASES)
def test_headings(base: str) -> None:
    """Many headings were relative clauses, which a reader had to turn round."""
    files = [path for path in sources() if path.is_relative_to(ROOT / base)]
    assert files, f"{base} has no Python files: it has moved"
    wrong = {str(path.relative_to(ROOT)): found for path in files if (found := faults(path.read_text()))}
    assert not wrong


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("What all verbs ask of their arguments.", "question word 'What'"),
        ("Whether reductions run during backward.", "question word 'Whether'"),
        ("Do all ranks make the same call? Asked before data moves.", "question word 'Do'"),
        ("Told: answers to questions.", "'Told' has no noun"),
        ("Nested: walk over nested state.", "'Nested' has no noun"),
        ("Kept by nobody: values without an owner.", "'Kept by nobody' has no noun"),
        ("Beside others: a second pass.", "'Beside others' has no noun"),
        ("Here: defaults.", "'Here' has no noun"),
        ("Pool: lend memory for results,\nand use it again.", "longer than one line"),
        ("Pool: lend memory for results", "no full stop or colon"),
        ("Pool: lend memory for results. [open]", "no full stop or colon"),
        ("Pool: " + "m" * 120 + ".", "columns, expected at most 120"),
    ],
)
def test_a_bad_heading_is_found(heading: str, expected: str) -> None:
    found = faults(f'"""{heading}\n\nMore.\n"""\n')
    assert any(expected in fault for fault in found), found


@pytest.mark.parametrize(
    "source",
    [
        '"""Pool: lend memory for results."""\n',
        '"""Tracker: decide when each bucket is reduced. [pure]\n\nMore.\n"""\n',
        '"""Change one line of this script:\n\n    import commlib_torch as hvd\n"""\n',
        '"""Kept values: values that a model keeps after its call. [pure]"""\n',
        '"""Gradients reduced by name: a coordinator matches them."""\n',
        '"""Speed: ratios of times."""\n',
        '"""Whatever is asked for is made here."""\n',
        "import numpy\n",
    ],
)
def test_a_good_heading_passes(source: str) -> None:
    assert faults(source) == []


# Headings of documents

PAGES = sorted(
    path
    for path in (*(ROOT / "docs/pages").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "examples/README.md",
                 ROOT / "benchmarks/README.md")
    if path.name != "folders.md"  # its headings are names of folders
)  # fmt: skip
NOUNS = ROOT / "tests/inputs/nouns.txt"
"""Nouns of the field, and names of libraries and programs, in addition to the terms of the glossary."""


def glossary() -> set[str]:
    """Return the words of the terms that the glossary of ARCHITECTURE explains."""
    _, _, text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Glossary")
    found = {word for term in re.findall(r"\*\*([^*]+)\*\*", text) for word in re.findall(r"\w+", term.lower())}
    assert len(found) > 30, "the glossary has moved"
    return found


def singular(word: str) -> set[str]:
    """Return what a word may be the plural of, and the word."""
    endings = (("axes", "axis"), ("ies", "y"), ("ices", "ix"), ("es", ""), ("s", ""))
    return {word, *(word.removesuffix(end) + other for end, other in endings if word.endswith(end))}


def without_nouns(text: str) -> list[str]:
    """Return the headings of a document that have no noun of the field. Lines within code, and versions, are none."""
    nouns = glossary() | set(NOUNS.read_text().split())
    titles = re.findall(
        r"^#+ ([^\[].*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return [
        title
        for title in titles
        if not any(singular(word) & nouns for part in re.findall(r"[A-Za-z_]+", title) for word in split_words(part))
    ]


def split_words(word: str) -> list[str]:
    """Return the lower-case words of a name such as CommlibError, and the name itself."""
    return [word.lower(), *(part.lower() for part in re.findall(r"[A-Z][a-z]+", word))]


def test_headings_of_documents_have_a_noun_of_the_field() -> None:
    assert len(PAGES) > 50
    wrong = {str(path.relative_to(ROOT)): found for path in PAGES if (found := without_nouns(path.read_text()))}
    assert not wrong, (
        "name the thing: a noun of ARCHITECTURE's glossary, or of tests/inputs/nouns.txt, if engineers use it"
    )


@pytest.mark.parametrize("title", ["Measured", "Good to know", "How to add", "When something goes wrong", "Told"])
def test_a_heading_without_a_noun_is_found(title: str) -> None:
    assert without_nouns(f"# Buckets\n\n## {title}\n\n```\n# nothing\n```\n") == [title]


@pytest.mark.parametrize(
    "title", ["Ranks of an axis", "With other axes", "CommlibError is raised", "Copies", "PyTorch"]
)
def test_a_heading_with_a_noun_passes(title: str) -> None:
    assert without_nouns(f"## {title}\n") == []
