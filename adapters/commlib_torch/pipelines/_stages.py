"""Stages: compute a part of a model on microbatches with autograd, for the core's pipeline runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.dtypes import DTYPES, Array
from commlib.errors import UsageError
from commlib.pipeline.batch import shares
from commlib.pipeline.recompute import Recompute
from commlib.pipeline.stage import ByStage, Values
from commlib_torch._autograd import backward_passes
from commlib_torch._bridge import array_of, read, to_tensor
from commlib_torch.devices import device_of
from commlib_torch.expert.losses import each_taken, keepers_in
from commlib_torch.pipelines._batch_statistics import kept_buffers
from commlib_torch.pipelines._batches import kind_of
from commlib_torch.pipelines._hooks import have_hooks, registrations
from commlib_torch.pipelines._loss_module import UsedParameters
from commlib_torch.pipelines._losses import Losses, LossWeights
from commlib_torch.pipelines._notes import flat, nested
from commlib_torch.pipelines._parts import INPUTS, OUTPUT
from commlib_torch.pipelines._recompute import recomputed, recomputing
from commlib_torch.pipelines._rows_look import RowsLook
from commlib_torch.pipelines._weight_gradients import SplitBackward

KNOWN_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)
"""Those of tensors that go from stage to stage."""


class TorchTensors:
    """Torch's tensors and arrays of the core. like: one of this rank's stages, if there is one: where they compute."""

    def __init__(self, like: Tensor | None) -> None:
        self.find(like)

    def find(self, like: Tensor | None) -> None:
        """Find out where stages compute; on the host, until one knows."""
        if like is not None and like.is_meta:
            like = None
        self._device = None if like is None or like.is_cpu else like.device
        self.device = None if like is None else device_of(like)
        """That of the core."""

    def array(self, value: Tensor) -> Array:
        """Return the elements of a tensor; from a GPU, copied to the host once what computes them is done."""
        here = value.detach()
        if not here.is_cpu:
            here = here.cpu()
        return array_of(here.resolve_conj().resolve_neg())

    def read(self, value: Tensor) -> Any:
        """Return the elements of a tensor where they are: on a GPU behind what its current stream still computes."""
        return read(value)

    def wants_gradient(self, value: Tensor) -> bool:
        """Return whether autograd would need it."""
        return value.requires_grad

    def tensor(self, array: Any, *, wants_gradient: bool) -> Tensor:
        """Return a tensor over an array; of one of the host a copy on the GPU, where stages compute there."""
        tensor = to_tensor(array)
        if self._device is not None:
            tensor = tensor.to(self._device)
        return tensor.requires_grad_(wants_gradient)

    def memory(self, value: Tensor) -> Any:
        """Return its storage; None if it is a copy on a GPU."""
        return None if self._device is not None else value.untyped_storage()

    def is_kept(self, memory: Any) -> bool:
        """Return whether anything but who asks has a storage: a tensor, or a graph."""
        return memory.nbytes() > 0 and torch._C._storage_Use_Count(memory._cdata) > 1

    def move(self, memory: Any) -> None:
        """Give it other memory in place, as `share_memory_` does; arrays (`numpy()`) stay where they are."""
        memory._share_fd_cpu_()


@dataclass(slots=True)
class Batch:
    """What all stages of this rank know of the batch that is under way.

    inputs: (args, kwargs) of each microbatch, where the first stage is. losses: where the last one is. rows,
    row_shares: of each microbatch, and what they count in an update, everywhere, if layers have losses of their own, or
    stages see whether they mix rows (looks_at_rows). of_x, of_y: those of their tensors that want gradients. outputs
    are filled by the last stage, where they are wanted (instead of losses) or kept (beside them); extras by all: the
    losses of their layers, as they count in the batch.
    """

    inputs: Sequence[tuple[Any, Any]] = ()
    losses: Losses | None = None
    rows: Sequence[int] = ()
    row_shares: Sequence[float] = ()
    looks_at_rows: bool = False
    of_x: Sequence[Tensor] = ()
    of_y: Sequence[Tensor] = ()
    scale: float = 1.0
    is_training: bool = False
    wants_outputs: bool = False
    keeps_outputs: bool = False
    extras: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Kept:
    """What the backward of a microbatch needs: the stage's inputs and outputs by link, and its losses."""

    inputs: dict[int, list[Tensor | None]]
    outputs: dict[int, list[Tensor]]
    loss: Tensor | None
    extras: list[tuple[Tensor, float]]
    """Those of the stage's layers, means over rows and sums, and what they count in an update."""
    hooks: int
    """How many were registered when its forward began."""


