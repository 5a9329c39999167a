"""Write the tables of docs/pages/composition.md: features that combine, each pair with the test that shows it.

python docs/composition.py         # after a change of PAIRS; a unit test compares the page, and collects the tests
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

PAGE = Path(__file__).parent / "pages" / "composition.md"
BEGIN, END = "<!-- begin: written by docs/composition.py -->", "<!-- end -->"

FEATURES = {
    "DP": "data parallelism: `DistributedOptimizer` over the axis dp",
    "PP": "stages: `pipeline`",
    "TP": "sharded layers: `parallelize`",
    "CP": "sharded sequences: `context.attention`",
    "EP": "experts: `expertize`, `MoE`",
    "compression": "a codec: `compression=` for gradients, `codec=` for activations",
    "AMP": "autocast, or Keras' mixed precision, with loss scaling",
    "recompute": "activations recomputed in the backward",
    "compile": "`torch.compile`; in Keras `fit` in a graph",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two features that work together (`test` shows it), or are refused (`refusal` shows it, for `reason`), or both.

    Tests are pytest node ids. Both: the pair works, except for what `reason` names.
    """

    test: str = ""
    refusal: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        if not (self.test or self.refusal) or bool(self.refusal) != bool(self.reason):
            raise ValueError(f"{self}: expected a test, or a refusal with its reason, or both")

    def verdict(self) -> str:
        """Return the text of a cell."""
        return {(True, False): "works", (False, True): "refused", (True, True): "works, with limits"}[
            bool(self.test), bool(self.refusal)
        ]


Pairs = Mapping[tuple[str, str], Pair]

_T, _K = "tests/torch_adapter/", "tests/tensorflow_adapter/"

_TOGETHER = _T + "test_composition.py::test_pairs"
_TOGETHER_KERAS = _K + "test_composition.py::test_pairs"

_SCALER = "`torch.amp.GradScaler`: a rank would skip a step alone; use `ct.GradScaler`"
_XLA = "`jit_compile=True`: XLA cannot call host functions"

TORCH: Pairs = {
    ("DP", "PP"): Pair(_T + "test_pipeline_replicas.py::test_as_one_process_with_the_whole_batch"),
    ("DP", "TP"): Pair(_T + "test_tensor_mesh.py::test_replicas"),
    ("DP", "CP"): Pair(_T + "test_tensor_pairs.py::test_pairs[dp cp]"),
    ("DP", "EP"): Pair(_T + "test_moe_training.py::test_as_one_process"),
    ("DP", "compression"): Pair(_T + "test_compression.py::test_int8_is_close_to_training_without"),
    ("DP", "AMP"): Pair(_TOGETHER + "[dp amp]"),
    ("DP", "recompute"): Pair(_T + "test_training.py::test_activation_checkpointing"),
    ("DP", "compile"): Pair(
        _T + "test_compiled.py::test_a_whole_step",
        _T + "test_compiled.py::test_compiled_autograd_is_refused_by_name",
        "compiled autograd: it does not run the hooks that end a backward",
    ),
    ("PP", "TP"): Pair(_T + "test_tensor_mesh.py::test_stages"),
    ("PP", "CP"): Pair(_T + "test_tensor_pairs.py::test_pairs[pp cp]"),
    ("PP", "EP"): Pair(_T + "test_moe_training.py::test_stages"),
    ("PP", "compression"): Pair(_T + "test_pipeline.py::test_activations_travel_encoded"),
    ("PP", "AMP"): Pair(
        _T + "test_composition.py::test_stages_under_autocast",
        _T + "test_pipeline_errors.py::test_a_loss_scale_of_one_rank_is_refused",
        _SCALER,
    ),
    ("PP", "recompute"): Pair(_T + "test_pipeline.py::test_recomputed_activations"),
    ("PP", "compile"): Pair(
        _T + "test_compiled.py::test_a_step_of_a_pipeline",
        _T + "test_pipeline_errors.py::test_models_that_are_not_ready_are_refused_with_what_to_do",
        "a compiled model cannot be cut: pass the original, and compile its layers, or `pipe.step`",
    ),
    ("TP", "CP"): Pair(_T + "test_tensor_pairs.py::test_pairs[cp tp]"),
    ("TP", "EP"): Pair(_T + "test_moe_training.py::test_divided_experts"),
    ("TP", "compression"): Pair(_T + "test_tensor_linear.py::test_codec"),
    ("TP", "AMP"): Pair(
        _T + "test_tensor_linear.py::test_training_in_float32_and_autocast",
        _T + "test_tensor_mesh.py::test_a_loss_scale_of_one_rank_is_refused[parts]",
        _SCALER,
    ),
    ("TP", "recompute"): Pair(_T + "test_tensor_streams.py::test_recomputation_draws_the_same"),
    ("TP", "compile"): Pair(
        _T + "test_tensor_streams.py::test_compiled_models",
        _T + "test_tensor_first_calls.py::test_one_graph_is_refused",
        "`fullgraph=True`: graphs break around communication",
    ),
    ("CP", "EP"): Pair(_TOGETHER + "[cp ep]"),
    ("CP", "compression"): Pair(_TOGETHER + "[cp compression]"),
    ("CP", "AMP"): Pair(_TOGETHER + "[cp amp]"),
    ("CP", "recompute"): Pair(_T + "test_tensor_context.py::test_recomputed_and_compiled"),
    ("CP", "compile"): Pair(_T + "test_tensor_context.py::test_recomputed_and_compiled"),
    ("EP", "compression"): Pair(_TOGETHER + "[ep compression]"),
    ("EP", "AMP"): Pair(
        _T + "test_moe.py::test_half_precision",
        _T + "test_tensor_mesh.py::test_a_loss_scale_of_one_rank_is_refused[experts]",
        _SCALER,
    ),
    ("EP", "recompute"): Pair(_T + "test_moe_losses.py::test_checkpoints_change_nothing"),
    ("EP", "compile"): Pair(_TOGETHER + "[ep compile]"),
    ("compression", "AMP"): Pair(_TOGETHER + "[compression amp]"),
    ("compression", "recompute"): Pair(_TOGETHER + "[compression recompute]"),
    ("compression", "compile"): Pair(_TOGETHER + "[compression compile]"),
    ("AMP", "recompute"): Pair(_TOGETHER + "[amp recompute]"),
    ("AMP", "compile"): Pair(_TOGETHER + "[amp compile]"),
    ("recompute", "compile"): Pair(_TOGETHER + "[recompute compile]"),
}

