"""Contract: the sizes of a measured step, and the contenders that an adapter provides for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commlib.arguments import suggest
from commlib.bench.options import BenchOptionsError

KINDS = ("dp", "tp", "pp", "moe")
FRAMEWORKS = ("torch", "tensorflow")
Step = Callable[[], float]  # runs one step and returns its loss


@dataclass(frozen=True, slots=True)
class StepSizes:
    """A decoder-only transformer and its batch. rows: of a batch; of each rank's batch, for dp and moe.

    context: tokens per row. microbatches: of a pipeline. experts, top_k: of each layer, for moe.
    """

    width: int = 256
    layers: int = 4
    heads: int = 8
    context: int = 64
    vocabulary: int = 256
    rows: int = 8
    microbatches: int = 4
    experts: int = 8
    top_k: int = 2

    def tokens(self, kind: str, ranks: int) -> int:
        """Return the number of tokens in one step of all ranks, which have a batch each for dp and moe."""
        return (ranks if kind in ("dp", "moe") else 1) * self.rows * self.context

    def text(self, kind: str) -> str:
        """Return a description of the model in one line."""
        more = {"pp": f", {self.microbatches} microbatches", "moe": f", {self.experts} experts, top {self.top_k}"}
        model = f"{self.layers} layers of {self.width}, {self.heads} heads"
        return f"{model}, {self.rows} x {self.context} tokens{more.get(kind, '')}"


@dataclass(frozen=True, slots=True)
class Contenders:
    """The steps of one kind of parallelism on one rank.

    ours: with commlib. alone: one rank's computation, without communication. whole: the unsharded model with the
    batches of all ranks, for the check. peer: another implementation of the same step, if there is one, and its name.
    parameters: of the unsharded model.
    """

    ours: Step
    alone: Step
    whole: Step
    parameters: int
    peer: Step | None = None
    peer_name: str = ""


def check(kind: str, framework: str, sizes: StepSizes, ranks: int) -> None:
    """Raise Refused for unknown names, and for sizes that are not divisible by the number of ranks."""
    if kind not in KINDS:
        raise BenchOptionsError(f"step {kind!r} is unknown; known are {', '.join(KINDS)}{suggest(kind, KINDS)}")
    if framework not in FRAMEWORKS:
        hint = suggest(framework, FRAMEWORKS)
        raise BenchOptionsError(f"--framework {framework!r} is unknown; known are {', '.join(FRAMEWORKS)}{hint}")
    for name in sizes.__slots__:
        if getattr(sizes, name) < 1:
            raise BenchOptionsError(f"--{name.replace('_', '-')} is {getattr(sizes, name)}: expected at least 1")
    if sizes.width % sizes.heads:
        raise BenchOptionsError(f"--heads {sizes.heads} does not divide --width {sizes.width}")
    if kind == "tp" and sizes.heads % ranks:
        raise BenchOptionsError(
            f"tp: --heads {sizes.heads} is not divisible by {ranks} ranks: give a multiple of {ranks}"
        )
    if kind == "moe" and (sizes.experts % ranks or sizes.top_k > sizes.experts // ranks):
        raise BenchOptionsError(
            f"moe: --experts {sizes.experts} cannot be divided equally among {ranks} ranks with at least --top-k "
            f"{sizes.top_k} each: give a multiple of {ranks}"
        )
    if kind == "pp" and sizes.layers < ranks:
        raise BenchOptionsError(f"pp: --layers is {sizes.layers}: expected at least one for each of {ranks} ranks")
    if kind == "pp" and sizes.rows % sizes.microbatches:
        raise BenchOptionsError(f"pp: --microbatches {sizes.microbatches} does not divide --rows {sizes.rows}")


def layers_of_stages(layers: int, ranks: int) -> list[int]:
    """Return the number of layers of each stage, as even as possible."""
    return [layers * (stage + 1) // ranks - layers * stage // ranks for stage in range(ranks)]
