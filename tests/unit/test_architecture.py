"""Imports follow DESIGN's rules, read off the syntax trees (nothing is imported, so lazy imports count too)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Standard library, each other and commlib.errors only; no clock, no thread, no other process.
PURE = (
    "commlib.schedule",
    "commlib.mesh",
    "commlib.autodiff.rules",
    "commlib.topology",
    "commlib.literals",
    "commlib.coordinator.op_request",
    "commlib.coordinator.response_cache",
    "commlib.coordinator.negotiation",
    "commlib.data_parallel.buckets",
    "commlib.data_parallel.tracker",
    "commlib.pipeline.schedule",
    "commlib.sharding.sharding",
    "commlib.tensor_parallel.rules",
    "commlib.tensor_parallel.auto_plan",
    "commlib.tensor_parallel.einsum",
    "commlib.tensor_parallel.equations",
    "commlib.tensor_parallel.features",
    "commlib.tensor_parallel.heads",
    "commlib.tensor_parallel.layout_map",
    "commlib.tensor_parallel.lengths",
    "commlib.tensor_parallel.low_rank_adapters",
    "commlib.tensor_parallel.moves",
    "commlib.tensor_parallel.numbers",
    "commlib.tensor_parallel.pairs",
    "commlib.tensor_parallel.plan",
    "commlib.tensor_parallel.recording",
    "commlib.tensor_parallel.placements",
    "commlib.tensor_parallel.streams",
    "commlib.tensor_parallel.styles",
    "commlib.tensor_parallel.table",
    "commlib.tensor_parallel.trace",
    "commlib.tensor_parallel.vocabulary",
    "commlib.context_parallel.dropout",
    "commlib.context_parallel.heads",
    "commlib.context_parallel.layout",
    "commlib.context_parallel.mask",
    "commlib.context_parallel.ring_steps",
    "commlib.context_parallel.window",
    "commlib.cost.rounds",
    "commlib.cost.segment_times",
    "commlib.cost.model",
    "commlib.cost.flat",
    "commlib.cost.hierarchical",
    "commlib.cost.exchanges",
    "commlib.cost.gpus",
    "commlib.expert.placement",
    "commlib.expert.planner",
    "commlib.expert.experts",
    "commlib.tune.fit",
    "commlib.slurm.job",
    "commlib.slurm.script",
    "commlib.slurm.states",
    "commlib.cost.records",
    "commlib.arguments",
    "commlib.folders",  # checks folders, reads and writes files, and is otherwise pure
    "commlib.cost.table",  # likewise
    "commlib.cost.chooser",
    "commlib.cost",
)
IMPURE_STANDARD_LIBRARY = {
    "_thread", "asyncio", "concurrent", "datetime", "multiprocessing", "socket", "subprocess", "threading", "time",
}  # fmt: skip

# A module may import its own row and those above it, for type checkers too. The longest name that fits decides.
LAYERS = (
    ("commlib.errors", "commlib.config", "commlib.folders", "commlib.process.forks",
     "commlib.launch.launchers", "commlib.launch.library_name", "commlib.node.signature", "commlib.protocols",
     "commlib.dtypes", "commlib.literals", "commlib.topology", "commlib.arguments"),
    ("commlib.snapshot",),
    ("commlib.mesh",),
    ("commlib.schedule",),
    ("commlib.cost",),
    ("commlib.observe",),
    ("commlib.launch",),
    ("commlib.process",),
    ("commlib.buffers",),
    ("commlib.kernels",),
    ("commlib.devices",),
    ("commlib.compress.checks", "commlib.compress.codec", "commlib.compress.codecs"),
    ("commlib.compress.scheme", "commlib.compress.memory", "commlib.compress.flags", "commlib.compress.feedback",
     "commlib.compress.gaps"),
    ("commlib.compress.schemes",),
    ("commlib.compress.auto", "commlib.compress.registry"),
    ("commlib.transport",),
    ("commlib.execution",),
    ("commlib.runtime",),
    ("commlib.node",),
    ("commlib.group",),
    ("commlib.collectives.verbs", "commlib.collectives.host", "commlib.collectives.device", "commlib.collectives"),
    ("commlib.p2p.lanes", "commlib.p2p.device", "commlib.p2p.channels", "commlib.p2p"),
    ("commlib.subgroups",),
    ("commlib.communicator",),
    ("commlib.bootstrap",),
    ("commlib.world", "commlib.metrics", "commlib.observing", "commlib.cuda_aware_mpi", "commlib.ranks",
     "commlib.mesh_groups", "commlib.preemption", "commlib.checkpoint"),
    ("commlib",),  # the public names
    ("commlib.compress",),
    ("commlib.comparison",),
    ("commlib.sharding",),
    ("commlib.data_parallel",),
    ("commlib.optim",),
    ("commlib.coordinator",),
    ("commlib.autodiff",),
    ("commlib.tensor_parallel.rules", "commlib.tensor_parallel"),
    ("commlib.context_parallel",),
    ("commlib.tensor_parallel.run",),
    ("commlib.tensor_parallel.checks",),
    ("commlib.pipeline",),
    ("commlib.expert",),
    ("commlib.horovod",),
    ("commlib.named_gradients",),
    ("commlib.tensor_verbs",),
    ("commlib.tune",),
    ("commlib.slurm",),
    ("commlib.trace",),
    ("commlib.console",),
    ("commlib.diagnosis",),
    ("commlib.bench",),
    ("commlib.cli", "commlib.__main__"),
    ("commlib_torch", "commlib_tensorflow"),
)  # fmt: skip

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "commlib_torch", "commlib_tensorflow"}
FRAMEWORKS_OF = {
    "commlib_torch": {"torch", "commlib_torch"},
    "commlib_tensorflow": FRAMEWORKS - {"torch", "commlib_torch"},
}
MEASURED = {
    "commlib.bench.gloo_peer": "torch",
    "commlib.bench.nccl_peer": "torch",
}  # what commlib is measured against; imported inside functions only
# Modules that may name the host's compiled kernels; all others get kernels from the device of their arrays.
HOST_KERNELS_ALLOWED = (
    "commlib.kernels",
    "commlib.devices.host",
    "commlib.node",  # shared memory of the host, and the flags in it
    "commlib.buffers.symmetric_memory",  # those kernels look up its places
    "commlib.group.local_node",  # their return values
    # calls of compiled functions, written down
    "commlib.execution.reduce_function", "commlib.execution.persistent_programs",
    "commlib.execution.rounds",
    "commlib.p2p.channels.inbox", "commlib.p2p.channels.outbox", "commlib.p2p.channels.node_end",
    "commlib.p2p.channels.halt_flag",
    "commlib.p2p.channels.posted_end", "commlib.p2p.channels.posted_sends", "commlib.p2p.channels.posted_receives",
    "commlib.p2p.lanes",  # memory of the host that two ranks share
    "commlib.data_parallel.bucket_reducer",  # copies past the caches
    "commlib.optim",  # on the host only as yet: 1-bit optimizers
    "commlib.expert",  # likewise: rows of tokens, in memory that ranks share
    "commlib.coordinator",  # named operations, where arrays of devices come as copies
    "commlib_torch", "commlib_tensorflow",
)  # fmt: skip
# Modules for arrays of any device: they allocate memory through the device, or from an existing array.
DEVICE_NEUTRAL = (
    "commlib.compress.codecs.cast", "commlib.compress.codecs.quantise", "commlib.compress.codecs.sign",
    "commlib.compress.schemes.all_to_all", "commlib.compress.schemes.all_gather", "commlib.compress.schemes.dgc",
    "commlib.compress.schemes.low_rank", "commlib.compress.schemes.power_sgd", "commlib.compress.checks",
    "commlib.compress.activations", "commlib.compress.auto",
    "commlib.data_parallel.compressed_reduction", "commlib.data_parallel.buckets", "commlib.data_parallel.tracker",
    "commlib.execution.streaming",
    "commlib.collectives.verbs.all_reduce", "commlib.collectives.verbs.reduce", "commlib.collectives.verbs.broadcast",
    "commlib.collectives.verbs.gather", "commlib.collectives.verbs.reduce_scatter", "commlib.collectives.verbs.program",
    "commlib.collectives.host.message_call", "commlib.collectives.host.schedule_path",
    "commlib.collectives.host.native", "commlib.collectives.device.host_staging",
    "commlib.collectives.device.staged_path",
    "commlib.collectives.device.staging_queue", "commlib.collectives.device.call",
    "commlib.p2p.lanes.staging",
)  # fmt: skip
NUMPY_MEMORY = {
    "ascontiguousarray", "concatenate", "empty", "empty_like", "frombuffer", "full", "full_like", "ones", "ones_like",
    "stack", "zeros", "zeros_like",
}  # fmt: skip
CUPY_ALLOWED = ("commlib.devices.cuda",)  # and there inside functions only


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the module, its line, and its kind."""

    importer: str
    target: str
    where: str  # file:line
    lazy: bool  # inside a function
    for_types: bool  # under TYPE_CHECKING