KERAS: Pairs = {
    ("DP", "PP"): Pair(_K + "test_pipeline_replicas.py::test_fit_matches_one_process"),
    ("DP", "TP"): Pair(_K + "test_tensor_mesh.py::test_replicas"),
    ("DP", "CP"): Pair(_K + "test_tensor_pairs.py::test_pairs[dp cp]"),
    ("DP", "EP"): Pair(_K + "test_moe_training.py::test_fit_matches_one_process"),
    ("DP", "compression"): Pair(_K + "test_compression.py::test_int8_is_close_to_training_without"),
    ("DP", "AMP"): Pair(_K + "test_keras_precision.py::test_fit_in_mixed_precision"),
    ("DP", "recompute"): Pair(_TOGETHER_KERAS + "[dp recompute]"),
    ("DP", "compile"): Pair(
        _K + "test_keras_optimizer.py::test_fit_equals_one_process",
        _K + "test_keras_optimizer.py::test_compiling_with_xla_is_refused",
        _XLA,
    ),
    ("PP", "TP"): Pair(_K + "test_tensor_state.py::test_stages"),
    ("PP", "CP"): Pair(_K + "test_tensor_pairs.py::test_pairs[pp cp]"),
    ("PP", "EP"): Pair(_K + "test_moe_training.py::test_stages"),
    ("PP", "compression"): Pair(_K + "test_pipeline.py::test_short_floats_and_codecs"),
    ("PP", "AMP"): Pair(
        _K + "test_pipeline_recompute_layers.py::test_masks_loops_and_short_floats[mixed_bfloat16]",
        _K + "test_pipeline.py::test_invalid_arguments_are_refused",
        "`LossScaleOptimizer`: use `mixed_bfloat16`, which needs no loss scaling",
    ),
    ("PP", "recompute"): Pair(_K + "test_pipeline_recompute_layers.py::test_single_layers"),
    ("PP", "compile"): Pair(
        _K + "test_pipeline.py::test_fit_matches_one_process",
        _K + "test_pipeline.py::test_invalid_arguments_are_refused",
        _XLA,
    ),
    ("TP", "CP"): Pair(_K + "test_tensor_pairs.py::test_pairs[cp tp]"),
    ("TP", "EP"): Pair(_K + "test_moe_training.py::test_divided_experts"),
    ("TP", "compression"): Pair(_K + "test_tensor_parallelize.py::test_a_codec"),
    ("TP", "AMP"): Pair(_K + "test_tensor_mesh.py::test_float16_training"),
    ("TP", "recompute"): Pair(_K + "test_tensor_mesh.py::test_recomputed_layers"),
    ("TP", "compile"): Pair(_K + "test_tensor_parallelize.py::test_fit"),
    ("CP", "EP"): Pair(_TOGETHER_KERAS + "[cp ep]"),
    ("CP", "compression"): Pair(_TOGETHER_KERAS + "[cp compression]"),
    ("CP", "AMP"): Pair(_TOGETHER_KERAS + "[cp amp]"),
    ("CP", "recompute"): Pair(_K + "test_tensor_context.py::test_recomputed"),
    ("CP", "compile"): Pair(_K + "test_tensor_context.py::test_fit_matches_one_process"),
    ("EP", "compression"): Pair(_TOGETHER_KERAS + "[ep compression]"),
    ("EP", "AMP"): Pair(_K + "test_moe.py::test_mixed_precision"),
    ("EP", "recompute"): Pair(
        _K + "test_moe_again.py::test_recompute_grad",
        _K + "test_moe_again.py::test_recomputation_with_side_effects_is_refused",
        "`tf.recompute_grad` around a router with a loss, noise or a mask: TensorFlow would lose these",
    ),
    ("EP", "compile"): Pair(_K + "test_moe_training.py::test_fit_matches_one_process"),
    ("compression", "AMP"): Pair(_TOGETHER_KERAS + "[compression amp]"),
    ("compression", "recompute"): Pair(_TOGETHER_KERAS + "[compression recompute]"),
    ("compression", "compile"): Pair(_K + "test_compression.py::test_keras_trains_and_ranks_stay_equal"),
    ("AMP", "recompute"): Pair(_TOGETHER_KERAS + "[amp recompute]"),
    ("AMP", "compile"): Pair(_K + "test_keras_precision.py::test_fit_in_mixed_precision"),
    ("recompute", "compile"): Pair(_TOGETHER_KERAS + "[dp recompute]"),
}

