"""Docstrings of public names: an imperative line, each parameter, each error, and an example."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from commlib.communicator import Communicator

ROOT = Path(__file__).parents[3]
MODULES = {
    "commlib": [
        *("commlib", "commlib.metrics", "commlib.communicator.Communicator", "commlib.mesh_groups.Mesh"),
        *("commlib.runtime.work.Work", "commlib.p2p.channels.channel.Channel", "commlib.preemption.Preemption"),
    ],
    "torch": ["commlib_torch", "commlib_torch.horovod", "commlib_torch.tensor", "commlib_torch.tensor.context"],
    "tensorflow": [
        *("commlib_tensorflow", "commlib_tensorflow.horovod", "commlib_tensorflow.keras", "commlib_tensorflow.tensor"),
        "commlib_tensorflow.tensor.context",
    ],
}

TWIN = re.compile(r"(Start|Prepare) (an )?`\w+`|An? `\w+`\.|(.|\n)*\bArguments (and results )?are those of `")
"""A docstring of this form means: the arguments and errors of that function or class."""

MADE_BY_COMMLIB = re.compile(
    r"(.*\.)?(Communicator|Count|Event|Phase|Plan|Stats|Work|Pipeline|ReduceOp|Server|Reports)"
)
"""Classes that users do not construct: their constructors have no entries."""

INTERNAL = re.compile(
    r".*\.Communicator\.(watch|parts|private|plan_program|labelled)|.*\.Mesh\.communicator|.*\.Work\.(ended|finish)|"
    r".*\.Channel\.(send_later|has_room|await_room|flush|connect|give_up)"
)
"""Methods for commlib itself, which the pages leave out."""

NO_EXAMPLE = {
    "takes no arguments": lambda name, entry: not entry["parameters"],
    "an exception": lambda name, entry: name.endswith(("Error", "Interrupt")),
    "made by commlib": lambda name, entry: MADE_BY_COMMLIB.fullmatch(name),
    "its twin has one": lambda name, entry: TWIN.match(entry["doc"]),
    "the communicator's verb has one": lambda name, entry: (
        ">>> " in (inspect.getdoc(getattr(Communicator, name.rpartition(".")[2].rstrip("_"), None)) or "")
    ),
    "a layer that `parallelize` makes": lambda name, entry: re.search(
        r"\.tensor\.\w*(Column|Row|Vocabulary|Sequence)\w+$", name
    ),
}
"""Reasons for no example, with the test for each."""


def code() -> str:
    """Return all code of guides and examples, which other tests run."""
    pages = [ROOT / "README.md", *(ROOT / "docs/pages").glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.M | re.S)]
    return "\n".join(blocks + [path.read_text() for path in (ROOT / "examples").rglob("*.py")])


CODE = code()


def described(doc: str) -> set[str]:
    """Return the parameters that have an entry under Args."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    return set(re.findall(r"^    \*{0,2}(\w+): \S", section[1], re.MULTILINE)) if section else set()


def faults(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return what a docstring lacks."""
    doc = entry["doc"]
    if not doc:
        return ["docstring"]
    first, lacks = doc.split("\n")[0], []
    word = first.split()[0]
    if entry["kind"] == "function" and (word in ("The", "A", "An", "This", "Like") or re.fullmatch(r"\w+[^sy]s", word)):
        lacks.append("imperative")
    if not TWIN.match(doc) and not MADE_BY_COMMLIB.fullmatch(name):
        lacks += [f"args {each}" for each in entry["parameters"] if each not in described(doc)]
        lacks += [f"no parameter {each}" for each in sorted(described(doc) - set(entry["parameters"]))]
        if re.search(r"\b[Rr]aises? \w*Error", doc) and not re.search(r"^Raises:$", doc, re.MULTILINE):
            lacks.append("raises")
    has_example = ">>> " in doc or re.search(
        r"^    .*[=(]", re.sub(r"^(Args|Raises):\n(    .*\n?|\n)*", "", doc, flags=re.M), re.M
    )
    called = re.search(rf"\b{re.escape(name.rpartition('.')[2])}\(", CODE)
    if not has_example and not called and not any(test(name, entry) for test in NO_EXAMPLE.values()):
        lacks.append("example")
    return lacks


def entries(modules: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.inputs.public_docs", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    docs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: entry for name, entry in docs.items() if not INTERNAL.fullmatch(name)}


@pytest.mark.parametrize("framework", MODULES)
def test_public_names_are_documented(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    docs = entries(MODULES[framework])
    assert len(docs) > 50
    lacking = {name: ", ".join(lacks) for name, entry in docs.items() if (lacks := faults(name, entry))}
    assert not lacking


@pytest.mark.parametrize(
    ("doc", "parameters", "expected"),
    [
        ("The sum of x.", [], ["imperative"]),
        ("Returns the sum.", [], ["imperative"]),
        ("Add up `x`.", ["x"], ["args x", "example"]),
        (
            "Add up `x`. Raises UsageError for text.\n\nArgs:\n    x: An array.\n\nExamples:\n    >>> f(1)\n",
            ["x"],
            ["raises"],
        ),
        ("Add up `x`.\n\nArgs:\n    x: An array.\n\nRaises:\n    UsageError: For text.\n", ["x"], ["example"]),
        ("Add up `x`.\n\n    f(1)\n\nArgs:\n    x: An array.\n    y: Gone.\n", ["x"], ["no parameter y"]),
        ("Start `total`.", ["x"], []),
        ("Add up `x`.\n\n    total = f(x)\n\nArgs:\n    x: An array.\n", ["x"], []),
        ("", [], ["docstring"]),
    ],
)
def test_missing_parts_are_reported(doc: str, parameters: list[str], expected: list[str]) -> None:
    entry = {"doc": doc, "parameters": parameters, "kind": "function"}
    assert faults("commlib.never_called_anywhere", entry) == expected
