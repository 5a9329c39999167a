"""Sizes, defaults, and what is refused before anything is measured."""

from __future__ import annotations

import pytest

from commlib.bench.options import DEFAULT_SIZES, BenchOptions, BenchOptionsError, check, parse_size, sizes_between
from commlib.bench.verbs import VERBS
from commlib.dtypes import DTYPES
from commlib.errors import UsageError


@pytest.mark.parametrize(
    "text, nbytes",
    [("1", 1), ("4096", 4096), ("4K", 4096), ("64k", 65536), (" 64M ", 64 << 20), ("2G", 2 << 30)],
)
def test_sizes_are_parsed(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "0K", "-4", "1.5K", "4KB", "4KiB", "K", "4T", "four", "4 K"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(BenchOptionsError, match="expected a positive whole number of bytes"):
        parse_size(text)


def test_a_range_of_sizes_has_the_sizes_between():
    assert sizes_between(4, 64, 4) == (4, 16, 64)
    assert sizes_between(4, 100, 4) == (4, 16, 64)
    assert sizes_between(3, 3, 2) == (3,)
    assert DEFAULT_SIZES[0] == 4 and DEFAULT_SIZES[-1] == 64 << 20
    with pytest.raises(BenchOptionsError, match="--factor is 1: expected at least 2"):
        sizes_between(4, 64, 1)
    with pytest.raises(BenchOptionsError, match="--begin 5 is more than --end 4"):
        sizes_between(5, 4, 2)


def test_defaults_match_common_use_of_the_verb():
    settings = check(BenchOptions("all_reduce"), 2)
    assert settings.in_place and settings.symmetric and settings.check
    assert (settings.sizes, settings.dtypes, settings.ops) == (DEFAULT_SIZES, ("float32",), ("sum",))
    assert (settings.peers, settings.algorithm, settings.root) == ((), "auto", 0)
    assert check(BenchOptions("broadcast"), 2).in_place
    assert not check(BenchOptions("all_gather"), 2).in_place
    assert check(BenchOptions("all_gather", in_place=True), 2).in_place
    assert not check(BenchOptions("all_reduce", in_place=False), 2).in_place
    assert check(BenchOptions("broadcast"), 2).ops == ("",)
    barrier = check(BenchOptions("barrier"), 2)
    assert barrier.sizes == (0,) and not barrier.symmetric


def test_repeated_options_are_measured_once():
    settings = check(BenchOptions("reduce", (8, 4, 8), ("int8", "int8"), ("max", "sum", "max"), ("mpi", "mpi")), 2)
    assert settings.sizes == (8, 4)
    assert (settings.dtypes, settings.ops, settings.peers) == (("int8",), ("max", "sum"), ("mpi",))


BAD = {
    "verb": (BenchOptions("all_redcue"), "verb 'all_redcue' is unknown; known are all_reduce, "),
    "word": (BenchOptions("sweeep"), "send_recv, barrier; did you mean 'sweep'?"),
    "dtype": (BenchOptions("all_reduce", dtypes=("float33",)), "--dtype 'float33' is unknown; known are float16, "),
    "op": (BenchOptions("all_reduce", ops=("avg",)), "unknown operation 'avg'; known are sum, "),
    "op of dtype": (BenchOptions("reduce", dtypes=("complex64",), ops=("min",)), "'min' is not defined for complex64"),
    "mean of bool": (BenchOptions("all_reduce", dtypes=("bool",), ops=("sum", "mean")), "the mean of bool arrays"),
    "peer": (BenchOptions("all_reduce", peers=("ucx",)), "--peer 'ucx' is unknown; known are mpi, pieces, gloo, nccl"),
    "device": (BenchOptions("all_reduce", device="tpu"), "--device 'tpu' is unknown; known are host, cuda"),
    "no arrays": (BenchOptions("barrier", device="cuda"), "--device cuda: a barrier has no arrays"),
    "nccl on the host": (BenchOptions("all_reduce", peers=("nccl",)), "--peer nccl is for --device cuda, not host"),
    "pieces on a GPU": (
        BenchOptions("all_reduce", peers=("pieces",), device="cuda"),
        "--peer pieces is for --device host, not cuda",
    ),
    "ordinary twice": (
        BenchOptions("all_reduce", peers=("ordinary",), symmetric=False),
        "--peer ordinary measures commlib on ordinary arrays next to symmetric ones",
    ),
    "format of an uneven exchange": (BenchOptions("all_to_all_v", format="osu"), "--format osu has no all_to_all_v"),
    "format of a scan": (BenchOptions("scan", format="nccl"), "--format nccl has no scan"),
    "pieces": (BenchOptions("broadcast", peers=("pieces",)), "broadcast has no such peer"),
    "root": (BenchOptions("broadcast", root=4), "--root is 4: expected a rank from 0 to 3"),
    "negative root": (BenchOptions("broadcast", root=-1), "--root is -1"),
    "rounds": (BenchOptions("barrier", rounds=0), "--rounds is 0: expected at least 1"),
    "no root": (BenchOptions("all_reduce", root=0), "all_reduce has no --root: leave it out"),
    "no op": (BenchOptions("all_gather", ops=("sum",)), "all_gather has no --op: leave it out"),
    "no plan": (BenchOptions("send_recv", plan=True), "send_recv has no --plan"),
    "no in-place": (BenchOptions("gather", in_place=True), "gather has no --in-place"),
    "no out-of-place": (BenchOptions("broadcast", in_place=False), "broadcast has no --out-of-place"),
    "no algorithm": (BenchOptions("send_recv", algorithm="ring"), "send_recv has no --algorithm"),
    "no size": (BenchOptions("barrier", sizes=(4,)), "barrier has no --size"),
    "no dtype": (BenchOptions("barrier", dtypes=("int8",)), "barrier has no --dtype"),
    "no buffers": (BenchOptions("barrier", symmetric=False), "barrier has no --symmetric"),
    "nothing to rewrite": (BenchOptions("barrier", fresh=True), "barrier has no --fresh"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused(case):
    options, message = BAD[case]
    with pytest.raises(BenchOptionsError, match=message) as caught:
        check(options, 4)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_settings(verb):
    assert check(BenchOptions(verb), 1).verb is VERBS[verb]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_known(dtype):
    assert check(BenchOptions("all_reduce", dtypes=(dtype,)), 1).dtypes == (dtype,)
