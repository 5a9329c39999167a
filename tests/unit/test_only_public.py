"""Tests use public names only: private names may change without notice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ADAPTERS = ("torch_adapter", "tensorflow_adapter")
# Further names that tests may use: modules of an adapter, whose public names they test, and private names of frameworks
# for counts of writes to a tensor, and of steps; for a fake tensor; for a legacy loss scale.
OF_ADAPTERS = re.compile(
    r"(commlib_torch|commlib_tensorflow|ct)(\.keras|\.pipelines)?\._[a-z]\w*(\.[A-Za-z]\w*)?"
    r"|\w+\._(version|iterations|loss_scale)|torch\._subclasses\.fake_tensor\.FakeTensorMode"
)

ALLOWED = {
    "os._exit": "Python's own: how a rank dies without a word",
    "torch._dynamo": "PyTorch's own: where compiled autograd is switched on",
    "sys._current_frames": "Python's own: where a thread is that does not end",
}

PRIVATE = re.compile(r"_[a-zA-Z]\w*")
IN_TEXT = re.compile(r"(\w+|[)\]])\.(_[a-zA-Z]\w*)")  # of a program that a test starts, or a name to be patched
BY_NAME = ("getattr", "setattr", "delattr", "hasattr")
OWN = ("self", "cls")


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each private name that a file of tests uses and does not own."""
    tree = ast.parse(source)
    own = set(made_here(tree))
    for node in ast.walk(tree):
        for name in used_by(node, own):
            if name not in ALLOWED:
                yield getattr(node, "lineno", 0), name


def made_here(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file's own classes define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inner.name
                elif isinstance(inner, ast.Assign | ast.AnnAssign):
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    yield from (target.id for target in targets if isinstance(target, ast.Name))


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in OWN


def used_by(node: ast.AST, own: set[str]) -> Iterator[str]:
    match node:
        case ast.Attribute(value, attr) if PRIVATE.fullmatch(attr) and not (is_own(value) and attr in own):
            yield ast.unparse(node)
        case ast.Import(names):
            yield from (alias.name for alias in names if any(map(PRIVATE.fullmatch, alias.name.split("."))))
        case ast.ImportFrom(module, names) if module != "__future__":
            whole = [f"{module or ''}.{alias.name}" for alias in names]
            yield from (name for name in whole if any(map(PRIVATE.fullmatch, name.split("."))))
        case ast.Call(func, args, keywords) if ast.unparse(func).rpartition(".")[2] in BY_NAME:
            values = [*args, *(keyword.value for keyword in keywords)]
            named = [value.value for value in values if isinstance(value, ast.Constant)]
            yield from (name for name in named if isinstance(name, str) and PRIVATE.fullmatch(name))
        case ast.Constant(str(text)):
            yield from (".".join(names_) for names_ in IN_TEXT.findall(text) if names_[0] not in OWN)


FILES = sorted(TESTS.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_only_public_names_are_used(path: Path) -> None:
    if path == Path(__file__):
        return  # its examples below are refused names
    allowed = OF_ADAPTERS.fullmatch if set(path.parts) & set(ADAPTERS) else lambda what: None
    used = [(line, what) for line, what in uses(path.read_text("utf-8")) if not allowed(what)]
    names_ = [f"{path.relative_to(TESTS.parent)}:{line}: {what}" for line, what in used]
    assert not names_, (
        "private names in tests (look at an effect, an event or a statistic; pass in what you stand in for; or "
        "make the name public, with a docstring):\n" + "\n".join(names_)
    )


@pytest.mark.parametrize("what", ["optimizer._gradients", "commlib_torch._memory._freed", "pool._blocks", "ct._a.b._c"])
def test_attributes_of_an_adapter_are_refused(what: str) -> None:
    assert not OF_ADAPTERS.fullmatch(what)


@pytest.mark.parametrize(
    "source, names",
    [
        ("comm._post.out", ["comm._post"]),
        ("comm._post._out", ["comm._post._out", "comm._post"]),
        ("from commlib.cost.model import _messages, best", ["commlib.cost.model._messages"]),
        ("import commlib._inside", ["commlib._inside"]),
        ("from commlib import _inside", ["commlib._inside"]),
        ('monkeypatch.setattr(turns, "_POLL", 1)', ["_POLL"]),
        ('monkeypatch.setattr("commlib.cost.chooser._FABRICS", ())', ["chooser._FABRICS"]),
        ('getattr(comm, "_post")', ["_post"]),
        ('PROGRAM = """\nx = hvd.coordinator("t")._execution\n"""', [")._execution"]),
        ('f"{head}\\ncomm._post = {value}"', ["comm._post"]),
        ("class Mine(Group):\n    def now(self):\n        return self._sequence", ["self._sequence"]),
        ("class Mine:\n    def __init__(self):\n        self._x = 1\n\n    def now(self):\n        return self._x", []),
        ("class Mine:\n    def _now(self):\n        pass\n\n    def now(self):\n        self._now()", []),
        ("os._exit(3), sys._current_frames(), comm.__class__.__name__, f'{verb}_async', '_columns'", []),
        ('PROGRAM = "\\nos._exit(4)\\n"', []),
    ],
)
def test_private_names_are_found(source: str, names: list[str]) -> None:
    assert [name for _, name in uses(source)] == names
