"""Who of the samplers' replicas is in the transfer group and who serves, and what becomes of those that fail: a pure state
machine. It is told what happened and at what time; whoever runs it does what it says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prl.flow.restarts import RestartRule, Starts

# starting    its first process has not joined yet
# joined      in the group, but without valid weights: the next version that it commits admits it, or the present one,
#             which a serving replica may give it
# serving     in the group, with a version that was verified
# fenced      its process lives and is not trusted any more; it has to end
# restarting  its process has ended; another one was granted
# lost        its process has ended, and no other one is granted
State = Literal["starting", "joined", "serving", "fenced", "restarting", "lost"]
IN_GROUP: frozenset[State] = frozenset({"joined", "serving"})

# Why a replica left the group, or stopped serving: its process ended, said that it failed, fell silent, could not be reached,
# did not answer, receive or join in time, refused a call, or held other weights than were sent.
Reason = Literal["died", "failed", "silent", "unreachable", "late", "refused", "mismatch"]


class MembershipError(Exception):
    """An event that cannot follow from the state."""


@dataclass(frozen=True)
class MembershipSettings:
    replicas: int
    restarts: int  # of each replica
    pause_s: float  # before the first restart of a replica; doubled with each further one, up to 64 times as long
    start_s: float  # that a process has to start and join, and that the run waits where no replica is left
    mismatches: int = 2  # in a row, of one replica, are more than chance: its process has to end
    delays: int = 2  # the same of transfers that it held up, of one version after another or of the same one again
    tries: int = 3  # of a group that breaks without anyone to blame


@dataclass
class _Replica:
    starts: Starts
    state: State = "starting"
    mismatches: int = 0  # in a row
    delays: int = 0  # in a row
    delayed: bool = False  # since it committed a version: it held up a transfer
    seedable: bool = True  # while joined: others have not failed to give it their weights


class Membership:
    def __init__(self, settings: MembershipSettings) -> None:
        self.epoch = 0  # rises whenever a new group has to be built
        self.reasons: Counter[Reason] = Counter()  # why replicas stopped serving or left the group, so far
        self.restarts = 0  # granted so far
        self.seeded = 0  # replicas that were admitted with another one's weights, so far
        self.by_files = False  # the group broke so often that the next versions go through files
        self.last = ""  # the newest trouble, in words
        self._settings = settings
        rule = RestartRule(settings.restarts, settings.pause_s, settings.start_s)
        self._replicas = [_Replica(Starts(rule)) for _ in range(settings.replicas)]
        self._broken = 0  # groups in a row that broke without anyone to blame
        self._empty_since_s: float | None = None  # time since when nobody is in the group that was there before

    @property
    def group(self) -> tuple[int, ...]:
        """The replicas that take part in an update."""
        return self._in("joined", "serving")

    @property
    def serving(self) -> tuple[int, ...]:
        """The replicas that may be asked."""
        return self._in("serving")

    @property
    def to_seed(self) -> tuple[int, ...]:
        """The replicas that a serving one may give its weights to."""
        return tuple(i for i in self._in("joined") if self._replicas[i].seedable) if self.serving else ()

    @property
    def to_send(self) -> tuple[int, ...]:
        """The replicas without valid weights that wait for the trainer to send a version."""
        return tuple(i for i in self._in("joined") if i not in self.to_seed)

    @property
    def to_end(self) -> tuple[tuple[int, int], ...]:
        """Replica and number of the start (0, 1, ...) of processes that have to end."""
        return tuple((i, self._replicas[i].starts.again) for i in self._in("fenced"))

    def state(self, replica: int) -> State:
        return self._replicas[replica].state

    def join(self, replica: int) -> bool:
        """A process is ready for its first version. False: it is not wanted (any more)."""
        one = self._replicas[replica]
        if one.state not in ("starting", "restarting"):
            return False
        one.state, one.seedable = "joined", True
        self._empty_since_s = None
        self.regroup()
        return True

    def admit(self, replicas: Sequence[int]) -> None:
        """These have committed a version whose digest is right."""
        for i in replicas:
            one = self._replicas[i]
            if one.state not in IN_GROUP:
                raise MembershipError(f"sampler {i} is {one.state} and cannot serve")
            one.state, one.mismatches, one.seedable = "serving", 0, True
            one.delays, one.delayed = one.delays if one.delayed else 0, False
        self._broken = 0

    def seed(self, replica: int) -> None:
        """It has committed the present version, which a serving replica gave it."""
        one = self._replicas[replica]
        if one.state != "joined":
            raise MembershipError(f"sampler {replica} is {one.state}: nobody can have seeded it")
        one.state, one.mismatches = "serving", 0
        self.seeded += 1

    def not_seeded(self, replica: int, words: str) -> None:
        """A serving replica could not give it its weights: it waits for the trainer."""
        one = self._replicas[replica]
        if one.state == "joined":
            one.seedable = False
            self.last = words

    def mismatch(self, replica: int, words: str, now_s: float) -> None:
        """A replica holds other weights than were sent. It serves nothing until it has been sent them in full; where that
        happens again and again it has to end."""
        one = self._replicas[replica]
        if one.state not in IN_GROUP:
            raise MembershipError(f"sampler {replica} is {one.state}: its digest is nobody's business")
        one.mismatches += 1
        if one.mismatches >= self._settings.mismatches:
            self.fence(replica, "mismatch", words, now_s)
        else:
            one.state = "joined"
            self._note("mismatch", words)

    def held_up(self, replica: int, words: str, now_s: float) -> bool:
        """The others waited for it in vain in a transfer, until the deadline. Where it has them do so again and again it has to
        end: true then."""
        one = self._replicas[replica]
        if one.state not in IN_GROUP:
            raise MembershipError(f"sampler {replica} is {one.state}: nobody can have waited for it")
        one.delays, one.delayed = one.delays + 1, True
        self.last = words
        return one.delays >= self._settings.delays and self.fence(replica, "late", words, now_s)

    def fence(self, replica: int, reason: Reason, words: str, now_s: float) -> bool:
        """A replica is not trusted any more, and its process has to end. False: that is known, or it has ended."""
        one = self._replicas[replica]
        if one.state not in ("joined", "serving", "restarting"):
            return False
        self._leave(one, "fenced", now_s)
        self._note(reason, words)
        return True

    def died(self, replica: int, words: str, now_s: float) -> float | None:
        """A process has ended. The pause in seconds after which another one is to be started; None: it is not."""
        one = self._replicas[replica]
        if one.state == "lost":
            raise MembershipError(f"sampler {replica} has no process that could end: {words}")
        if one.state != "fenced":
            self._note("died", words)
        pause_s = None if one.state == "starting" else one.starts.grant(now_s)
        self._leave(one, "lost" if pause_s is None else "restarting", now_s)
        if pause_s is not None:
            one.mismatches = one.delays = 0
            one.delayed = False
            self.restarts += 1
        return pause_s

    def broke(self, words: str) -> bool:
        """The group failed at a transfer, and nobody is known to be at fault: another one has to be built, and the last try
        goes through files, as everything does from then on until somebody comes or goes. False: that has happened too
        often."""
        self.epoch += 1
        self._broken += 1
        self.last = words
        self.by_files = self.by_files or self._broken == self._settings.tries - 1
        return self._broken < self._settings.tries

    def regroup(self) -> None:
        """Others are in the group now: replicas, or the trainer that sends."""
        self.epoch += 1
        self._broken = 0
        self.by_files = False

    def late(self, now_s: float) -> tuple[int, ...]:
        """The replicas whose restarted process has not joined in time."""
        return tuple(i for i in self._in("restarting") if now_s > self._replicas[i].starts.due_s)

    def over(self, now_s: float) -> str | None:
        """Why the run cannot go on, if so: nobody is left, or nobody has come back in time."""
        if not self._replicas:
            return None
        if len(self._in("lost")) == len(self._replicas):
            return self.last
        since_s = self._empty_since_s
        if since_s is not None and now_s - since_s > self._settings.start_s:
            return f"no sampler has come back within {self._settings.start_s:.0f} s; the last trouble: {self.last}"
        return None

    def _in(self, *states: State) -> tuple[int, ...]:
        return tuple(i for i, one in enumerate(self._replicas) if one.state in states)

    def _leave(self, one: _Replica, state: State, now_s: float) -> None:
        was_in_group = one.state in IN_GROUP
        one.state = state
        if was_in_group:
            self.regroup()
            if not self.group:
                self._empty_since_s = now_s

    def _note(self, reason: Reason, words: str) -> None:
        self.reasons[reason] += 1
        self.last = words
