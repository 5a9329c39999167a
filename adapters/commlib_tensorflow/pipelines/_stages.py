"""Stages: run a part of a Keras model on microbatches, for the core's pipeline runner."""

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
from commlib.pipeline.losses import Weights
from commlib.pipeline.stage import ByStage, Values
from commlib_tensorflow._again import Mark
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._on_device import array_of, tensors_of
from commlib_tensorflow._placement import Place
from commlib_tensorflow.devices import device_of
from commlib_tensorflow.pipelines._batch_statistics import WholeBatchStatistics
from commlib_tensorflow.pipelines._functions import Loss, Named, Recorded, StageFunctions
from commlib_tensorflow.pipelines._losses import KEPT
from commlib_tensorflow.pipelines._parts import Part
from commlib_tensorflow.pipelines._recompute import LayerRecompute
from commlib_tensorflow.pipelines._replicas import StageReduction
from commlib_tensorflow.pipelines._rows_look import RowsLook
from commlib_tensorflow.pipelines._values import Values as VariableValues


class TensorflowTensors:
    """TensorFlow's tensors and arrays of the core. place: where this rank's stages compute; None for the host."""

    def __init__(self, place: Place | None) -> None:
        self.device = None if place is None else place.device
        """That of the core."""
        self._read: list[Any] = []  # what the device may still copy: TensorFlow does not know that it does

    def array(self, value: tf.Tensor) -> Array:
        """Return the elements of a tensor; from a GPU, a copy."""
        return to_array(value)

    def read(self, value: tf.Tensor) -> Any:
        """Return the elements of a tensor where they are; of one on a GPU the host waits for TensorFlow."""
        if self.device is None:
            return to_array(value)
        array = array_of(value)
        self._read.append(array)
        return array

    def wants_gradient(self, value: tf.Tensor) -> bool:
        """Return whether a gradient may flow: whether it is of floats."""
        return bool(value.dtype.is_floating)

    def tensor(self, array: Any, *, wants_gradient: bool) -> tf.Tensor:
        """Return a tensor over an array; on a device the host waits until it is there."""
        if type(array) is not DeviceArray:
            return to_tensor(array)
        (tensor,) = tensors_of([array])
        self._read.clear()  # the device has done all that it was told before, too
        return tensor

    def memory(self, value: tf.Tensor) -> None:
        """Return None: TensorFlow does not tell who has it."""

    def is_kept(self, memory: Any) -> bool:
        """Return False."""
        return False

    def move(self, memory: Any) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Wait until the device has read what it was given."""
        if self.device is not None and self._read:
            wait_for(self.device.current().record(), core.running().watch("the end of a batch"))
        self._read.clear()


@dataclass(slots=True)
class Batch:
    """What all stages of this rank know of the batch that is under way.

    inputs: named values of each microbatch, where the first stage is. targets, sample_weights: of each microbatch,
    where the last one is; so are weights, what each loss counts in that of the batch, and shares, what it counts in an
    update; and looks, whether outputs of some microbatches are kept to look at their loss together. rows: of each
    microbatch, everywhere, and row_shares: what they count in an update. scale: what gradients, but not the loss, are
    multiplied by. losses, extras (those that layers add, and whether each is a sum, by stage and microbatch), penalties
    (what regularisers add, by stage) and outputs are filled by stages; so are gradients, by the id of the variable.
    reduction: what reduces these over replicas, if that is done by stages.
    """

    inputs: Sequence[Named] = ()
    targets: Sequence[Any] = ()
    sample_weights: Sequence[Any] = ()
    rows: Sequence[int] = ()
    row_shares: Sequence[float] = ()
    shares: Sequence[float] = ()
    weights: Weights | None = None
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
        """Return whether a microbatch's loss is wanted, and counts."""
        return self.has_loss and (self.weights is None or self.weights.terms[microbatch] > 0)

    def add(self, variables: Sequence[Any], gradients: Sequence[tf.Tensor | None]) -> None:
        """Add to the gradients of variables; where there is none, none comes to be."""
        own = self.gradients
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                before = own.get(id(variable))
                own[id(variable)] = gradient if before is None else before + gradient


@dataclass(slots=True)
class _Kept:
    """What the backward of a microbatch needs: what its forward had, and what is kept of what it computed."""

    weights: list[tf.Tensor]
    state: list[tf.Tensor]
    given: Named
    products: list[tf.Tensor]
    gradients: Named = field(default_factory=dict)
    recorded: Recorded | None = None
    marks: Sequence[Mark] = ()

    def arrays(self) -> list[Array]:
        """Return the memory that is another microbatch's after the backward."""
        return _of_messages([*self.given.values(), *self.gradients.values()])


