"""Bootstrap: ranks join over any transport; settings are compared first."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from commlib import bootstrap
from commlib.config.settings import Config
from commlib.errors import MismatchError, UsageError
from commlib.transport.loopback import transports


def on_ranks(size, function, nodes=None):
    """Run function(transport) on ranks that are threads; return what each returned, or raised."""
    results = {}

    def main(transport):
        try:
            results[transport.rank] = function(transport)
        except Exception as error:
            results[transport.rank] = error

    threads = [threading.Thread(target=main, args=(end,), daemon=True) for end in transports(size, nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == list(range(size))
    return [results[rank] for rank in range(size)]


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 0]])
def test_ranks_join_over_any_transport(nodes):
    def check(transport):
        agreement = bootstrap.agree(transport, Config(timeout=10))
        comm = bootstrap.join(transport, Config(timeout=10), agreement)
        total = comm.all_reduce(np.full(3, comm.rank + 1.0))
        return agreement.token, comm.runtime.token, comm.runtime.ranks_on_node, comm.name, total.tolist()

    size = len(nodes)
    results = on_ranks(size, check, nodes)
    assert len({token for token, *_ in results}) == 1
    for rank, (token, of_runtime, ranks_on_node, name, total) in enumerate(results):
        assert (of_runtime, name) == (token, "world")
        assert ranks_on_node == nodes.count(nodes[rank])
        assert total == [size * (size + 1) / 2] * 3


def test_settings_that_differ_are_named_on_all_ranks():
    def check(transport):
        return bootstrap.agree(transport, replace(Config(), slot_kib=512 if transport.rank < 2 else 64))

    for error in on_ranks(3, check):
        assert isinstance(error, MismatchError)
        assert "COMMLIB_SLOT_KIB: 512 on ranks 0-1; 64 on rank 2" in str(error)


def test_a_bad_setting_of_one_rank_is_an_error_on_all():
    def check(transport):
        return bootstrap.agree(transport, Config(), "COMMLIB_X is nonsense" if transport.rank == 1 else "")

    for error in on_ranks(3, check):
        assert isinstance(error, UsageError) and "COMMLIB_X is nonsense (rank 1)" in str(error)


def test_only_rank_0_reads_the_tuning_table(tmp_path):
    """All ranks have rank 0's, or its error."""
    bad = tmp_path / "table.json"
    bad.write_text("{")

    def check(transport):
        return bootstrap.agree(transport, Config(tuning_file=str(bad)))

    errors = on_ranks(2, check)
    assert len({(type(error), str(error)) for error in errors}) == 1 and "table.json" in str(errors[0])


PROGRAM = """
import sys
import numpy as np
import commlib
from commlib.transport.loopback import transports

try:
    commlib.init(object(), transport=transports(1)[0])
except commlib.UsageError as error:
    print(error)
for _ in range(2):
    comm = commlib.init(transport=transports(1)[0])
    assert commlib.world() is comm and commlib.init() is comm
    print(comm.all_reduce(np.ones(2)))
    try:
        commlib.init(transport=transports(1)[0])
    except commlib.UsageError as error:
        print(error)
    commlib.init(defaults={"COMMLIB_TIMEOUT": "0"})
    try:
        commlib.init(defaults={"COMMLIB_TIMEOUT": "7"})
    except commlib.UsageError as error:
        print(error)
    commlib.shutdown()
print("mpi4py" in sys.modules)
"""


def test_a_world_can_use_another_transport():
    """MPI is not started."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "init: give comm or transport, not both"
    assert lines[1:6:3] == ["[1. 1.]"] * 2 and "initialised already" in lines[2]
    assert "initialised already with COMMLIB_TIMEOUT=0, but the argument defaults has 7" in lines[3]
    assert lines[-1] == "False" and not done.stderr
