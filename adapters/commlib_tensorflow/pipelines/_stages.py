"""Stages: run one stage of a Keras model on microbatches, for the core's pipeline runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.pipeline.losses import KEPT_BYTES, MicrobatchWeights
from commlib.pipeline.stage import ByStage, StageValues
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._device_calls import array_of, tensors_of
from commlib_tensorflow._placement import DevicePlace
from commlib_tensorflow._recomputation_check import Mark
from commlib_tensorflow.devices import device_of
from commlib_tensorflow.pipelines._batch_statistics import WholeBatchStatistics
from commlib_tensorflow.pipelines._parts import StageLayer
from commlib_tensorflow.pipelines._recompute import LayerRecompute
from commlib_tensorflow.pipelines._replicas import StageReduction
from commlib_tensorflow.pipelines._row_check import RowCheck
from commlib_tensorflow.pipelines._stage_functions import Loss, Named, RecordedForward, StageFunctions
from commlib_tensorflow.pipelines._variable_values import VariableValues as VariableValues


class TensorflowTensors:
    """Conversion between TensorFlow's tensors and arrays of the core.

    place: where this rank's stages compute; None for the host.
    """

    def __init__(self, place: DevicePlace | None) -> None:
        self.device = None if place is None else place.device
        """The core's device."""
        self._read: list[Any] = []  # arrays that the device may still copy; TensorFlow does not track these copies

    def array(self, value: tf.Tensor) -> Array:
        """Return the elements of a tensor; from a GPU, a copy."""
        return to_array(value)

    def read(self, value: tf.Tensor) -> Any:
        """Return the elements of a tensor on its device; for a GPU the host waits for TensorFlow."""
        if self.device is None:
            return to_array(value)
        array = array_of(value)
        self._read.append(array)
        return array

    def wants_gradient(self, value: tf.Tensor) -> bool:
        """Return whether a gradient may flow: whether the tensor is floating-point."""
        return bool(value.dtype.is_floating)

    def tensor(self, array: Any, *, wants_gradient: bool) -> tf.Tensor:
        """Return a tensor over an array; on a device the host waits until its data has arrived."""
        if type(array) is not DeviceArray:
            return to_tensor(array)
        (tensor,) = tensors_of([array])
        self._read.clear()  # the device has finished its earlier work, too
        return tensor

    def memory(self, value: tf.Tensor) -> None:
        """Return None: TensorFlow does not expose which tensors share memory."""

    def is_used(self, memory: Any) -> bool:
        """Return False."""
        return False

    def move(self, memory: Any) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Wait until the device has read the arrays it was given."""
        if self.device is not None and self._read:
            wait_for(self.device.current().record(), core.require_world().watch("the end of a batch"))
        self._read.clear()


@dataclass(slots=True)
class Batch:
    """State of the current batch that all stages of this rank share.

    inputs: named values of each microbatch, on the rank of the first stage. targets, sample_weights: of each
    microbatch, on the rank of the last stage; the same for weights (of each loss in the batch's loss), shares (their
    weights in an update) and looks (whether to keep outputs of some microbatches to check their loss together). rows:
    of each microbatch, on all ranks, and row_shares: their weights in an update. scale: multiplies gradients, but not
    the loss. Stages fill losses, extras (losses that layers add, and whether each is a sum, by stage and microbatch),
    penalties (losses of regularisers, by stage), outputs, and gradients (by the id of the variable). reduction: reduces
    the gradients over replicas, if that is done by stages.
    """

    inputs: Sequence[Named] = ()
    targets: Sequence[Any] = ()
    sample_weights: Sequence[Any] = ()
    rows: Sequence[int] = ()
    row_shares: Sequence[float] = ()
    shares: Sequence[float] = ()
    weights: MicrobatchWeights | None = None
    looks: bool = False
    scale: float = 1.0
    is_training: bool = False
    has_loss: bool = False
    keeps_outputs: bool = False
    losses: dict[int, tf.Tensor] = field(default_factory=dict)
    extras: dict[tuple[int, int], tuple[tf.Tensor, Sequence[bool]]] = field(default_factory=dict)
    outputs: dict[int, list[tf.Tensor]] = field(default_factory=dict)
    penalties: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, tf.Tensor] = field(default_factory=dict)
    reduction: StageReduction | None = None

    def has_loss_of(self, microbatch: int) -> bool:
        """Return whether a microbatch's loss is needed, and has a weight."""
        return self.has_loss and (self.weights is None or self.weights.terms[microbatch] > 0)

    def add(self, variables: Sequence[Any], gradients: Sequence[tf.Tensor | None]) -> None:
        """Add to the gradients of variables; a missing gradient adds nothing."""
        own = self.gradients
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                before = own.get(id(variable))
                own[id(variable)] = gradient if before is None else before + gradient