class TorchStage:
    """One stage on this rank. takes, gives: the names of the values of each link, by the other stage."""

    def __init__(
        self,
        part: nn.Module,
        takes: Mapping[int, Sequence[str]],
        gives: Mapping[int, Sequence[str]],
        *,
        is_first: bool,
        is_last: bool,
        loss: LossWeights,
        recompute: Recompute,
        look: RowsLook,
    ) -> None:
        self.look = look
        """Sees whether it mixes rows."""
        self.part, self._takes, self._gives = part, takes, gives
        self._is_first, self._is_last, self._loss = is_first, is_last, loss
        self._call = recomputing(self._on_copies, part, recompute)
        self._again = recomputed(part, recompute)
        self.batch = Batch()
        """Set before each run."""
        self.weights: StashedWeights | None = None
        """Of schedules that update weights while the pipeline runs."""
        self.later: frozenset[int] = frozenset()
        """Ids of weights to whose gradients another stage of this rank adds, after this one's last microbatch."""
        self._changes_inputs: dict[bool, bool] = {}
        """Whether, in training or not, the stage works in place on what it is given: then it must have copies.

        The first microbatch tells, which gets copies in any case.
        """
        self._copies: list[Tensor] = []
        self._keepers = keepers_in(part)
        self._leaves: list[Tensor] = []
        """The weights that get gradients in this batch: to go through a module takes as long as a small layer."""
        self._kept: dict[int, _Kept] = {}
        self._split: dict[int, tuple[SplitBackward | None, list[Tensor | None]]] = {}
        self._has_hooks: bool | None = None
        self.used: UsedParameters | None = None
        """Looks at the first values that it gives, and at the first loss."""

    def clear(self) -> None:
        """Forget what is under way."""
        self._kept.clear()
        self._split.clear()
        self.look.end()
        self._leaves, self._has_hooks = [], None
        self.batch = Batch()

    def forward(self, microbatch: int, inputs: ByStage) -> ByStage:
        """See `commlib.pipeline.stage.Stage`."""
        batch, hooks = self.batch, registrations.count
        named: dict[str, Any] = {INPUTS: batch.inputs[microbatch]} if self._is_first else {}
        leaves: dict[int, list[Tensor | None]] = {}
        with torch.set_grad_enabled(batch.is_training):
            for source, values in inputs.items():
                own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in values.tensors]
                leaves[source] = [tensor if tensor.requires_grad else None for tensor in own]
                named.update(zip(self._takes[source], nested(own, values.note), strict=True))
            if batch.looks_at_rows:
                self.look.see(named, batch.rows[microbatch])
            if self._is_last and batch.losses is not None and self._loss.is_in_model(batch.losses):
                results = self._loss.called_in_model(batch.losses, microbatch, lambda: self._run(named))
            else:
                results = self._run(named)
            given: dict[int, Values] = {}
            for target, names in self._gives.items():
                given[target] = values = Values(*flat([results[name] for name in names]))
                if not all(map(_can_be_sent, values.tensors)):
                    self._refuse_values(target, names, results)
            loss = self._finish(microbatch, results[OUTPUT]) if self._is_last else None
        if batch.is_training and self.used is not None:
            self._look(results, leaves, loss)
        if batch.is_training:
            outputs = {target: list(values.tensors) for target, values in given.items()}
            extras = self._added(microbatch, named) if self._keepers else []
            self._kept[microbatch] = _Kept(leaves, outputs, loss, extras, hooks)
        return given

    def _refuse_values(self, target: int, names: Sequence[str], results: Mapping[str, Any]) -> None:
        for name in names:
            for tensor in flat([results[name]])[0]:
                if _can_be_sent(tensor):
                    continue
                layers = [layer for layer, _ in self.part.named_children()]
                what = f"layer {layers[-1]}" if name.startswith("after ") and layers else f"operation {name}"
                kind, instead = kind_of(tensor) or (f"tensor of {tensor.dtype}", "tensor.view(torch.uint8)")
                raise UsageError(
                    f"pipeline: {what} gives stage {target} a {kind}, which stages cannot send: let it give "
                    f"{instead}, or another value, or let split= put both layers into one stage"
                )

    def _added(self, microbatch: int, named: dict[str, Any]) -> list[tuple[Tensor, float]]:
        """Return the losses that layers have kept, means over rows and sums, and what they count in an update."""
        batch, added = self.batch, each_taken(self._keepers)
        if not added:
            return []
        are_sums = self.look.sums(added, named, batch.rows[microbatch])
        found = []
        for is_sum in (False, True):
            if own := [loss for loss, one in zip(added, are_sums, strict=True) if one == is_sum]:
                total = torch.stack(own).sum()
                found.append((total, 1.0 if is_sum else batch.row_shares[microbatch]))
                in_batch = 1.0 if is_sum else shares(batch.rows)[microbatch]
                batch.extras[microbatch] = batch.extras.get(microbatch, 0.0) + float(total.detach()) * in_batch
        return found

    def _run(self, named: dict[str, Any]) -> dict[str, Any]:
        is_training = self.batch.is_training
        if self._changes_inputs.get(is_training) is False and not self._again and self.weights is None:
            return self.part(named)  # type: ignore[no-any-return]
        if not is_training:
            results = self._on_copies(named)
        elif self.weights is None:
            results = self._call(named)
        else:
            results = self.weights.call(self._own(named))
        if is_training not in self._changes_inputs:
            changed = any(not tensor.is_inference() and tensor._version for tensor in self._copies)
            self._changes_inputs[is_training] = changed
            self._copies = []
        return results

    def _on_copies(self, named: dict[str, Any]) -> dict[str, Any]:
        """Call the part, where it works in place on copies; also when it computes again."""
        return self.part(self._own(named))  # type: ignore[no-any-return]

    def _own(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return values on which the part may work in place, if it does."""
        if self._changes_inputs.get(self.batch.is_training, True) is False:
            return named
        given = dict(named)
        inputs = given.pop(INPUTS, None)
        tensors, note = flat(list(given.values()))
        self._copies = [tensor.clone() for tensor in tensors]
        own: dict[str, Any] = dict(zip(given, nested(self._copies, note), strict=True))
        if inputs is not None:  # parts of a batch, which share memory, and with that what autograd knows of changes
            own[INPUTS] = pytree.tree_map_only(Tensor, torch.clone, inputs)
            self._copies += [leaf for leaf in pytree.tree_leaves(own[INPUTS]) if isinstance(leaf, Tensor)]
        return own

    def _finish(self, microbatch: int, output: Any) -> Tensor | None:
        """Note the output or the loss of the last stage, and return what its backward begins with."""
        batch = self.batch
        if batch.wants_outputs or batch.keeps_outputs:
            # What a stage has passed on lies in memory that the next microbatch may use.
            batch.outputs[microbatch] = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)
        if batch.wants_outputs:
            return None
        assert batch.losses is not None
        return self._loss.call(batch.losses, microbatch, output)

    def backward(self, microbatch: int, gradients: ByStage, *, final: bool) -> ByStage:
        """See `commlib.pipeline.stage.Stage`."""
        kept = self._kept.pop(microbatch)
        roots, grads = self._roots(microbatch, kept, gradients)
        self._whole_backward(roots, grads, final=final)
        return _input_gradients(kept)

    def backward_input(self, microbatch: int, gradients: ByStage) -> ByStage:
        """See `commlib.pipeline.stage.Stage`."""
        kept = self._kept.pop(microbatch)
        roots, grads = self._roots(microbatch, kept, gradients)
        leaves = [tensor for own in kept.inputs.values() for tensor in own if tensor is not None]
        split = SplitBackward.split(roots, grads, leaves, has_hooks=self._must_run_once(kept))
        if split is None:
            self._whole_backward(roots, grads, final=False)
        else:
            with backward_passes.part(final=False), self._backward_context():
                split.input_gradients()
        self._split[microbatch] = split, grads
        return _input_gradients(kept)

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        """See `commlib.pipeline.stage.Stage`."""
        split, grads = self._split.pop(microbatch)
        if split is None:
            return
        new = self._without_gradient(grads)
        with backward_passes.part(final=final, later=self.later), self._backward_context():
            split.weight_gradients()
        _own_memory(new, grads)
        if self.weights is not None:
            self.weights.collect()

    def _whole_backward(self, roots: list[Tensor], grads: list[Tensor | None], *, final: bool) -> None:
        if roots:
            new = self._without_gradient(grads)
            with backward_passes.part(final=final, later=self.later), self._backward_context():
                torch.autograd.backward(roots, grads)
            _own_memory(new, grads)
        if self.weights is not None:
            self.weights.collect()

    def _backward_context(self) -> AbstractContextManager[None]:
        """Buffers, such as running statistics, are changed by a forward, and not again when it is computed again."""
        return kept_buffers(self._again) if self._again and self.weights is None else nullcontext()

    def _must_run_once(self, kept: _Kept) -> bool:
        """Return whether a backward calls hooks, which both of its parts would."""
        if self._has_hooks is None:
            self._has_hooks = have_hooks(self.part.parameters(), but_of=backward_passes.__module__)
        return self._has_hooks or registrations.count != kept.hooks

    def _look(self, results: Mapping[str, Any], leaves: Mapping[int, list[Tensor | None]], loss: Tensor | None) -> None:
        """Look at what the first values that this stage gives depend on; of the last one at the first loss, too."""
        if self.used is None or (self._is_last and loss is None):
            return
        used, self.used = self.used, None
        given = [one for one in flat(list(results.values()))[0] if one.requires_grad]
        inputs = [tensor for own in leaves.values() for tensor in own if tensor is not None]
        of_x = self.batch.of_x if self._is_first else ()
        of_y = self.batch.of_y if self._is_last else ()
        used.check(inputs, x=of_x, given=given, y=of_y, loss=() if loss is None else [loss])

    def _roots(self, microbatch: int, kept: _Kept, gradients: ByStage) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return where a backward begins, and with what. A value that several stages took has several gradients."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        # What the microbatch's loss counts in that of the batch: so gradients are right as they are added up.
        weighed = list(kept.extras)
        if kept.loss is not None and self.batch.losses is not None:
            weighed.append((kept.loss, self.batch.losses.shares[microbatch]))
        for loss, share in weighed:
            if loss.requires_grad:
                found[id(loss)] = loss, torch.full_like(loss, share * self.batch.scale)
        for target, values in gradients.items():
            for tensor, gradient in zip(kept.outputs[target], values.tensors, strict=True):
                if gradient is None or not tensor.requires_grad:
                    continue
                before = found.get(id(tensor))
                found[id(tensor)] = tensor, gradient if before is None else before[1] + gradient
        return [tensor for tensor, _ in found.values()], [gradient for _, gradient in found.values()]

    def _without_gradient(self, received: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the weights whose gradient the next backward makes, of received ones, instead of adding to it."""
        if self._is_last or not received:
            return []
        if self.weights is not None:
            leaves = self.weights.leaves
        else:
            leaves = self._leaves = self._leaves or [leaf for leaf in self.part.parameters() if leaf.requires_grad]
        return [leaf for leaf in leaves if leaf.grad is None]

    def reduce(self) -> None:
        """Do nothing: the hooks of a DistributedOptimizer have launched what is complete."""

    def step(self) -> None:
        """Update the weights."""
        if self.weights is not None:  # a stage may have none
            self.weights.step()

    def use(self, version: int) -> None:
        """Compute with the weights after so many updates of this run."""
        if self.weights is not None:
            self.weights.use(version)


class StashedWeights:
    """The versions of a stage's weights that microbatches under way use, where updates do not wait for them.

    Each version is a set of leaves of its own, which autograd keeps for as long as a backward needs them: so a backward
    uses those of its forward, and updates in place disturb none. Gradients are handed to the parameters.
    """

    def __init__(self, part: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._part, self._optimizer = part, optimizer
        self._parameters = dict(part.named_parameters())
        self.begin()

    def begin(self) -> None:
        """Begin a run: the weights are version 0."""
        self._updates = 0
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._used: list[dict[str, Tensor]] = []
        self.use(0)

    def use(self, version: int) -> None:
        """Compute with the weights after so many updates."""
        if version not in self._versions and version == self._updates:
            self._versions[version] = {
                name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
                for name, parameter in self._parameters.items()
            }
            self._used.append(self._versions[version])
        self._current = self._versions.get(version, {})  # a backward asks for none

    @property
    def leaves(self) -> list[Tensor]:
        """The weights of all versions."""
        return [leaf for leaves in self._used for leaf in leaves.values()]

    def call(self, named: dict[str, Any]) -> dict[str, Any]:
        """Call the part with the weights that are in use."""
        return torch.func.functional_call(self._part, self._current, (named,))  # type: ignore[no-any-return]

    def collect(self) -> None:
        """Add the gradients of all versions to those of the parameters."""
        for leaves in self._used:
            for name, leaf in leaves.items():
                if leaf.grad is None:
                    continue
                parameter = self._parameters[name]
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad + leaf.grad
                leaf.grad = None

    def step(self) -> None:
        """Update the parameters; the version before stays in use where it is."""
        self.use(self._updates)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1
        self._versions = {version: kept for version, kept in self._versions.items() if version >= self._updates - 1}


def _own_memory(leaves: Sequence[Tensor], received: Sequence[Tensor | None]) -> None:
    """Copy gradients that autograd has made of a received one without a copy: its memory is the next message's."""
    messages = {gradient.untyped_storage().data_ptr() for gradient in received if gradient is not None}
    for leaf in leaves:
        if leaf.grad is None:
            continue
        values = leaf.grad._values() if leaf.grad.is_sparse else leaf.grad  # those of rows, of an embedding
        if values.untyped_storage().data_ptr() in messages:
            leaf.grad = leaf.grad.clone()


def _can_be_sent(tensor: Tensor | None) -> bool:
    if tensor is None:
        return True
    return tensor.dtype in KNOWN_DTYPES and tensor.layout is torch.strided and not tensor.is_nested


def _input_gradients(kept: _Kept) -> dict[int, Values]:
    return {
        source: Values([None if leaf is None else leaf.grad for leaf in leaves])
        for source, leaves in kept.inputs.items()
    }


@contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Let modules be in training or evaluation mode within, and as they were afterwards."""
    before = {module: module.training for part in modules for module in part.modules()}
    for part in modules:
        part.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