class TensorflowStage:
    """One stage on this rank.

    takes, gives: the names of the values of each link, by the other stage. outputs: the names of the model's outputs,
    on the last stage; masks: of the masks that some of them have. again: backwards compute their forward again, instead
    of keeping its activations; keeps_products: but not its products; layers_again: or only these layers.
    statistics: what makes moving statistics those of
    whole batches, if they are to be. versions: weights are updated while a batch is under way. checks_rows:
    microbatches are to give what the batch would.
    """

    def __init__(
        self,
        number: int,
        part: Part,
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
        self._sent = tuple(dict.fromkeys(name for names in gives.values() for name in names))
        self.batch = Batch()
        """Set before each run."""
        self._kept: dict[int, _Kept] = {}
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
        """Begin anew, with the variables that are trainable now.

        update: updates this stage's weights, in schedules that do so while they run; for the others see
        `StageFunctions`.
        """
        wanted = [name for names in self._takes.values() for name in names]
        self.functions = StageFunctions(
            self.number, self.part, wanted=wanted, outputs=self._outputs, loss=loss, regularized=regularized,
            shared=shared, again=self._again, layers_again=self._layers_again, keeps_products=self._keeps_products,
            eager=eager, versions=self._versions,
        )  # fmt: skip
        """What is computed."""
        self._update, self._eager = update, eager
        self._look = RowsLook(self.number, self.part, outputs=self._outputs, checks=self._checks_rows)

    @property
    def fault(self) -> str:
        """What is wrong with taking microbatches instead of the batch, if that was seen; else ""."""
        return self._look.fault

    def clear(self) -> None:
        """Forget what is under way."""
        self._kept.clear()
        self._look.end()
        self.batch = Batch()

    # What the runner calls

    def forward(self, microbatch: int, inputs: ByStage) -> ByStage:
        """See `commlib.pipeline.stage.Stage`."""
        batch = self.batch
        given: Named = {} if self._takes else dict(batch.inputs[microbatch])
        for source, values in inputs.items():
            tensors = [_copied(tensor) for tensor in values.tensors] if self._eager else values.tensors
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
            made, recorded = functions.record(*arguments, has_loss=has_loss)
        else:
            made = functions.forward(*arguments, training=batch.is_training, has_loss=batch.has_loss_of(microbatch))
        results, loss, extra, changed, products = made
        if batch.is_training:
            kept = self._kept[microbatch] = _Kept(weights, state, given, products, recorded=recorded)
            kept.marks = () if functions.again is None else functions.again.marks
        count = batch.rows[microbatch]
        if batch.has_loss and count:
            now = [old if new is None else new for old, new in zip((*weights, *state), changed, strict=True)]
            self._look.see(functions, count, given, (weights, before, now), extra, training=batch.is_training)
        # What came in a message lies in memory that the next one may use.
        arrays = _of_messages([tensor for values in inputs.values() for tensor in values.tensors])
        changed = [None if value is None else _own(value, arrays) for value in changed]
        if statistics is not None:
            changed = statistics.take(functions.variables, changed, batch.rows[microbatch])
        self._values.write(functions.variables, changed)
        if loss is not None:
            batch.losses[microbatch] = _own(loss, arrays)
        if extra is not None:
            batch.extras[self.number, microbatch] = _own(extra, arrays), self._look.sums(extra, batch.is_training)
        if self._outputs and (batch.keeps_outputs or (batch.looks and self._is_looked_at(results))):
            batch.outputs[microbatch] = [_own(results[name], arrays) for name in (*self._outputs, *self._masks)]
        sent = {name: _own(results[name], arrays) for name in self._sent}
        return {target: Values([sent[name] for name in names]) for target, names in self._gives.items()}

    def backward(self, microbatch: int, gradients: ByStage, *, final: bool) -> ByStage:
        """See `commlib.pipeline.stage.Stage`."""
        kept = self._kept.pop(microbatch)
        kept.gradients = self._summed(gradients)
        if kept.recorded is not None:
            of_weights, of_inputs = kept.recorded.backward(kept.gradients, self._shares(microbatch))
        else:
            of_weights, of_inputs = self._differentiate(microbatch, kept, weights=True, inputs=bool(self._takes))
        self._add(of_weights, kept)
        return self._to_sources(of_inputs, kept)

    def backward_input(self, microbatch: int, gradients: ByStage) -> ByStage:
        """See `commlib.pipeline.stage.Stage`."""
        kept = self._kept[microbatch]
        kept.gradients = self._summed(gradients)
        if not self._takes:
            return {}
        _, of_inputs = self._differentiate(microbatch, kept, weights=False, inputs=True)
        return self._to_sources(of_inputs, kept)

    def backward_weight(self, microbatch: int, *, final: bool) -> None:
        """See `commlib.pipeline.stage.Stage`."""
        kept = self._kept.pop(microbatch)
        of_weights, _ = self._differentiate(microbatch, kept, weights=True, inputs=False)
        self._add(of_weights, kept)

    def reduce(self) -> None:
        """Let go of the gradients that are complete, if they are reduced by stages; else the optimizer reduces all."""
        batch = self.batch
        if batch.reduction is not None:
            batch.penalties[self.number] = self.regularization(gradients=True)
            batch.reduction.give(self.number, batch.gradients)

    def step(self) -> None:
        """Update the weights."""
        assert self._update is not None
        self._update(self)

    def use(self, version: int) -> None:
        """Compute with the weights after so many updates of this run."""
        self._values.use(version)

    def regularization(self, *, gradients: bool) -> float:
        """Return the regularisers' loss, which counts once in an update, and add its gradients to the batch's."""
        functions = self.functions
        if not functions.regularized:
            return 0.0
        weights = self._values.read(functions.regularized)
        loss, found = functions.regularize(weights, tf.constant(self.batch.scale, tf.float64))
        if gradients:
            self.batch.add(functions.regularized, found)
        return float(loss)

    def _is_looked_at(self, results: Named) -> bool:
        """Return whether another microbatch's outputs are kept to look at: two, or as many as there is memory for."""
        kept = len(self.batch.outputs)
        size = sum(int(tf.size(results[name])) * results[name].dtype.size for name in self._outputs)
        return kept < 2 or (kept + 1) * size <= KEPT

    def _target(self, microbatch: int) -> tuple[Any, Any]:
        batch = self.batch
        if not (self._outputs and batch.targets):
            return None, None
        return batch.targets[microbatch], batch.sample_weights[microbatch]

    def _shares(self, microbatch: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what the gradients of a microbatch's loss, and of those that layers add, are multiplied by."""
        batch = self.batch
        share = batch.shares[microbatch] if batch.shares else 0.0
        _, sums = batch.extras.get((self.number, microbatch), (None, ()))
        of_added = np.where(np.array(sums, bool), 1.0, batch.row_shares[microbatch]) * batch.scale
        return tf.constant(share * batch.scale, tf.float64), tf.constant(of_added, tf.float64)

    def _differentiate(
        self, microbatch: int, kept: _Kept, *, weights: bool, inputs: bool
    ) -> tuple[list[tf.Tensor | None], Named]:
        found: tuple[list[tf.Tensor | None], Named] = self.functions.backward(
            kept.weights, kept.state, kept.given, kept.gradients, *self._target(microbatch),
            self._shares(microbatch), kept.products, has_loss=self.batch.has_loss_of(microbatch),
            wants_weights=weights, wants_inputs=inputs,
        )  # fmt: skip
        if kept.marks and self.functions.again is not None:
            self.functions.again.check(kept.marks)
        return found

    # Gradients to and from other stages

    def _summed(self, gradients: ByStage) -> Named:
        """Return the gradients of what was sent, by name. A value that several stages took has several."""
        found: Named = {}
        for target, values in gradients.items():
            for name, gradient in zip(self._gives[target], values.tensors, strict=True):
                if gradient is not None:
                    found[name] = found[name] + gradient if name in found else gradient
        return found

    def _add(self, of_weights: Sequence[tf.Tensor | None], kept: _Kept) -> None:
        """Add to the gradients of weights. One may be that of a result itself, where a microbatch has one row."""
        arrays = kept.arrays()
        own = [None if gradient is None else _own(gradient, arrays) for gradient in of_weights]
        self.batch.add(self.functions.trainable, own)

    def _to_sources(self, of_inputs: Named, kept: _Kept) -> dict[int, Values]:
        arrays = kept.arrays()
        found = {name: None if value is None else _own(value, arrays) for name, value in of_inputs.items()}
        return {source: Values([found.get(name) for name in names]) for source, names in self._takes.items()}


def _of_messages(tensors: Sequence[tf.Tensor]) -> list[Array]:
    """Return the memory of tensors that may be a message's, which the next one uses: that of a device is not."""
    return [to_array(tensor) for tensor in tensors if device_of(tensor) is None]


def _copied(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor with memory of its own: a layer that is not compiled may keep what it is given."""
    return tensor if device_of(tensor) is not None else tf.convert_to_tensor(np.array(to_array(tensor)))


def _own(tensor: tf.Tensor, arrays: Sequence[Array]) -> tf.Tensor:
    """Return a tensor that has memory of its own: a copy, if it lies in one of `arrays`."""
    if not arrays or device_of(tensor) is not None:
        return tensor
    array = to_array(tensor)
    if any(np.may_share_memory(array, other) for other in arrays):
        return tf.convert_to_tensor(np.array(array))
    return tensor
