"""Elastic: commit and restore state in memory, in a loop that does so when an operation fails.

The ranks of a job stay what they are so far: what Horovod calls elastic, joining and leaving hosts, is not there.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import commlib
from commlib.collectives.host.objects import all_gather_object
from commlib.coordinator import Pending
from commlib.data_parallel.reducer import abandon_all
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, TransportError, UsageError
from commlib.horovod.exceptions import HostsUpdatedInterrupt
from commlib.horovod.keepers import Keeper, SamplerKeeper
from commlib.horovod.operations import broadcast_object
from commlib.horovod.process_sets import process_set_of, registry

log = logging.getLogger("commlib")

FINAL = (PeerError, ShutdownError, TransportError, UsageError)
"""Errors after which the ranks cannot come together again, or the next call would fail likewise. After others they do,
as after a HorovodInternalError that the program raises."""

TOGETHER = """All ranks must be in the same call of elastic.run, with the same attempts. One that has returned from it
cannot come back: end what may fail at its end with something that all ranks wait for, such as a barrier."""

BETWEEN_PASSES = (
    "elastic: state.commit() between the passes that accumulate gradients for one update. What has accumulated is each "
    "rank's own, and is lost after a failure. Commit after an update"
)


class State:
    """Hold what a training loop needs to go on from where it was. Subclasses define `save`, `restore` and `sync`."""

    def __init__(self, **kwargs: Any) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self.commits = 0
        """How often it was committed."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Call these when training starts again after a failure, such as to set the learning rate anew."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call what was registered."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
        """Take note of other hosts. Nothing calls it so far."""

    def commit(self) -> None:
        """Save this state, to come back to it when an operation fails."""
        if self.between_passes():
            warnings.warn(BETWEEN_PASSES, stacklevel=2)
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Look whether hosts have come or gone. They never have, so far."""

    def reset(self) -> None:
        """Do what is needed before training starts again."""

    def between_passes(self) -> bool:
        """Tell whether gradients have accumulated that no update has used."""
        return False

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it. Collective."""
        raise NotImplementedError


class ObjectState(State):
    """Attributes of any picklable kind: `ObjectState(epoch=0, batch=0)`; then `state.epoch` and so on.

    `keeper_of`, which subclasses override, finds what keeps an object of another kind, such as a model.
    """

    def __init__(self, bcast_object: Callable[[Any], Any] = broadcast_object, **kwargs: Any) -> None:
        self._keepers: dict[str, Keeper] = {}
        super().__init__()
        self._bcast_object = bcast_object
        plain: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
            if (keeper := self.keeper_of(value)) is None:
                plain[name] = value
            else:
                self._keepers[name] = keeper
        self._saved: dict[str, Any] = copy.deepcopy(plain)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # those that were given

    def keeper_of(self, value: Any) -> Keeper | None:
        """Return what keeps the state of `value`, or None if it is a picklable value."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Another object with a keeper is kept from then on, from the state it has now."""
        keepers = self.__dict__.get("_keepers", {})
        if name in keepers:
            keeper = self.keeper_of(value)
            if keeper is None:
                raise TypeError(f"{name} is a {type(value).__name__}, whose state cannot be kept as it was so far")
            keepers[name] = keeper
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep copies of everything, or of nothing if a rank gives it up. Collective if there are samplers."""
        # Samplers first: nothing is kept yet where another rank does not come.
        for keeper in sorted(self._keepers.values(), key=lambda keeper: not isinstance(keeper, SamplerKeeper)):
            keeper.save()
        self._saved = copy.deepcopy({name: getattr(self, name) for name in self._saved})

    def restore(self) -> None:
        """Go back to the copies."""
        for keeper in self._keepers.values():
            keeper.restore()
        self._put_back()

    def sync(self) -> None:
        """Take everything from rank 0, and keep copies. Collective."""
        for keeper in self._keepers.values():
            keeper.sync()
        if self._saved:
            self._saved = self._bcast_object({name: getattr(self, name) for name in self._saved})
            self._put_back()

    def reset(self) -> None:
        """Prepare what is kept for a restart: share what is left of the samplers' indices anew."""
        for keeper in self._keepers.values():
            keeper.reset()

    def _put_back(self) -> None:
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)


