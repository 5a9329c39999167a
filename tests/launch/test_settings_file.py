"""The settings file in a job: every rank reads it, and a rank that reads another one is named."""

from __future__ import annotations

import pytest

RANK = "import os\nrank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK', '0')))\n"


@pytest.mark.any_mpi
def test_different_files_are_named_and_one_file_is_used_by_all(mpirun, tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("slot_kib = 64\nlog_level = 'error'\n")
    second.write_text("slot_kib = 32\n")
    program = f"""{RANK}
os.environ["COMMLIB_CONFIG"] = {str(first)!r} if rank == 0 else {str(second)!r}
import commlib
try:
    commlib.init()
except commlib.MismatchError as error:
    print(str(error).splitlines()[1], flush=True)
os.environ["COMMLIB_CONFIG"] = {str(first)!r}
print(commlib.init().config.slot_kib, flush=True)
"""
    done = mpirun(2, program)
    assert done.returncode == 0, done.stderr
    line = f"  COMMLIB_SLOT_KIB: 64 (file {first}) on rank 0; 32 (file {second}) on rank 1"
    assert sorted(done.stdout.splitlines()) == [line, line, "64", "64"]
