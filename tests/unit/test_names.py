"""Names of classes and modules are nouns of the field: no bare participle, preposition or adverb, and no name twice."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = ("commlib", "adapters")


def some(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


PARTICIPLES = some(
    """
    begun bought broken brought built caught chosen done drawn driven fallen felt found frozen given gone grown
    heard held hidden kept known laid led left lent lost made meant met paid put read said seen sent shown spent
    spoken stood taken taught thought thrown told torn understood woken won worn written
    """
)
PREPOSITIONS = some(
    """
    about above across after against along among around at before behind below beneath beside besides between
    beyond by down during for from in inside into of off on onto out over past per since than through till to
    toward towards under until up upon via with within without
    """
)
ADVERBS = some(
    """
    again ahead alike alone already also always anew apart aside away back either else elsewhere ever first here
    later likewise meanwhile never now once same then there thereafter together too twice
    """
)
# Nouns that end as participles do.
NOUNS = some(
    """
    batching binding bitmask bring casting clipping counting dispatching dropping embed embedding encoding
    exporting feed finding flattening folding freezing functionalization fusing gathering guarding heading
    initializing launching layout listing loading mapping marking masking meaning measuring moving naming need
    nesting observing opening optimizing packing padding pairing placing planning polling processing profiling
    reading recording rendering reporting ring rounding routing scaling scheduling seed serving setting sharding
    signalling span speed staging stopping streaming string timing tracing training tuning waiting warming
    watching wiring wording wrapping
    """
)
ALLOWED = {
    "InFlight": "MPI's and CUDA's term for an operation that was started and has not completed",
    "in_flight": "the same",
    "PerRank": "a style in users' plans",
    "breadth_first": "a schedule's name in the literature",
    "interleaved": "the same",
}
SAME_NAME: dict[str, str] = {}


def words(name: str) -> list[str]:
    """Split a name of a class or a module into its words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)]


def is_participle(word: str) -> bool:
    """Return whether a word is a participle and no noun."""
    return word in PARTICIPLES or (word.endswith(("ed", "ing")) and word not in NOUNS)


def fault(name: str) -> str | None:
    """Return what is wrong with the name of a class or a module, or None."""
    parts = words(name)
    if not parts or name.strip("_") in ALLOWED:
        return None
    if len(parts) == 1 and is_participle(parts[0]):
        return "is a bare participle"
    if parts[0] in PREPOSITIONS:
        return f"begins with the preposition {parts[0]!r}"
    if parts[-1] in ADVERBS:
        return f"ends with the adverb {parts[-1]!r}"
    return None


def names() -> Iterator[tuple[str, str]]:
    """Yield each module and class with its place."""
    for base in BASES:
        for path in sorted((ROOT / base).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            yield (path.parent.name if path.name == "__init__.py" else path.stem), place
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield node.name, f"{place}:{node.lineno}"


def test_names_are_nouns() -> None:
    found = [f"{place}: {name} {wrong}" for name, place in names() if name != "__main__" and (wrong := fault(name))]
    assert not found, "\n".join(found)


def test_one_name_is_one_class() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in names():
        if ":" in place and place.startswith("commlib/"):
            places[name].append(place)
    found = [
        f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1 and name not in SAME_NAME
    ]
    assert not found, "\n".join(found)


def test_each_exception_is_needed() -> None:
    every: dict[str, int] = defaultdict(int)
    for name, place in names():
        every[name] += ":" in place and place.startswith("commlib/")
    assert all(any(name.strip("_") == one for name in every) for one in ALLOWED)
    assert all(every[name] > 1 for name in SAME_NAME)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Told", "participle"),
        ("_Kept", "participle"),
        ("Staged", "participle"),
        ("Beside", "preposition"),
        ("ByPlace", "preposition 'by'"),
        ("_on_parts", "preposition 'on'"),
        ("Alone", "adverb"),
        ("_aside", "adverb"),
        ("SetAside", "adverb 'aside'"),
    ],
)
def test_a_bad_name_is_found(name: str, expected: str) -> None:
    assert expected in (fault(name) or "")


@pytest.mark.parametrize(
    "name", ["Routing", "SharedMemory", "OneBitAdam", "RowLinear", "NCCL", "all_reduce", "KeepAlive", "Seed"]
)
def test_a_good_name_passes(name: str) -> None:
    assert fault(name) is None