@dataclass(slots=True)
class _SavedMicrobatch:
    """State of a microbatch for its backward: the forward's inputs, and the activations that are kept."""

    weights: list[tf.Tensor]
    state: list[tf.Tensor]
    inputs: Named
    products: list[tf.Tensor]
    gradients: Named = field(default_factory=dict)
    recorded: RecordedForward | None = None
    marks: Sequence[Mark] = ()

    def arrays(self) -> list[Array]:
        """Return the arrays whose memory another microbatch uses after the backward."""
        return _message_memory([*self.inputs.values(), *self.gradients.values()])


class TensorflowStage:
    """One stage on this rank.

    takes, gives: the names of the values of each link, by the other stage. outputs: the names of the model's outputs,
    on the last stage; masks: the names of their masks. again: backwards recompute their forward instead of keeping its
    activations; keeps_products: but not its products; layers_again: or only these layers. statistics: computes moving
    statistics over whole batches, if requested. versions: weights are updated during a batch. checks_rows: check that
    microbatches give the results of the batch.
    """

    def __init__(
        self,
        number: int,
        part: StageLayer,
        takes: Mapping[int, Sequence[str]],
        gives: Mapping[int, Sequence[str]],
        *,
        outputs: Sequence[str],
        masks: Sequence[str],
        values: VariableValues,
        again: bool,
        layers_again: Sequence[LayerRecompute],
        keeps_products: bool,
        statistics: WholeBatchStatistics | None,
        versions: bool,
        checks_rows: bool,
    ) -> None:
        self._checks_rows = checks_rows
        self.number, self.part, self._takes, self._gives = number, part, takes, gives
        self._again, self._layers_again = again, layers_again
        self._keeps_products, self._statistics = keeps_products, statistics
        self._outputs, self._masks, self._values, self._versions = outputs, masks, values, versions
        self._output_names = tuple(dict.fromkeys(name for names in gives.values() for name in names))
        self.batch = Batch()
        """Set before each run."""
        self._saved: dict[int, _SavedMicrobatch] = {}
        self.prepare(None, regularized=(), shared=(), eager=False, update=None)

    def prepare(
        self,
        loss: Loss | None,
        *,
        regularized: Sequence[Any],
        shared: Sequence[Any],
        eager: bool,
        update: Callable[[TensorflowStage], None] | None,
    ) -> None:
        """Prepare for training, with the variables that are trainable now.

        update: updates this stage's weights, in schedules that do so while they run; for the others see
        `StageFunctions`.
        """
        wanted = [name for names in self._takes.values() for name in names]
        self.functions = StageFunctions(
            self.number, self.part, wanted=wanted, outputs=self._outputs, loss=loss, regularized=regularized,
            shared=shared, again=self._again, layers_again=self._layers_again, keeps_products=self._keeps_products,
            eager=eager, versions=self._versions,
        )  # fmt: skip
        """The compiled functions."""
        self._update, self._eager = update, eager
        self._look = RowCheck(self.number, self.part, outputs=self._outputs, checks=self._checks_rows)

    @property
    def fault(self) -> str:
        """Why microbatches cannot replace the batch, if a check found that; otherwise ""."""
        return self._look.fault

    def clear(self) -> None:
        """Discard the current batch."""
        self._saved.clear()
        self._look.end()
        self.batch = Batch()

    # Called by the runner

    def forward(self, microbatch: int, inputs: ByStage) -> ByStage:
        """Run the forward of a microbatch: see `commlib.pipeline.stage.Stage`."""
        batch = self.batch
        given: Named = {} if self._takes else dict(batch.inputs[microbatch])
        for source, values in inputs.items():
            tensors = [_copy(tensor) for tensor in values.tensors] if self._eager else values.tensors
            given.update(zip(self._takes[source], tensors, strict=True))
        functions = self.functions
        weights, state = self._values.read(functions.trainable), self._values.read(functions.state)
        before = state
        statistics = self._statistics if batch.is_training else None
        if statistics is not None:
            state = statistics.hide(functions.state, state)
        arguments, recorded = (weights, state, given, *self._target(microbatch)), None
        if batch.is_training and not self._again:
            has_loss = batch.has_loss_of(microbatch)
            returned, recorded = functions.record(*arguments, has_loss=has_loss)
        else:
            returned = functions.forward(*arguments, training=batch.is_training, has_loss=batch.has_loss_of(microbatch))
        results, loss, extra, changed, products = returned
        if batch.is_training:
            saved = self._saved[microbatch] = _SavedMicrobatch(weights, state, given, products, recorded=recorded)
            saved.marks = () if functions.again is None else functions.again.marks
        count = batch.rows[microbatch]
        if batch.has_loss and count:
            now = [old if new is None else new for old, new in zip((*weights, *state), changed, strict=True)]
            self._look.see(functions, count, given, (weights, before, now), extra, training=batch.is_training)
        # Values of a message use memory that the next message may overwrite.
        arrays = _message_memory([tensor for values in inputs.values() for tensor in values.tensors])
        changed = [None if value is None else _make_own(value, arrays) for value in changed]
        if statistics is not None:
            changed = statistics.take(functions.variables, changed, batch.rows[microbatch])
        self._values.write(functions.variables, changed)
        if loss is not None:
            batch.losses[microbatch] = _make_own(loss, arrays)
        if extra is not None:
            batch.extras[self.number, microbatch] = _make_own(extra, arrays), self._look.sums(extra, batch.is_training)
        if self._outputs and (batch.keeps_outputs or (batch.looks and self._keeps_for_check(results))):
            batch.outputs[microbatch] = [_make_own(results[name], arrays) for name in (*self._outputs, *self._masks)]
        outputs = {name: _make_own(results[name], arrays) for name in self._output_names}
        return {target: StageValues([outputs[name] for name in names]) for target, names in self._gives.items()}

    def backward(self, microbatch: int, gradients: ByStage, *, final: bool) -> ByStage:
        """Run the backward of a microbatch: see `commlib.pipeline.stage.Stage`."""
        saved = self._saved.pop(microbatch)
        saved.gradients = self._summed(gradients)
        if saved.recorded is not None:
            of_weights, of_inputs = saved.recorded.backward(saved.gradients, self._shares(microbatch))
        else:
            of_weights, of_inputs = self._differentiate(microbatch, saved, weights=True, inputs=bool(self._takes))
        self._add(of_weights, saved)
        return self._to_sources(of_inputs, saved)

    def backward_input(self, microbatch: int, gradients: ByStage) -> ByStage:
        """Compute the gradients of inputs: see `commlib.pipeline.stage.Stage`."""
        saved = self._saved[microbatch]
        saved.gradients = self._summed(gradients)
        if not self._takes:
            return {}
        _, of_inputs = self._differentiate(microbatch, saved, weights=False, inputs=True)
        return self._to_sources(of_inputs, saved)

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        """Compute the gradients of weights: see `commlib.pipeline.stage.Stage`."""
        saved = self._saved.pop(microbatch)
        of_weights, _ = self._differentiate(microbatch, saved, weights=True, inputs=False)
        self._add(of_weights, saved)

    def reduce(self) -> None:
        """Start the reduction of complete gradients, if stages reduce them; otherwise the optimizer reduces all."""
        batch = self.batch
        if batch.reduction is not None:
            batch.penalties[self.number] = self.regularization(gradients=True)
            batch.reduction.give(self.number, batch.gradients)

    def step(self) -> None:
        """Update the weights."""
        assert self._update is not None
        self._update(self)

    def use(self, version: int) -> None:
        """Compute with the weights after this many updates of this run."""
        self._values.use(version)

    def regularization(self, *, gradients: bool) -> float:
        """Return the regularisers' loss, which counts once in an update, and add its gradients to the batch's."""
        functions = self.functions
        if not functions.regularized:
            return 0.0
        weights = self._values.read(functions.regularized)
        loss, derivatives = functions.regularize(weights, tf.constant(self.batch.scale, tf.float64))
        if gradients:
            self.batch.add(functions.regularized, derivatives)
        return float(loss)

    def _keeps_for_check(self, results: Named) -> bool:
        """Return whether to keep another microbatch's outputs for the check: two, or as many as fit into memory."""
        count = len(self.batch.outputs)
        size = sum(int(tf.size(results[name])) * results[name].dtype.size for name in self._outputs)
        return count < 2 or (count + 1) * size <= KEPT_BYTES

    def _target(self, microbatch: int) -> tuple[Any, Any]:
        batch = self.batch
        if not (self._outputs and batch.targets):
            return None, None
        return batch.targets[microbatch], batch.sample_weights[microbatch]

    def _shares(self, microbatch: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the factors of the gradients of a microbatch's loss, and of the losses that layers add."""
        batch = self.batch
        share = batch.shares[microbatch] if batch.shares else 0.0
        _, sums = batch.extras.get((self.number, microbatch), (None, ()))
        of_added = np.where(np.array(sums, bool), 1.0, batch.row_shares[microbatch]) * batch.scale
        return tf.constant(share * batch.scale, tf.float64), tf.constant(of_added, tf.float64)

    def _differentiate(
        self, microbatch: int, saved: _SavedMicrobatch, *, weights: bool, inputs: bool
    ) -> tuple[list[tf.Tensor | None], Named]:
        gradients: tuple[list[tf.Tensor | None], Named] = self.functions.backward(
            saved.weights, saved.state, saved.inputs, saved.gradients, *self._target(microbatch),
            self._shares(microbatch), saved.products, has_loss=self.batch.has_loss_of(microbatch),
            wants_weights=weights, wants_inputs=inputs,
        )  # fmt: skip
        if saved.marks and self.functions.again is not None:
            self.functions.again.check(saved.marks)
        return gradients

    # Gradients to and from other stages

    def _summed(self, gradients: ByStage) -> Named:
        """Return the gradients of the sent values, by name. A value sent to several stages sums their gradients."""
        sums: Named = {}
        for target, values in gradients.items():
            for name, gradient in zip(self._gives[target], values.tensors, strict=True):
                if gradient is not None:
                    sums[name] = sums[name] + gradient if name in sums else gradient
        return sums

    def _add(self, of_weights: Sequence[tf.Tensor | None], saved: _SavedMicrobatch) -> None:
        """Add to the gradients of weights.

        For a microbatch of one row a gradient may share memory with a result's gradient.
        """
        arrays = saved.arrays()
        own = [None if gradient is None else _make_own(gradient, arrays) for gradient in of_weights]
        self.batch.add(self.functions.trainable, own)

    def _to_sources(self, of_inputs: Named, saved: _SavedMicrobatch) -> dict[int, StageValues]:
        arrays = saved.arrays()
        gradients = {name: None if value is None else _make_own(value, arrays) for name, value in of_inputs.items()}
        return {source: StageValues([gradients.get(name) for name in names]) for source, names in self._takes.items()}


def _message_memory(tensors: Sequence[tf.Tensor]) -> list[Array]:
    """Return the memory of tensors that may belong to a message, which the next message overwrites; not of a device."""
    return [to_array(tensor) for tensor in tensors if device_of(tensor) is None]


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    """Return a copy of a tensor: a layer that is not compiled may keep its inputs."""
    return tensor if device_of(tensor) is not None else tf.convert_to_tensor(np.array(to_array(tensor)))


def _make_own(tensor: tf.Tensor, arrays: Sequence[Array]) -> tf.Tensor:
    """Return a tensor that owns its memory: a copy, if it shares memory with one of `arrays`."""
    if not arrays or device_of(tensor) is not None:
        return tensor
    array = to_array(tensor)
    if any(np.may_share_memory(array, other) for other in arrays):
        return tf.convert_to_tensor(np.array(array))
    return tensor
