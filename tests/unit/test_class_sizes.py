"""No class has more than 300 lines or 20 attributes without a reason, read off the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_ATTRIBUTES = 300, 20

EXCEPTIONS = {
    # Records: their fields are what a user writes or reads, one by one.
    "commlib/bench/options:BenchOptions": "a record: the options of the command",
    "commlib/bench/options:BenchSettings": "a record: the settings of a benchmark",
    "commlib/config/settings:Config": "a record: the settings of a job",
    "commlib/expert/experts:Experts": "a record: the arguments of a mixture of experts",
    "commlib/slurm/job:Job": "a record: the options of a batch job",
    "commlib/communicator:Communicator": "the verbs: each is documented where users look for it, and calls its module",
    "commlib/coordinator/coordinator:Coordinator": "being cut",
    "commlib/pipeline/runner:Runner": "being cut",
    "commlib/tensor_verbs/ordered_verbs:OrderedVerbs": "being cut",
    "commlib_tensorflow/pipelines/_steps:StepRunner": "being cut",
    "commlib_tensorflow/pipelines/pipeline:Pipeline": "being cut",
    "commlib_tensorflow/tensor/tracing:TraceRecorder": "being cut",
    "commlib_torch/pipelines/_losses:LossWeights": "being cut",
    "commlib_torch/tensor/tracing:TraceRecorder": "being cut",
}


def sources() -> list[Path]:
    return sorted(path for base in ("commlib", "adapters") for path in (ROOT / base).rglob("*.py"))


def classes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield all classes with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node
        inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef | ast.FunctionDef) else prefix
        yield from classes(node, inner)


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that the class assigns to `self`, and its annotated fields."""
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    stored = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and is_self(item.value)
    }
    return fields | stored


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def sizes() -> dict[str, tuple[int, int]]:
    """Return (lines, attributes) of each class, by `path:Class`."""
    found = {}
    for path in sources():
        module = str(path.relative_to(ROOT).with_suffix("")).removeprefix("adapters/")
        for name, node in classes(ast.parse(path.read_text())):
            assert node.end_lineno is not None
            found[f"{module}:{name}"] = node.end_lineno - node.lineno + 1, len(attributes(node))
    return found


def is_large(lines: int, count: int) -> bool:
    return lines > MOST_LINES or count > MOST_ATTRIBUTES


def test_classes_are_small():
    large = {name: size for name, size in sizes().items() if is_large(*size)}
    wrong = [
        f"{name} has {lines} lines and {count} attributes: divide it, or give a reason in EXCEPTIONS"
        for name, (lines, count) in large.items()
        if name not in EXCEPTIONS
    ]
    stale = [f"{name} is small, or gone: remove it from EXCEPTIONS" for name in EXCEPTIONS if name not in large]
    assert not wrong + stale, "\n".join(wrong + stale)


@pytest.mark.parametrize(
    "body, count",
    [
        ("def f(self):\n        self.a = self.b, self.c = 1, 2", 3),
        ("def f(self):\n        self.a += self.b\n        self.a.c = 1", 1),
        ("def f(self):\n        with x as self.a:\n            self.b: int = 1", 2),
        ("a: int\n    b: int = 1\n    c = 2", 2),
        ("def f(self, other):\n        other.a = 1", 0),
    ],
)
def test_attributes_are_counted(body, count):
    (statement,) = ast.parse(f"class A:\n    {body}").body
    assert isinstance(statement, ast.ClassDef) and len(attributes(statement)) == count


def test_inner_classes_are_found():
    tree = ast.parse("def f():\n    if x:\n        class A:\n            class B: pass")
    assert [name for name, _ in classes(tree)] == ["f.A", "f.A.B"]
