"""Reports show the cost of communication in each step."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from commlib_torch import Compression, DistributedOptimizer

from .oracle import batch, loss_of, mine, model

FIELDS = ("exposed_seconds", "hidden_seconds", "sent_bytes", "uncompressed_bytes")


@pytest.mark.parametrize("overlap", [True, False])
def test_reports_add_up_to_the_statistics(comm: Any, overlap: bool) -> None:
    network = model()
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1), overlap=overlap, bucket_cap_mib=1e-4
    )
    assert optimizer.report is None
    reports: list[Any] = []
    started = time.perf_counter()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(network, mine(comm, batch(comm, step))).backward()
        time.sleep(0.01)
        optimizer.step()
        reports.append(optimizer.report)
    elapsed = time.perf_counter() - started
    assert [report.step for report in reports] == [1, 2, 3]
    for report in reports:
        assert report.seconds == pytest.approx(report.compute_seconds + report.exposed_seconds)
        assert report.compute_seconds >= 0.01
        assert (report.exposed_seconds > 0) == (comm.size > 1)
    assert sum(report.seconds for report in reports[1:]) <= elapsed
    for field in FIELDS:
        total = sum(getattr(report, field) for report in reports)
        assert total == pytest.approx(getattr(optimizer.statistics, field), rel=1e-12)
    nbytes = optimizer.statistics.nbytes // 3
    expected = 2 * (comm.size - 1) / comm.size * nbytes
    buckets = len(optimizer.reducer.buckets)
    assert abs(reports[0].sent_bytes - expected) <= buckets  # each is rounded down
    assert reports[0].sent_bytes == reports[1].sent_bytes == reports[1].uncompressed_bytes


@pytest.mark.ranks(min=2)
def test_half_precision_sends_half(comm: Any) -> None:
    parameter = nn.Parameter(torch.zeros(100_000))
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], compression=Compression.bf16
    )
    parameter.sum().backward()
    optimizer.step()
    report = optimizer.report
    share = 2 * (comm.size - 1) / comm.size
    assert 0 <= report.sent_bytes - share * 200_000 <= share * 128  # a flag, and padding
    assert abs(report.uncompressed_bytes - report.sent_bytes - share * 200_000) <= 1


@pytest.mark.ranks(min=2)
def test_separate_transfers_count_too(comm: Any) -> None:
    class Halves:
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            return tensor.half(), None

        def decompress(self, tensor: torch.Tensor, ctx: None) -> torch.Tensor:
            return tensor.float()

    share = 2 * (comm.size - 1) / comm.size
    dense = nn.Parameter(torch.zeros(50_000))
    optimizer: Any = DistributedOptimizer(torch.optim.SGD([dense], lr=0.1), [("w", dense)], compression=Halves())
    dense.sum().backward()
    optimizer.step()
    assert 0 <= optimizer.report.sent_bytes - share * 100_000 <= share * 128
    assert 0 <= optimizer.report.uncompressed_bytes - share * 200_000 <= share * 128

    table = nn.Embedding(10, 25, sparse=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
    for _ in range(2):  # the first step still sends zeros for it
        table(torch.tensor([1, 2, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = (comm.size - 1) * 2 * (25 * 4 + 8)  # two rows and their numbers, to each other rank
    assert 0 <= optimizer.report.sent_bytes - rows <= share * 128


def test_add_param_group_continues_the_counts(comm: Any) -> None:
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(network[0].parameters(), lr=0.1), network.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(network, mine(comm, batch(comm, step))).backward()
        optimizer.step()
        if step == 0:
            optimizer.add_param_group({"params": list(network[2].parameters())})
            assert optimizer.report.step == 1
    assert optimizer.report.step == 2
    assert optimizer.report.uncompressed_bytes < optimizer.statistics.uncompressed_bytes or comm.size == 1
