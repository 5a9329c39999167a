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
from commlib.pipeline.stage import ByStage, StageValues
from commlib_torch._autograd import backward_passes
from commlib_torch._bridge import array_of, read, to_tensor
from commlib_torch.devices import device_of
from commlib_torch.expert.losses import keepers_in, take_each
from commlib_torch.pipelines._batch_losses import Losses
from commlib_torch.pipelines._batch_statistics import preserve_buffers
from commlib_torch.pipelines._batches import kind_of
from commlib_torch.pipelines._flattening import flatten, unflatten
from commlib_torch.pipelines._hooks import have_hooks, registrations
from commlib_torch.pipelines._loss_module import UsedParameters
from commlib_torch.pipelines._losses import LossWeights
from commlib_torch.pipelines._parts import INPUTS, OUTPUT
from commlib_torch.pipelines._recompute import modules_to_recompute, wrap_recompute
from commlib_torch.pipelines._row_check import RowCheck
from commlib_torch.pipelines._weight_gradients import SplitBackward

KNOWN_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)
"""The dtypes of tensors that stages can send."""


class TorchTensors:
    """Torch's tensors for the core's pipeline. like: a parameter of this rank's stages, whose device is used."""

    def __init__(self, like: Tensor | None) -> None:
        self.find(like)

    def find(self, like: Tensor | None) -> None:
        """Set the device from `like`; without it, the host."""
        if like is not None and like.is_meta:
            like = None
        self._device = None if like is None or like.is_cpu else like.device
        self.device = None if like is None else device_of(like)
        """One of the core's devices."""

    def array(self, value: Tensor) -> Array:
        """Return a host array with a tensor's elements; from a GPU it is a copy, which waits for the current stream."""
        here = value.detach()
        if not here.is_cpu:
            here = here.cpu()
        return array_of(here.resolve_conj().resolve_neg())

    def read(self, value: Tensor) -> Any:
        """Return an array over a tensor's memory; on a GPU ordered after its current stream."""
        return read(value)

    def wants_gradient(self, value: Tensor) -> bool:
        """Return whether autograd needs a gradient of a value."""
        return value.requires_grad

    def tensor(self, array: Any, *, wants_gradient: bool) -> Tensor:
        """Return a tensor over an array; a copy on the GPU if the array is on the host and stages compute on a GPU."""
        tensor = to_tensor(array)
        if self._device is not None:
            tensor = tensor.to(self._device)
        return tensor.requires_grad_(wants_gradient)

    def memory(self, value: Tensor) -> Any:
        """Return the storage of a tensor; None if it is a copy on a GPU."""
        return None if self._device is not None else value.untyped_storage()

    def is_used(self, memory: Any) -> bool:
        """Return whether another reference to a storage exists: a tensor or an autograd graph."""
        return memory.nbytes() > 0 and torch._C._storage_Use_Count(memory._cdata) > 1

    def move(self, memory: Any) -> None:
        """Replace the memory of a storage in place, as `share_memory_` does; arrays (`numpy()`) keep the old memory."""
        memory._share_fd_cpu_()