def find_modules(root: Path) -> dict[str, Path]:
    """Name every module of the core and the adapters."""
    modules = {}
    for base, package in ((root, "commlib"), (root / "adapters", "commlib_*")):
        for path in sorted(base.glob(f"{package}/**/*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(root: Path) -> Iterator[Import]:
    modules = find_modules(root)
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, lazy, for_types in statements(path.read_text()):
            for target in targets(node, package, modules):
                yield Import(name, target, f"{path.relative_to(root)}:{node.lineno}", lazy, for_types)


@cache  # used for breaches and for circles
def statements(text: str) -> tuple[tuple[ast.stmt, bool, bool], ...]:
    return tuple(walk(ast.parse(text)))


def walk(node: ast.AST, lazy: bool = False, for_types: bool = False) -> Iterator[tuple[ast.stmt, bool, bool]]:
    """Yield the import statements below a node, and whether they are inside a function or for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy, for_types
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from walk(child, lazy, True)
        else:
            yield from walk(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef), for_types)


def targets(node: ast.stmt, package: str, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the absolute names of the modules that an import statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *filter(None, [base])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if submodule in modules else base


def is_in(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


@cache
def layer(module: str) -> int | None:
    """Return the row of LAYERS with the longest fitting name."""
    fits = [(len(name), row) for row, names in enumerate(LAYERS) for name in names if is_in(module, (name,))]
    length, row = max(fits, default=(0, None))
    is_unplaced = length == len("commlib") and module != "commlib"
    return None if is_unplaced else row


def breaches(root: Path) -> list[str]:
    """Return the breaches of the rules, each as `file:line: breach`."""
    faults = [f"{path.relative_to(root)}:1: {name} has no row in LAYERS" for name, path in find_modules(root).items()
             if layer(name) is None]  # fmt: skip
    for item in find_imports(root):
        if problem := breach(item):
            faults.append(f"{item.where}: {item.importer} imports {item.target}: {problem}")
    for folder in ("commlib", "adapters", "tests", "examples", "benchmarks"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_dir() and path.name in ("torch", "tensorflow"):
                faults.append(f"{path.relative_to(root)}: a folder of this name shadows the framework")
    return faults


def breach(item: Import) -> str | None:
    importer, target = item.importer, item.target
    top, from_top = target.partition(".")[0], importer.partition(".")[0]
    if top in FRAMEWORKS - FRAMEWORKS_OF.get(from_top, set()) and not (item.lazy and MEASURED.get(importer) == top):
        return "the core knows no framework" if from_top == "commlib" else "an adapter knows only its own framework"
    if top == "cupy" and from_top == "commlib" and not (item.lazy and is_in(importer, CUPY_ALLOWED)):
        return f"cupy is imported only inside functions of {', '.join(CUPY_ALLOWED)}"
    if is_in(importer, PURE) and not is_in(target, (*PURE, "commlib.errors")):
        if top not in sys.stdlib_module_names:
            return "a pure module imports the standard library, pure modules and commlib.errors only"
        if top in IMPURE_STANDARD_LIBRARY:
            return "a pure module has no clock, thread or other process"
    if is_in(target, ("commlib.kernels.host",)) and not is_in(importer, HOST_KERNELS_ALLOWED):
        return "kernels are asked of a device"
    mine, theirs = layer(importer), layer(target)
    if mine is not None and theirs is not None and theirs > mine:
        return "imports point the other way"
    return None


def circles(root: Path) -> list[str]:
    """Return the circular imports, each with its path: `file:line: a imports b imports a`."""
    modules = find_modules(root)
    imports: dict[str, dict[str, str]] = {name: {} for name in modules}
    for item in find_imports(root):
        if item.target in modules and item.target != item.importer:
            imports[item.importer].setdefault(item.target, item.where)
    faults = []
    for name in imports:
        way, reached = [[name]], {name}
        while way:
            path = way.pop(0)
            for target in imports[path[-1]]:
                if target == name and name == min(path):  # reported once, from its first module
                    faults.append(f"{imports[path[0]][path[1]]}: {' imports '.join([*path, name])}")
                elif target not in reached:
                    reached.add(target)
                    way.append([*path, target])
    return faults


def host_memory(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield where a device-neutral module makes or addresses memory of the host: (line, what); not of length 0."""
    for node in ast.walk(tree) if is_in(module, DEVICE_NEUTRAL) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NUMPY_MEMORY:
            of_nothing = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "numpy") and not of_nothing:
                yield node.lineno, f"np.{node.func.attr}"
        elif isinstance(node, ast.Name) and node.id == "address_of":
            yield node.lineno, "address_of"
        elif isinstance(node, ast.Attribute) and node.attr == "ctypes":
            yield node.lineno, "ctypes"


def test_device_neutral_modules_name_no_host_memory() -> None:
    modules = find_modules(ROOT)
    assert set(DEVICE_NEUTRAL) <= modules.keys()
    faults = [
        f"{modules[name].relative_to(ROOT)}:{line}: {what}: ask its device, see `commlib.devices.arrays`"
        for name in DEVICE_NEUTRAL
        for line, what in host_memory(name, ast.parse(modules[name].read_text()))
    ]
    assert not faults, "\n".join(faults)


def test_host_memory_is_found() -> None:
    text = "import numpy as np\nx = np.empty(0)\ny = np.zeros(3)\nz = address_of(y) + y.ctypes.data\nlist(np.sum(y))\n"
    faults = sorted(host_memory("commlib.compress.schemes.all_to_all", ast.parse(text)))
    assert faults == [(3, "np.zeros"), (4, "address_of"), (4, "ctypes")]
    assert not list(host_memory("commlib.compress.codecs.sparse", ast.parse(text)))


def test_imports_follow_the_rules() -> None:
    assert len(find_modules(ROOT)) > 5
    faults = breaches(ROOT) + circles(ROOT)
    assert not faults, "\n".join(faults)


def test_a_circle_is_found(tmp_path: Path) -> None:
    files = {
        "commlib/__init__.py": "",
        "commlib/node/__init__.py": "",
        "commlib/node/a.py": "import os\nfrom commlib.node import b\n",
        "commlib/node/b.py": "def f():\n    from commlib.node.c import C\n",
        "commlib/node/c.py": "if TYPE_CHECKING:\n    from commlib.node.a import A\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert breaches(tmp_path) == []
    way = "commlib.node.a imports commlib.node.b imports commlib.node.c imports commlib.node.a"
    assert circles(tmp_path) == [f"commlib/node/a.py:2: {way}"]
    (tmp_path / "commlib/node/c.py").write_text("")
    assert circles(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (
            "commlib/schedule/ring.py",
            "import os\nimport numpy as np\n",
            ":2: commlib.schedule.ring imports numpy: a pure",
        ),
        ("commlib/schedule/ring.py", "from time import sleep\n", ":1: commlib.schedule.ring imports time: a pure"),
        ("commlib/schedule/ring.py", "from ..kernels import host\n", "imports commlib.kernels.host: a pure"),
        (
            "commlib/kernels/host.py",
            "def f():\n    from commlib import transport\n",
            ":2: commlib.kernels.host imports",
        ),
        ("commlib/transport/mpi.py", "from commlib.communicator import X\n", "imports point the other way"),
        ("commlib/transport/mpi.py", "if TYPE_CHECKING:\n    from commlib.group import X\n", "point the other way"),
        ("commlib/group/group.py", "from commlib.collectives import X\n", "imports point the other way"),
        ("commlib/node/board.py", "def f():\n    from commlib.group import X\n", "imports point the other way"),
        ("commlib/cost/model.py", "import threading\n", "a pure module has no clock, thread or other process"),
        ("commlib/communicator.py", "from commlib import Work\n", "imports commlib: imports point the other way"),
        ("commlib/communicator.py", "def f():\n    import torch.nn\n", ":2: commlib.communicator imports torch.nn"),
        ("commlib/bench/gloo_peer.py", "import torch\n", "the core knows no framework"),
        ("commlib/bench/mpi_peer.py", "def f():\n    import torch\n", "the core knows no framework"),
        ("commlib/buffers/view.py", "import cupy\n", "cupy is imported only inside functions"),
        ("commlib/runtime/work.py", "def f():\n    import cupy\n", "cupy is imported only inside functions"),
        ("adapters/commlib_torch/a.py", "import keras\n", "an adapter knows only its own framework"),
        (
            "adapters/commlib_tensorflow/a.py",
            "from commlib_torch import x\n",
            "an adapter knows only its own framework",
        ),
        ("commlib/compress/codecs/sign.py", "from commlib.kernels import host\n", "kernels are asked of a device"),
        ("commlib/execution/streaming.py", "from commlib.kernels import host\n", "kernels are asked of a device"),
        ("commlib/novelty.py", "", "commlib.novelty has no row"),
        ("tests/torch/test_a.py", "", "tests/torch: a folder of this name shadows"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    for name in ("commlib/__init__.py", "commlib/kernels/__init__.py", "commlib/transport/__init__.py", path):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "commlib/kernels/host.py").write_text("")
    (tmp_path / path).write_text(text)
    faults = breaches(tmp_path)
    assert len(faults) == 1
    assert faults[0].startswith(path) or path.startswith(faults[0].partition(":")[0])
    assert expected in faults[0]


def test_allowed_imports_are_not_reported(tmp_path: Path) -> None:
    allowed = {
        "commlib/__init__.py": "from commlib.communicator import Communicator\n",
        "commlib/communicator.py": "import numpy\nfrom .transport import base\n",
        "commlib/transport/base.py": "if TYPE_CHECKING:\n    from commlib.schedule.ir import Program\n",
        "commlib/schedule/ring.py": "import math\nfrom commlib.errors import UsageError\nfrom . import ir\n",
        "commlib/schedule/ir.py": "",
        "commlib/errors.py": "",
        "commlib/devices/cuda/process.py": "def f():\n    import cupy\n",
        "commlib/bench/gloo_peer.py": "def f():\n    import torch.distributed\n",
        "adapters/commlib_torch/optimizer.py": "import torch\nimport commlib\n",
    }
    for name, text in allowed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert breaches(tmp_path) == []


def test_importing_commlib_is_fast_and_imports_nothing_heavy() -> None:
    program = """
import sys, time
start = time.process_time()
import commlib
seconds = time.process_time() - start
heavy = {"mpi4py", "numba", "llvmlite", "cupy", "torch", "tensorflow", "keras"} & set(sys.modules)
print(seconds, *sorted(heavy))
"""
    seconds = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
        measured, *heavy = done.stdout.split()
        assert heavy == []
        seconds.append(float(measured))
    assert min(seconds) < 0.2  # of a core, so that other processes count little; the best, because they count