FRAMEWORKS = {"PyTorch": TORCH, "Keras": KERAS}


def tests(pairs: Pairs) -> list[str]:
    """Return the node ids of all tests that the cells name."""
    return sorted({name for pair in pairs.values() for name in (pair.test, pair.refusal) if name})


def matrix(pairs: Pairs) -> list[str]:
    """Return the table of all pairs: a row and a column for each feature; each pair once."""
    names = list(FEATURES)
    lines = [f"| | {' | '.join(names[1:])} |", "|---" * len(names) + "|"]
    for place, row in enumerate(names[:-1]):
        cells = [
            ""
            if names.index(column) <= place
            else pairs[row, column].verdict()
            if (row, column) in pairs
            else "not tested"
            for column in names[1:]
        ]
        lines.append(f"| **{row}** | {' | '.join(cells)} |")
    return lines


def sources(pairs: Pairs) -> list[str]:
    """Return the table of tests, and of what is refused."""
    lines = ["| pair | shown by | refused |", "|---|---|---|"]
    for one, other in combinations(FEATURES, 2):
        pair = pairs.get((one, other))
        if pair is None:
            lines.append(f"| {one} x {other} | not tested | |")
            continue
        refused = f"{pair.reason} (`{pair.refusal}`)" if pair.refusal else ""
        lines.append(f"| {one} x {other} | {f'`{pair.test}`' if pair.test else ''} | {refused} |")
    return lines


def tables() -> str:
    """Return the generated part of the page."""
    parts = [["| feature | meaning |", "|---|---|", *(f"| {name} | {text} |" for name, text in FEATURES.items())]]
    for framework, pairs in FRAMEWORKS.items():
        if strange := [each for each in pairs if each not in combinations(FEATURES, 2)]:
            raise ValueError(f"{framework}: expected pairs of features, in their order, got {strange}")
        parts += [[f"## {framework}"], matrix(pairs), [f"### Tests of {framework}"], sources(pairs)]
    return "\n\n".join("\n".join(part) for part in parts)


def page(text: str) -> str:
    """Return the text of the page with the current tables."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE}")
