"""Pending reasons: decide by Slurm's reason whether a job can ever start, and what to do if it cannot. [pure]"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from commlib.slurm.states import JobTask


@dataclass(frozen=True, slots=True)
class PendingRule:
    """A reason, or the pattern of several, that time alone does not end. Reasons are listed in squeue's manual.

    why: what is wrong. remedy: what to do; {job} is the number of the job. is_of_user: a limit on this user's jobs,
    which ends with them: the job never starts only if no other job of the user is left.
    """

    pattern: str
    why: str
    remedy: str
    is_of_user: bool = False


_AGAIN = "`scancel {job}`, and submit it again"
_LIMITS = "`sacctmgr show assoc,qos` lists the limits"

RULES = (
    PendingRule(
        "PartitionNodeLimit",
        "it requests more nodes, or fewer, than a job in the partition may have",
        _AGAIN + " with another --nodes or --partition; `scontrol show partition` lists the limits",
    ),
    PendingRule(
        "PartitionTimeLimit",
        "it requests more time than the partition allows",
        _AGAIN + " with less --time, or another --partition; `scontrol show partition` lists the limits",
    ),
    PendingRule(
        "BadConstraints",
        "no nodes have the requested features, memory, cores or GPUs",
        _AGAIN
        + " with another --constraint, --mem, --cpus-per-task or --gpus-per-node; `sinfo -N -o '%N %c %m %f %G'` "
        "lists what nodes have",
    ),
    PendingRule(
        "DependencyNeverSatisfied",
        "a job that it depends on did not end as required",
        _AGAIN + " after that job has succeeded, or without the dependency",
    ),
    PendingRule("JobHeldUser", "it is held", "`scontrol release {job}` lets it start"),
    PendingRule(
        "JobHeldAdmin",
        "an administrator holds it, or it has failed to start too often",
        "ask the administrators of the cluster, or cancel it: `scancel {job}`",
    ),
    PendingRule(
        "job_requeued_in_held_state|launch_failed_requeued_held|JobHoldMaxRequeue",
        "Slurm requeued it, and holds it because it could not be started, or by its own exit code",
        "read its output, then `scontrol release {job}` starts it again, and `scancel {job}` ends it",
    ),
    PendingRule(
        "InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|AccountingPolicy",
        "its account or QOS does not exist, or may not be used here",
        _AGAIN + " with another --account, --qos or --partition; `sacctmgr show assoc user=$USER` lists yours",
    ),
    PendingRule(
        r"(Assoc|QOS)(Max\w*(PerJob|PerNode)\w*|Min\w*)",
        "one job may not have that much, or that little, by the limits of its account or QOS",
        _AGAIN + " with less time, fewer nodes or cores, or another --account or --qos; " + _LIMITS,
    ),
    PendingRule(
        r"AssocMaxJobsLimit|AssociationJobLimit|QOSMax\w*PerUser\w*|QOSJobLimit",
        "it exceeds a limit on the jobs of a user, and no other job of yours is left whose end could help",
        _AGAIN + " with fewer nodes or cores, or another --account or --qos; " + _LIMITS,
        is_of_user=True,
    ),
)

HELD_STATES = frozenset(("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "LAUNCH_FAILED", "RECONFIG_FAIL"))
_HELD = PendingRule(
    "",
    "Slurm holds it",
    "read its output, then `scontrol release {job}` starts it again, and `scancel {job}` ends it",
)


def find_rule(task: JobTask) -> PendingRule | None:
    """Return the rule that keeps a task from starting, or None if it may start, runs or has ended."""
    if task.state in HELD_STATES:
        return _HELD
    if task.state != "PENDING":
        return None
    reason = task.reason.partition(",")[0]
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, reason)), None)


def never_starts(job: str, tasks: Sequence[JobTask], *, has_others: bool) -> str | None:
    """Return why a job will never end by itself, and what to do; None if it may.

    has_others: whether other jobs of the user are active. A job with a task that may still run is not reported.
    """
    unfinished = [task for task in tasks if not task.ended]
    rules = [find_rule(task) for task in unfinished]
    if not unfinished or any(rule is None or (rule.is_of_user and has_others) for rule in rules):
        return None
    task, rule = unfinished[0], rules[0]
    assert rule is not None
    state = f"{task.state} ({task.reason})" if task.reason else task.state
    tasks_text = f" ({len(unfinished)} of its tasks)" if len(tasks) > 1 else ""
    return (
        f"job {job}{tasks_text} will not start: {state}: {rule.why}. It stays in the queue. "
        f"{rule.remedy[0].upper()}{rule.remedy[1:]}"
    ).format(job=job)