def run(func: Callable[..., Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Decorate `func(state, ...)`: before it runs, the ranks take the state of rank 0.

    When an operation fails in a way that leaves the ranks in step (MismatchError, StallError of one operation), or the
    program raises a HorovodInternalError, on one rank or on several, all go back to their last commit and call `func`
    again, `attempts` times at most from one commit of rank 0. A HostsUpdatedInterrupt, where no rank has failed, calls
    it again with the state as it is. Other errors, such as a rank that died, end it.

        @elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()
    """
    return run_fn(func, _keep_ranks, attempts=attempts)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any], *, attempts: int = 3) -> Callable[..., Any]:
    """Return `func(state, ...)` as `run` does; `reset()` is called before each other call of it, then `state.on_reset`.

    The ranks come together before `state.sync`. If some of them alone raise, those that wait for them get a
    MismatchError and come, too: from operations by name, of any process set that a rank which raises is in, and from
    what ranks call in order, such as reductions of PyTorch's gradients. `state.restore` and `reset` run when all are
    there, on all of them. Ranks that skip the sync (`HostsUpdatedInterrupt(skip_sync=True)`) do not come: all must.

    Raises UsageError on all ranks if they come together from different elastic functions, or with other `attempts`.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        meeting = _Meeting(attempts)
        error: CommlibError | HostsUpdatedInterrupt | None = None  # what this rank comes back with
        while True:
            comes_back = error is not None
            syncs = not (isinstance(error, HostsUpdatedInterrupt) and error.skip_sync)
            failed = syncs and meeting.hold(error, state.commits)
            error = None  # it holds what the call has made
            try:
                if failed:
                    state.restore()
                if comes_back:
                    reset()
                    state.on_reset()
                if syncs:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                error = interrupt
            except CommlibError as failure:
                if isinstance(failure, FINAL):
                    raise
                error = failure

    return wrapper


class _Rank(NamedTuple):
    """What a rank says where all come together."""

    what: str
    comes_back: bool
    failed: bool
    commits: int
    calls: int


class _Meeting:
    """Lets all ranks come to where they take the state of rank 0, also those that wait for this rank elsewhere."""

    calls: ClassVar[int] = 0
    """How many elastic functions this rank has called."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        # Ranks that are in functions one after another must not go on together.
        _Meeting.calls += 1
        self._what = f"elastic function number {_Meeting.calls}, {attempts} attempts"
        self._failures, self._commits = 0, 0  # since rank 0 has committed
        self._restarts: list[Pending] = []  # under way: each rank has one for each meeting that it has come back to

    def hold(self, error: CommlibError | HostsUpdatedInterrupt | None, commits: int) -> bool:
        """Wait for all ranks, and return whether one has failed. Collective. Raises `error` after too many attempts.

        What others have in flight is given up if a rank comes back.
        """
        mine = _Rank(self._what, error is not None, isinstance(error, CommlibError), commits, self.calls)
        ranks = self._gather(mine) if commlib.is_initialized() else [mine]
        if any(rank.what != self._what for rank in ranks):
            _Meeting.calls = max(rank.calls for rank in ranks)  # what they call next is the same again
            places = "".join(f"\n  rank {number}: {rank.what}" for number, rank in enumerate(ranks))
            raise UsageError(f"elastic.run: the ranks come from different places:{places}\n{TOGETHER}")
        if ranks[0].commits > self._commits:
            self._failures, self._commits = 0, ranks[0].commits
        by = [number for number, rank in enumerate(ranks) if rank.failed]
        if not by:
            return False
        self._failures += 1
        if self._failures >= self._attempts:
            if isinstance(error, CommlibError):
                raise error
            raise MismatchError(f"elastic.run: ranks {by} have failed, {self._failures} times since the last commit")
        why = error if mine.failed else f"ranks {by} have failed"
        log.warning("elastic: back to the last commit (attempt %d of %d): %s", self._failures + 1, self._attempts, why)
        return True

    def _gather(self, mine: _Rank) -> list[_Rank]:
        if mine.comes_back:
            self._restart()
        group = process_set_of(None).communicator("elastic.run").group
        while True:
            try:
                # In order, as others may wait for this rank so; but no call of theirs is to be taken for this one.
                ranks: list[_Rank] = group.run(all_gather_object(group, mine, "meeting of elastic.run"))
            except MismatchError as other:
                if not mine.comes_back or group.failure is not None:
                    raise
                log.debug("elastic: another rank has learned that this one comes back: %s", other)
            except BaseException:
                for restart in self._restarts:
                    restart.seen = True  # if it fails, then as this has
                raise
            else:
                break
        if any(rank.comes_back for rank in ranks):
            self._restart()
            restarts, self._restarts = self._restarts, []
            for restart in restarts:
                restart.wait()
            abandon_all()
        return ranks

    def _restart(self) -> None:
        if not self._restarts:
            self._restarts = [coordinator.restart() for coordinator in registry().coordinators()]


def _keep_ranks() -> None:
    """Do nothing: a job keeps its ranks."""
