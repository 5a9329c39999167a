"""OperationRecorder: record the operations of a graph, and the logged calls, as the steps of a trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from commlib.tensor_parallel.recording import StepRecording
from commlib_tensorflow.tensor import _leaves
from commlib_tensorflow.tensor._conditions import deciding_tensors
from commlib_tensorflow.tensor._held_tensors import WRITES
from commlib_tensorflow.tensor._operations import (
    CALLS,
    SOURCES,
    describe_call,
    describe_identity,
    has_own_gradient,
    is_discrete,
    shape_of,
)
from commlib_tensorflow.tensor._shard_trial import try_on_shards
from commlib_tensorflow.tensor._trace_calls import CallLog, GraphCall
from commlib_tensorflow.tensor._trace_lengths import RequestedLengths
from commlib_tensorflow.tensor._trace_lines import line_of
from commlib_tensorflow.tensor._trace_retained import HANDLES, RetainedValues


class OperationRecorder:
    """Records a graph after the call of the model. tries: layers on sequence shards are tried on shards."""

    def __init__(
        self,
        recording: StepRecording,
        log: CallLog,
        retained: RetainedValues,
        lengths: RequestedLengths,
        styles: Collection[str],
        *,
        tries: bool,
    ) -> None:
        self._recording, self._log, self._retained, self._lengths = recording, log, retained, lengths
        self._styles, self._tries = styles, tries
        self.communicates = False
        """Ranks communicated outside of layers."""
        self.is_custom = False
        """A function between layers has a custom gradient."""

    def record(self, first: int, *, training: bool) -> None:
        """Record the operations from `first` on, in order: leaf layers as one step, other operations one by one.

        training: of the call of the model.
        """
        ops = self._log.graph.get_operations()
        leaves = iter([*(call for call in self._log.calls if call.leaf), None])
        leaf, at = next(leaves), first
        while at < len(ops) or leaf is not None:
            if leaf is not None and leaf.first <= at:
                self._leaf(leaf, training=training)
                at, leaf = max(at, leaf.last), next(leaves)
            elif at < len(ops):
                self._operation(ops[at], at)
                at += 1
            else:
                break

    def _leaf(self, call: GraphCall, *, training: bool) -> None:
        if call.fields is not None:
            fields = self._lengths.describe(call.fields, call.inputs[0]) if call.inputs else call.fields
            self._recording.add(call.name, outputs=call.results, text=call.text, place=call.place, **fields)
            return
        if call.layer is None:
            self.communicates = True
            self._recording.add("", "unseen", (), call.results, text="a function between ranks")
            return
        if not call.inputs:
            return
        fields = _leaves.describe_leaf(call.layer, call.inputs[0])
        if fields["kind"] == "unknown":  # a user's layer
            within = self._log.graph.get_operations()[call.first : call.last]
            self.communicates |= any(op.type in CALLS for op in within)
        if self._tries and fields["kind"] == "unknown" and isinstance(self._styles, Mapping):
            style, (args, options) = self._styles.get(call.name), call.arguments
            fields |= try_on_shards(style, call.layer, args, options, training=training)
        text = type(call.layer).__name__
        self._recording.add(call.name, inputs=call.inputs, outputs=call.results, text=text, place=call.place, **fields)

    def _operation(self, op: Any, at: int) -> None:
        if op.type in WRITES:
            self._retained.note_assignment(op.inputs[-1], "what is assigned to a variable")
        if not op.outputs or op.type in SOURCES or op.outputs[0].dtype in HANDLES:
            return
        inside = [call.name for call in self._log.calls if not call.leaf and call.first <= at < call.last]
        text = f"{op.type} in {inside[-1] if inside else 'the model'}"
        self.communicates |= op.type in CALLS
        is_custom = has_own_gradient(op)
        self.is_custom |= is_custom
        if op.type == "IdentityN":
            text = text.replace(op.type, "a custom_gradient") if is_custom else text
            for tensor, result in zip(op.inputs, op.outputs, strict=True):
                if tensor.op.type in ("ReadVariableOp", "Placeholder") and not result.consumers():
                    continue  # functions with custom gradients pass on the variables they used
                fields = describe_identity(tensor) or {"kind": "unknown", "inputs": (tensor,)}
                fields["kind"] = "unknown" if is_custom else fields["kind"]
                self._recording.add("", outputs=(result,), text=text, place=line_of(op), **fields)
            return
        for tensor in deciding_tensors(op):
            counter = [one for one in op.inputs if is_discrete(one)][:1]  # marks it as discrete, even a float
            text = f"the condition of {op.type} in {inside[-1] if inside else 'the model'}"
            self._recording.add("", "number", (tensor, *counter), (), text=text, place=line_of(op))
        fields = describe_call(op)
        if op.name in self._lengths.requested and fields["kind"] != "unknown":
            lengths = self._lengths.requested[op.name]
            if op.type != "Tile":
                fields["requested"] = lengths
            elif all(1 in both for both in zip(lengths, shape_of(op.inputs[0]), strict=True)):  # else the order differs
                fields = self._lengths.describe({**fields, "times": lengths}, op.inputs[0])
        self._recording.add("", outputs=op.outputs, text=text, place=line_of(op), **fields)
        if op.type in ("StopGradient", "PreventGradient"):
            self._recording.detach(op.outputs[0])
