"""Every check on synthetic facts: it finds its trap, names ranks or hosts and a cure, and is silent otherwise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commlib.diagnosis.checks import CHECKS, problems
from commlib.diagnosis.facts import JobFacts, LaunchFacts, MeasuredLink, NetworkFacts, RankFacts
from commlib.diagnosis.problem import ERROR, NOTE, WARNING, Problem
from tests.inputs.facts import MPICH, OPEN_MPI, host, job, on_hosts, rank


def with_(**changes: Any) -> Any:
    return lambda rank: replace(rank, **changes)


def at(**changes: Any) -> Any:
    return lambda rank: replace(rank, host=replace(rank.host, **changes))


def only(facts: JobFacts) -> Problem:
    """Return the only problem."""
    (problem,) = problems(facts)
    return problem


@pytest.mark.parametrize(
    "facts", [job(1), job(2), job(8), job(4, mpi=MPICH), on_hosts("aabb", at(fabrics={"m:1": "200"}))]
)
def test_good_jobs_have_no_problems(facts):
    assert problems(facts) == []


def test_ranks_bound_to_one_core_are_reported():
    for mpi, cure in ((OPEN_MPI, "mpirun --bind-to none"), (MPICH, "mpiexec -bind-to none")):
        problem = only(job(2, lambda one: replace(one, cores=(one.rank,)), mpi=mpi))
        assert problem.level == WARNING and problem.cure.startswith(cure)
        assert problem.what == "ranks 0-1: bound to a single core, and all threads of torch with it"
    slurm = only(job(1, lambda one: replace(one, cores=(0,)), command="srun --mpi=pmix"))
    assert "--cpus-per-task" in slurm.cure and "--bind-to" not in slurm.cure


def test_one_core_is_fine_without_a_framework_or_on_a_small_machine():
    assert not problems(job(2, lambda one: replace(one, cores=(one.rank,), packages={"numpy": "2"})))
    assert not problems(job(1, lambda one: replace(one, cores=(0,), host=host(cores=1))))


def test_ranks_bound_to_the_same_cores_are_reported():
    problem = only(job(4, with_(cores=(0, 1))))
    assert problem.what == "ranks 0-3 on a share 2 of 8 cores" and "--bind-to none" in problem.cure
    kinds = {one.what for one in problems(job(4, lambda one: replace(one, cores=(0,) if one.rank < 2 else (4, 5, 6))))}
    assert "ranks 0-1 on a share 1 of 8 cores" in kinds


def test_oversubscribed_cores_are_reported():
    for mpi, name in ((OPEN_MPI, "OMPI_MCA_mpi_yield_when_idle"), (MPICH, "MPIR_CVAR_POLLS_BEFORE_YIELD")):
        problem = only(job(9, mpi=mpi))
        assert problem.what.startswith("9 ranks on a have 8 cores") and name.removeprefix("OMPI_MCA_") in problem.cure
        assert not problems(job(9, with_(environment={name: "1"}), mpi=mpi))


def test_too_many_threads_are_reported():
    problem = only(job(4, with_(environment={"OMP_NUM_THREADS": "4"})))
    assert problem.cure == "export OMP_NUM_THREADS=2"
    assert not problems(job(4, with_(environment={"OMP_NUM_THREADS": "2"})))


def test_refused_peer_reads_are_reported():
    refused = only(job(2, with_(peer_reads=False), mpi=MPICH))
    assert refused.level == ERROR and refused.cure.startswith("export MPIR_CVAR_CH4_CMA_ENABLE=0")
    assert not problems(job(2, with_(peer_reads=False, environment={"MPIR_CVAR_CH4_CMA_ENABLE": "0"}), mpi=MPICH))
    assert only(job(1, with_(peer_reads=False, start=None), mpi=MPICH)).level == WARNING  # one process needs none
    yama = only(job(2, lambda one: replace(at(yama=1)(one), peer_reads=False)))
    assert yama.level == WARNING and "ptrace_scope is 1" in yama.what and "ptrace_scope=0" in yama.cure
    for mpi, scope in (
        (replace(MPICH, library="MPICH Version 4.0.2"), 0),
        (MPICH, 1),
    ):  # these do not use peer reads then
        refusing = [replace(at(yama=scope)(one), peer_reads=False) for one in job(2, mpi=mpi).ranks]
        problem = only(JobFacts(tuple(refusing)))
        assert problem.level == WARNING and "copied twice" in problem.what


@pytest.mark.parametrize("mib, level", [(2, ERROR), (64, WARNING), (95, WARNING), (96, None)])
def test_a_small_dev_shm_is_reported(mib, level):
    reported = problems(job(2, at(shared_memory_free=mib << 20)))
    assert [problem.level for problem in reported] == [level] * (level is not None)
    if reported:
        assert f"/dev/shm on a has {mib} MiB free for 2 ranks" in reported[0].what and "--shm-size" in reported[0].cure


def test_a_small_dev_shm_is_reported_before_the_start():
    alone = job(
        1, lambda one: replace(at(shared_memory_free=8 << 20)(one), start=LaunchFacts("mpiexec", "PMI", 0, 4, 0, 4))
    )
    assert only(alone).level == ERROR and "8 MiB free for 4 ranks" in only(alone).what


def test_locked_memory_matters_where_there_is_a_fabric():
    def low(one: RankFacts) -> RankFacts:
        return replace(one, limits={**one.limits, "memlock": 8 << 20})

    assert not problems(job(2, low))
    problem = only(job(2, lambda one: at(fabrics={"mlx5_0:1": "200 Gb/sec"})(low(one))))
    assert "8192 KiB" in problem.what and problem.cure.startswith("ulimit -l unlimited")


def test_few_file_descriptors_are_reported():
    problem = only(job(2, lambda one: replace(one, limits={**one.limits, "nofile": 256})))
    assert "256 open files" in problem.what and problem.cure == "ulimit -n 65536"


def test_a_full_control_group_is_reported():
    problem = only(job(2, at(memory_limit=8 << 30, memory_used=8 << 30)))
    assert "8192 of the 8192 MiB" in problem.what
    assert not problems(job(2, at(memory_limit=8 << 30, memory_used=4 << 30)))


def test_a_slow_start_is_reported():
    slow = replace(OPEN_MPI, seconds=1.5)
    problem = only(job(2, mpi=slow))
    assert "1.5 s" in problem.what and problem.cure.startswith("export OMPI_MCA_pml=ob1")
    assert not problems(job(2, with_(environment={"OMPI_MCA_pml": "ob1"}), mpi=slow))
    assert not problems(job(2, at(fabrics={"mlx5_0:1": "200 Gb/sec"}), mpi=slow))
    assert not problems(job(2, mpi=replace(MPICH, seconds=1.5)))


def test_open_mpi_over_tcp_is_reported():
    problem = only(on_hosts("aab"))
    assert "5 ms" in problem.what and "mpi_event_tick_rate 1" in problem.cure
    measured = replace(on_hosts("aab"), network=NetworkFacts(None, MeasuredLink((0, 2), 0.00312, 1e9, 4096), {}))
    assert only(measured).what.endswith("(measured now: 3.12 ms)")
    assert not problems(on_hosts("aab", with_(environment={"OMPI_MCA_mpi_event_tick_rate": "1"})))
    assert not problems(on_hosts("aab", with_(mpi=MPICH)))


def test_srun_without_kill_on_bad_exit_is_reported():
    problem = only(job(2, command="srun --mpi=pmix"))
    assert problem.level == NOTE and "srun --kill-on-bad-exit=1" in problem.cure
    assert not problems(job(2, with_(environment={"SLURM_KILL_BAD_EXIT": "1"}), command="srun --mpi=pmix"))
    assert not problems(job(2, with_(slurm={"KillOnBadExit": "1"}), command="srun"))
    assert not problems(job(1, command="srun --mpi=pmix"))


def test_a_default_of_slurm_without_pmi_is_reported():
    for mpi, default, typed in ((OPEN_MPI, "none", "srun --mpi=pmix"), (MPICH, "pmix", "srun --mpi=pmi2")):
        note = only(job(1, with_(start=None, slurm={"MpiDefault": default}), mpi=mpi))
        assert note.level == NOTE and note.cure == typed and f"'{default}'" in note.what
    assert not problems(job(1, with_(start=None, slurm={"MpiDefault": "pmix_v4"})))
    assert not problems(job(2, with_(slurm={"MpiDefault": "none"})))  # it has started, and its ranks are connected


def test_a_wheel_of_open_mpi_under_srun_is_reported():
    wheel = replace(OPEN_MPI, prefix="/home/me/venv")
    environment = {"SLURM_KILL_BAD_EXIT": "1"}
    problem = only(job(2, with_(environment=environment), command="srun --mpi=pmix", mpi=wheel))
    assert problem.cure == "export OPAL_PREFIX=/home/me/venv"
    there = environment | {"OPAL_PREFIX": "/home/me/venv"}
    assert not problems(job(2, with_(environment=there), command="srun --mpi=pmix", mpi=wheel))
    assert not problems(job(2, mpi=wheel))  # mpirun sets it


def test_one_host_that_mpi_takes_for_several_is_reported():
    problem = only(job(2, with_(on_node=1)))
    assert problem.what == "2 ranks have the host name a, but MPI sees 1 of them on a node"
    assert not problems(job(2, with_(on_node=2)))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"python": "3.11.2"}, "the version of Python differs: 3.12.1 on ranks 0, 2; 3.11.2 on rank 1"),
        ({"commlib": "0.9"}, "commlib differs: 1.0 in /env/commlib on ranks 0, 2; 0.9 in /env/commlib on rank 1"),
        ({"mpi": MPICH}, "the MPI library differs: Open MPI v5.0.11 (/usr/lib/libmpi.so.40) on ranks 0, 2; MPICH"),
        ({"packages": {"numpy": "1.26"}}, "the version of numpy differs: 2.0 on ranks 0, 2; 1.26 on rank 1"),
        ({"packages": {"numpy": "2.0"}}, "the version of torch differs: 2.6 on ranks 0, 2; none on rank 1"),
        ({"cores": (0, 1)}, "the number of cores differs: 8 on ranks 0, 2; 2 on rank 1"),
        ({"limits": {"nofile": 4096}}, "the limit nofile differs: 65536 on ranks 0, 2; 4096 on rank 1"),
        ({"environment": {"UCX_TLS": "tcp"}}, "the variable UCX_TLS differs: none on ranks 0, 2; tcp on rank 1"),
    ],
)
def test_a_rank_that_differs_is_named(change, words):
    reported = problems(job(3, lambda one: replace(one, **change) if one.rank == 1 else one))
    assert any(problem.what.startswith(words) and "rank 1" in problem.what for problem in reported)


def test_visible_devices_may_differ():
    assert not problems(job(2, lambda one: replace(one, environment={"CUDA_VISIBLE_DEVICES": str(one.rank)})))


def test_a_missing_mpi_is_reported():
    text = "mpi4py cannot load an MPI library (no file): make it visible"
    alone = only(job(1, with_(mpi=None, no_mpi=text, start=None, peer_reads=None)))
    assert (alone.level, alone.cure) == (WARNING, "make it visible")
    assert only(job(1, with_(mpi=None, no_mpi=text))).level == ERROR


def test_wrong_settings_of_some_ranks_are_reported():
    problem = only(job(3, lambda one: replace(one, wrong_settings="no number" if one.rank else "")))
    assert (problem.level, problem.what) == (ERROR, "no number (ranks 1-2)")
    facts = job(2, with_(wrong_settings="no number"))
    assert only(replace(facts, failures=("no number (ranks 0-1)",))).what == "no number (ranks 0-1)"


def test_failures_come_first_with_a_command():
    text = "Slurm started 4 tasks, but MPI sees one process. Type srun --mpi=pmix"
    reported = problems(replace(job(9), failures=(text,)))
    assert reported[0] == Problem(ERROR, "Slurm started 4 tasks, but MPI sees one process", "srun --mpi=pmix")
    assert [problem.level for problem in reported] == [ERROR, WARNING]


def test_similar_problems_are_counted():
    reported = problems(on_hosts("abcdefgh", lambda one: replace(at(shared_memory_free=8 << 20)(one), mpi=MPICH)))
    assert len(reported) == 4 and reported[-1].what == "5 more like the last"


def test_checks_describe_themselves():
    assert all(one.__doc__ for one in CHECKS)
    assert rank(0, 1).start == LaunchFacts("mpirun", "PMIx", 0, 1)


TERRIBLE = (  # jobs with every trap
    job(2, lambda one: replace(one, cores=(0,), on_node=1, limits={"nofile": 9}, python=f"3.{one.rank}")),
    job(9),
    job(4, with_(environment={"OMP_NUM_THREADS": "4"})),
    job(9, with_(peer_reads=False), mpi=MPICH),
    job(2, lambda one: replace(at(shared_memory_free=1, memory_limit=1, memory_used=1)(one), peer_reads=False)),
    job(2, lambda one: replace(at(fabrics={"m:1": "200"})(one), limits={"memlock": 1})),
    job(2, mpi=replace(OPEN_MPI, seconds=9.0)),
    job(2, command="srun --mpi=pmix", mpi=replace(OPEN_MPI, prefix="/path/to/venv")),
    on_hosts("ab"),
)


def test_the_page_of_traps_has_every_cure():
    page = (Path(__file__).parents[3] / "docs/pages/traps.md").read_text()
    reported = {problem for terrible in TERRIBLE for problem in problems(terrible)}
    assert len(reported) > 14
    words = {
        problem.cure: set(re.findall(r"[A-Z_]{5,}\w*|--?[a-z]+-[a-z-]+|\bulimit -n", problem.cure))
        for problem in reported
    }
    assert not {cure: hits for cure, hits in words.items() if hits and not any(word in page for word in hits)}


def test_a_busy_machine_is_reported():
    problem = only(job(2, at(load=5.25, busy=("burner (process 7, 99% of a core)",))))
    assert problem.level == WARNING and problem.cure.startswith("top")
    assert problem.what.startswith("a is busy: 5.2 processes wanted its 8 cores in the last minute (burner (process 7")
    assert "timings of benchmarks and training will be off" in problem.what
    assert not problems(job(2, at(load=1.5)))