@dataclass(slots=True)
class Batch:
    """State of the running batch, shared by all stages of this rank.

    inputs: (args, kwargs) of each microbatch, on the rank of the first stage. losses: on the rank of the last stage.
    rows, row_shares: the rows of each microbatch and their weight in an update, on all ranks, if layers have their own
    losses or row checks run (looks_at_rows). of_x, of_y: the tensors of x and y that require gradients. The last stage
    fills outputs if they are wanted (instead of losses) or kept (in addition to them). All stages fill extras: the
    losses of their layers, weighted as in the batch.
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
class _SavedMicrobatch:
    """Saved state of a microbatch for its backward: the stage's inputs and outputs by link, and its losses."""

    inputs: dict[int, list[Tensor | None]]
    outputs: dict[int, list[Tensor]]
    loss: Tensor | None
    extras: list[tuple[Tensor, float]]
    """Losses of the stage's layers (means over rows, and sums) with their weights in an update."""
    hooks: int
    """The number of registered hooks when its forward began."""


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
        look: RowCheck,
    ) -> None:
        self.look = look
        """Checks whether the stage mixes rows."""
        self.part, self._takes, self._gives = part, takes, gives
        self._is_first, self._is_last, self._loss = is_first, is_last, loss
        self._call = wrap_recompute(self._call_with_copies, part, recompute)
        self._again = modules_to_recompute(part, recompute)
        self.batch = Batch()
        """Set before each run."""
        self.weights: StashedWeights | None = None
        """For schedules that update weights while the pipeline runs."""
        self.later: frozenset[int] = frozenset()
        """Ids of weights to which another stage of this rank adds gradients after this stage's last microbatch."""
        self._changes_inputs: dict[bool, bool] = {}
        """Whether the stage changes its inputs in place, by training mode: it then gets copies.

        The first microbatch finds out, and always gets copies.
        """
        self._copies: list[Tensor] = []
        self._keepers = keepers_in(part)
        self._leaves: list[Tensor] = []
        """The weights that get gradients in this batch: walking a module costs as much as a small layer."""
        self._saved: dict[int, _SavedMicrobatch] = {}
        self._split: dict[int, tuple[SplitBackward | None, list[Tensor | None]]] = {}
        self._has_hooks: bool | None = None
        self.used: UsedParameters | None = None
        """Checks which parameters its first outputs and the first loss use."""

    def clear(self) -> None:
        """Drop the state of running microbatches."""
        self._saved.clear()
        self._split.clear()
        self.look.end()
        self._leaves, self._has_hooks = [], None
        self.batch = Batch()

    def forward(self, microbatch: int, inputs: ByStage) -> ByStage:
        """Run forward on a microbatch: see `commlib.pipeline.stage.Stage`."""
        batch, hooks = self.batch, registrations.count
        named: dict[str, Any] = {INPUTS: batch.inputs[microbatch]} if self._is_first else {}
        leaves: dict[int, list[Tensor | None]] = {}
        with torch.set_grad_enabled(batch.is_training):
            for source, values in inputs.items():
                own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in values.tensors]
                leaves[source] = [tensor if tensor.requires_grad else None for tensor in own]
                named.update(zip(self._takes[source], unflatten(own, values.note), strict=True))
            if batch.looks_at_rows:
                self.look.see(named, batch.rows[microbatch])
            if self._is_last and batch.losses is not None and self._loss.is_in_model(batch.losses):
                results = self._loss.call_in_model(batch.losses, microbatch, lambda: self._run(named))
            else:
                results = self._run(named)
            given: dict[int, StageValues] = {}
            for target, names in self._gives.items():
                given[target] = values = StageValues(*flatten([results[name] for name in names]))
                if not all(map(_is_sendable, values.tensors)):
                    self._refuse_values(target, names, results)
            loss = self._finish(microbatch, results[OUTPUT]) if self._is_last else None
        if batch.is_training and self.used is not None:
            self._look(results, leaves, loss)
        if batch.is_training:
            outputs = {target: list(values.tensors) for target, values in given.items()}
            extras = self._added(microbatch, named) if self._keepers else []
            self._saved[microbatch] = _SavedMicrobatch(leaves, outputs, loss, extras, hooks)
        return given

    def _refuse_values(self, target: int, names: Sequence[str], results: Mapping[str, Any]) -> None:
        for name in names:
            for tensor in flatten([results[name]])[0]:
                if _is_sendable(tensor):
                    continue
                layers = [layer for layer, _ in self.part.named_children()]
                what = f"layer {layers[-1]}" if name.startswith("after ") and layers else f"operation {name}"
                kind, instead = kind_of(tensor) or (f"tensor of {tensor.dtype}", "tensor.view(torch.uint8)")
                raise UsageError(
                    f"pipeline: {what} gives stage {target} a {kind}, which stages cannot send: return {instead} or "
                    "another value, or use split= to put both layers into one stage"
                )

    def _added(self, microbatch: int, named: dict[str, Any]) -> list[tuple[Tensor, float]]:
        """Return the losses that layers have recorded (means over rows, and sums) with their weights in an update."""
        batch, added = self.batch, take_each(self._keepers)
        if not added:
            return []
        are_sums = self.look.sums(added, named, batch.rows[microbatch])
        losses = []
        for is_sum in (False, True):
            if own := [loss for loss, one in zip(added, are_sums, strict=True) if one == is_sum]:
                total = torch.stack(own).sum()
                losses.append((total, 1.0 if is_sum else batch.row_shares[microbatch]))
                in_batch = 1.0 if is_sum else shares(batch.rows)[microbatch]
                batch.extras[microbatch] = batch.extras.get(microbatch, 0.0) + float(total.detach()) * in_batch
        return losses

    def _run(self, named: dict[str, Any]) -> dict[str, Any]:
        is_training = self.batch.is_training
        if self._changes_inputs.get(is_training) is False and not self._again and self.weights is None:
            return self.part(named)  # type: ignore[no-any-return]
        if not is_training:
            results = self._call_with_copies(named)
        elif self.weights is None:
            results = self._call(named)
        else:
            results = self.weights.call(self._own(named))
        if is_training not in self._changes_inputs:
            changed = any(not tensor.is_inference() and tensor._version for tensor in self._copies)
            self._changes_inputs[is_training] = changed
            self._copies = []
        return results

    def _call_with_copies(self, named: dict[str, Any]) -> dict[str, Any]:
        """Call the part with copies of its inputs if it changes them in place; also in recomputation."""
        return self.part(self._own(named))  # type: ignore[no-any-return]

    def _own(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return inputs that the part may change in place, copied if it does."""
        if self._changes_inputs.get(self.batch.is_training, True) is False:
            return named
        given = dict(named)
        inputs = given.pop(INPUTS, None)
        tensors, note = flatten(list(given.values()))
        self._copies = [tensor.clone() for tensor in tensors]
        own: dict[str, Any] = dict(zip(given, unflatten(self._copies, note), strict=True))
        if inputs is not None:  # slices of a batch, which share memory and autograd's version counter
            own[INPUTS] = pytree.tree_map_only(Tensor, torch.clone, inputs)
            self._copies += [leaf for leaf in pytree.tree_leaves(own[INPUTS]) if isinstance(leaf, Tensor)]
        return own

    def _finish(self, microbatch: int, output: Any) -> Tensor | None:
        """Record the output or the loss of the last stage; return the tensors at which its backward begins."""
        batch = self.batch
        if batch.wants_outputs or batch.keeps_outputs:
            # A sent output is in memory that the next microbatch may overwrite.
            batch.outputs[microbatch] = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)
        if batch.wants_outputs:
            return None
        assert batch.losses is not None
        return self._loss.call(batch.losses, microbatch, output)

    def backward(self, microbatch: int, gradients: ByStage, *, final: bool) -> ByStage:
        """Run backward on a microbatch: see `commlib.pipeline.stage.Stage`."""
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(microbatch, saved, gradients)
        self._whole_backward(roots, grads, final=final)
        return _input_gradients(saved)

    def backward_input(self, microbatch: int, gradients: ByStage) -> ByStage:
        """Compute the gradients of the inputs: see `commlib.pipeline.stage.Stage`."""
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(microbatch, saved, gradients)
        leaves = [tensor for own in saved.inputs.values() for tensor in own if tensor is not None]
        split = SplitBackward.split(roots, grads, leaves, has_hooks=self._must_run_once(saved))
        if split is None:
            self._whole_backward(roots, grads, final=False)
        else:
            with backward_passes.part(final=False), self._backward_context():
                split.input_gradients()
        self._split[microbatch] = split, grads
        return _input_gradients(saved)

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        """Compute the gradients of the weights: see `commlib.pipeline.stage.Stage`."""
        split, grads = self._split.pop(microbatch)
        if split is None:
            return
        new = self._missing_gradients(grads)
        with backward_passes.part(final=final, later=self.later), self._backward_context():
            split.weight_gradients()
        _own_memory(new, grads)
        if self.weights is not None:
            self.weights.collect()

    def _whole_backward(self, roots: list[Tensor], grads: list[Tensor | None], *, final: bool) -> None:
        if roots:
            new = self._missing_gradients(grads)
            with backward_passes.part(final=final, later=self.later), self._backward_context():
                torch.autograd.backward(roots, grads)
            _own_memory(new, grads)
        if self.weights is not None:
            self.weights.collect()

    def _backward_context(self) -> AbstractContextManager[None]:
        """Keep buffers: a forward updates running statistics once, and its recomputation does not."""
        return preserve_buffers(self._again) if self._again and self.weights is None else nullcontext()

    def _must_run_once(self, saved: _SavedMicrobatch) -> bool:
        """Return whether a backward calls hooks, which both of its parts would call."""
        if self._has_hooks is None:
            self._has_hooks = have_hooks(self.part.parameters(), but_of=backward_passes.__module__)
        return self._has_hooks or registrations.count != saved.hooks

    def _look(self, results: Mapping[str, Any], leaves: Mapping[int, list[Tensor | None]], loss: Tensor | None) -> None:
        """Check which weights the first outputs of this stage use; in the last stage also those of the first loss."""
        if self.used is None or (self._is_last and loss is None):
            return
        used, self.used = self.used, None
        given = [one for one in flatten(list(results.values()))[0] if one.requires_grad]
        inputs = [tensor for own in leaves.values() for tensor in own if tensor is not None]
        of_x = self.batch.of_x if self._is_first else ()
        of_y = self.batch.of_y if self._is_last else ()
        used.check(inputs, x=of_x, given=given, y=of_y, loss=() if loss is None else [loss])

    def _roots(
        self, microbatch: int, saved: _SavedMicrobatch, gradients: ByStage
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the roots of a backward and their gradients. A value sent to several stages has several."""
        roots: dict[int, tuple[Tensor, Tensor]] = {}
        # The microbatch's weight in the loss of the batch: with it, gradients simply add up.
        weighed = list(saved.extras)
        if saved.loss is not None and self.batch.losses is not None:
            weighed.append((saved.loss, self.batch.losses.shares[microbatch]))
        for loss, share in weighed:
            if loss.requires_grad:
                roots[id(loss)] = loss, torch.full_like(loss, share * self.batch.scale)
        for target, values in gradients.items():
            for tensor, gradient in zip(saved.outputs[target], values.tensors, strict=True):
                if gradient is None or not tensor.requires_grad:
                    continue
                before = roots.get(id(tensor))
                roots[id(tensor)] = tensor, gradient if before is None else before[1] + gradient
        return [tensor for tensor, _ in roots.values()], [gradient for _, gradient in roots.values()]

    def _missing_gradients(self, received: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the weights whose gradient the next backward creates from a received one, instead of adding to it."""
        if self._is_last or not received:
            return []
        if self.weights is not None:
            leaves = self.weights.leaves
        else:
            leaves = self._leaves = self._leaves or [leaf for leaf in self.part.parameters() if leaf.requires_grad]
        return [leaf for leaf in leaves if leaf.grad is None]

    def reduce(self) -> None:
        """Do nothing: the hooks of a DistributedOptimizer have launched the complete gradients."""

    def step(self) -> None:
        """Update the weights."""
        if self.weights is not None:  # a stage may have no weights
            self.weights.step()

    def use(self, version: int) -> None:
        """Compute with the weights after this number of updates of the run."""
        if self.weights is not None:
            self.weights.use(version)


class StashedWeights:
    """Weight versions of a stage for microbatches under way, for schedules whose updates do not wait for them.

    Each version is a set of separate leaves, which autograd keeps while a backward needs them: a backward uses the
    version of its forward, and updates in place do not disturb it. Gradients are moved to the parameters.
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
        """Compute with the weights after this number of updates."""
        if version not in self._versions and version == self._updates:
            self._versions[version] = {
                name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
                for name, parameter in self._parameters.items()
            }
            self._used.append(self._versions[version])
        self._current = self._versions.get(version, {})  # no pending backward needs them

    @property
    def leaves(self) -> list[Tensor]:
        """The weights of all versions."""
        return [leaf for leaves in self._used for leaf in leaves.values()]

    def call(self, named: dict[str, Any]) -> dict[str, Any]:
        """Call the part with the current version of the weights."""
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
        """Update the parameters; older versions stay valid for their microbatches."""
        self.use(self._updates)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1
        self._versions = {version: own for version, own in self._versions.items() if version >= self._updates - 1}


def _own_memory(leaves: Sequence[Tensor], received: Sequence[Tensor | None]) -> None:
    """Copy gradients that alias a received one: the next message overwrites its memory."""
    messages = {gradient.untyped_storage().data_ptr() for gradient in received if gradient is not None}
    for leaf in leaves:
        if leaf.grad is None:
            continue
        values = leaf.grad._values() if leaf.grad.is_sparse else leaf.grad  # of the rows of an embedding
        if values.untyped_storage().data_ptr() in messages:
            leaf.grad = leaf.grad.clone()


def _is_sendable(tensor: Tensor | None) -> bool:
    if tensor is None:
        return True
    return tensor.dtype in KNOWN_DTYPES and tensor.layout is torch.strided and not tensor.is_nested


def _input_gradients(saved: _SavedMicrobatch) -> dict[int, StageValues]:
    return {
        source: StageValues([None if leaf is None else leaf.grad for leaf in leaves])
        for source, leaves in saved.inputs.items()
    }


@contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Put modules into training or evaluation mode within the context; restore their modes afterwards."""
    before = {module: module.training for part in modules for module in part.modules()}
    for part in modules:
        part.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
