"""A misspelled name gets the nearest known name, wherever names are given as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import commlib
from commlib.arguments import missing_attribute, nearest, suggest
from commlib.bench.options import BenchOptions, check
from commlib.compress.registry import codec_of, scheme_of
from commlib.config.settings import load
from commlib.data_parallel.options import Options
from commlib.dtypes import kernel_operation
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib.mesh.shape import MeshShape
from commlib.pipeline.choice import check_batch_norm
from commlib.pipeline.schedule import registry as pipeline_schedules
from commlib.schedule import registry as schedules
from commlib.tensor_parallel import Column, Row
from commlib.tensor_parallel.plan import resolve

CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "operation": (lambda: kernel_operation("float32", "men"), "did you mean 'mean'"),
    "reduction of gradients": (lambda: Options("meen"), "got 'meen'; did you mean 'mean'"),
    "verb": (lambda: schedules.find("allreduce", "ring"), "did you mean 'all_reduce'"),
    "algorithm": (lambda: schedules.find("all_reduce", "rign"), "did you mean 'ring'"),
    "schedule": (lambda: pipeline_schedules.find("1f1bb"), "did you mean '1f1b'"),
    "batch norm": (lambda: check_batch_norm("microbach"), "did you mean 'microbatch'"),
    "codec": (lambda: codec_of("int88"), "did you mean 'int8'"),
    "compression": (lambda: scheme_of("power_sdg"), "did you mean 'powersgd'"),
    "option of a codec": (lambda: scheme_of("topk:ratoi=0.1"), "did you mean 'ratio'"),
    "experts": (lambda: Experts(8, scores="sofmax"), "did you mean 'softmax'"),  # type: ignore[arg-type]
    "style": (lambda: resolve({"a": "kolumn"}, ["a"], (Column, Row)), r"did you mean Column\(\)"),
    "axis": (lambda: MeshShape.of({"data": 2, "model": 2}, 4).find("modl"), "did you mean 'model'"),
    "verb of bench": (lambda: check(BenchOptions("al_reduce"), 2), "did you mean 'all_reduce'"),
    "setting": (lambda: load({"COMMLIB_TIMEOUTT": "3"}), r"COMMLIB_TIMEOUTT \(did you mean COMMLIB_TIMEOUT\?\); known"),
    "value of a setting": (lambda: load({"COMMLIB_CHECK": "alwayss"}), "did you mean 'always'"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_misspelled_name_gets_the_nearest_one(case: str) -> None:
    call, text = CALLS[case]
    with pytest.raises(UsageError, match=text):
        call()


def test_case_and_separators_do_not_count() -> None:
    assert nearest("ALL-REDUCE", ["all_reduce", "all_gather"]) == "all_reduce"
    assert suggest("Mean", ("sum", "mean")) == "; did you mean 'mean'?"


def test_a_name_unlike_any_other_gets_no_suggestion() -> None:
    assert suggest("xyz", ("sum", "mean")) == "" == suggest(None, ())


def test_tools_that_probe_for_special_names_get_no_suggestion() -> None:
    assert str(missing_attribute("module 'm'", "__al__", ["__all__"])) == "module 'm' has no attribute '__al__'"


def test_a_verb_of_the_module_points_at_the_communicator() -> None:
    with pytest.raises(AttributeError, match=r"'allreduce': the verbs are methods .* commlib\.init\(\)\.all_reduce"):
        commlib.allreduce  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'shutdown'"):
        commlib.shut_down  # type: ignore[attr-defined]  # noqa: B018


def test_of_names_with_the_same_letters_the_nearest_is_suggested() -> None:
    """They are different operations: all_reduce sums, allreduce averages, and allreduce_ overwrites."""
    known = ("all_reduce", "all_reduce_", "allreduce", "allreduce_")
    assert nearest("all_reduc", known) == "all_reduce"
    assert nearest("allreduc", known) == "allreduce"
