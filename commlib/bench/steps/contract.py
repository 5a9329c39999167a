"""Contract: the sizes of a step that the core measures, and the contenders that an adapter gives for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commlib.bench.options import Refused

KINDS = ("dp", "tp", "pp", "moe")
FRAMEWORKS = ("torch", "tensorflow")
Step = Callable[[], float]  # runs one step and returns its loss


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder-only transformer and its batch. rows: of a batch, of each rank where ranks have batches of their own.

    context: tokens of a row. microbatches: of a pipeline. experts, top_k: of each layer, for moe.
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

    def text(self, kind: str) -> str:
        """Return the model in one line."""
        more = {"pp": f", {self.microbatches} microbatches", "moe": f", {self.experts} experts, top {self.top_k}"}
        model = f"{self.layers} layers of {self.width}, {self.heads} heads"
        return f"{model}, {self.rows} x {self.context} tokens{more.get(kind, '')}"


@dataclass(frozen=True, slots=True)
class Contenders:
    """The steps of one kind on one rank.

    ours: with commlib. alone: what a rank computes in it, without the others. whole: the undivided model with the
    batches of all ranks, for the check. peer: what else does the same, if there is something, and its name.
    tokens: of one step of all ranks. parameters: of the whole model.
    """

    ours: Step
    alone: Step
    whole: Step
    tokens: int
    parameters: int
    peer: Step | None = None
    peer_name: str = ""


def check(kind: str, framework: str, sizes: Sizes, ranks: int) -> None:
    """Raise Refused for what is unknown, and for sizes that so many ranks cannot divide."""
    if kind not in KINDS:
        raise Refused(f"step {kind!r} is unknown; known are {', '.join(KINDS)}")
    if framework not in FRAMEWORKS:
        raise Refused(f"--framework {framework!r} is unknown; known are {', '.join(FRAMEWORKS)}")
    for name in sizes.__slots__:
        if getattr(sizes, name) < 1:
            raise Refused(f"--{name.replace('_', '-')} is {getattr(sizes, name)}: expected at least 1")
    if sizes.width % sizes.heads:
        raise Refused(f"--heads {sizes.heads} does not divide --width {sizes.width}")
    if kind == "tp" and sizes.heads % ranks:
        raise Refused(f"tp: {ranks} ranks cannot share --heads {sizes.heads} evenly: give a multiple of {ranks}")
    if kind == "moe" and (sizes.experts % ranks or sizes.top_k > sizes.experts // ranks):
        raise Refused(
            f"moe: {ranks} ranks cannot share --experts {sizes.experts} evenly, at least --top-k {sizes.top_k} each: "
            f"give a multiple of {ranks}"
        )
    if kind == "pp" and sizes.layers < ranks:
        raise Refused(f"pp: --layers is {sizes.layers}, expected one for each of {ranks} ranks at least")
    if kind == "pp" and sizes.rows % sizes.microbatches:
        raise Refused(f"pp: --microbatches {sizes.microbatches} does not divide --rows {sizes.rows}")


def layers_of_stages(layers: int, ranks: int) -> list[int]:
    """Return how many layers each stage has, as even as can be."""
    return [layers * (stage + 1) // ranks - layers * stage // ranks for stage in range(ranks)]
