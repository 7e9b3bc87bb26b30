"""A version that is under way to a group of samplers: who has it, who lacks it, and whether it is what was sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prl.flow.halts import Halt
from prl.flow.versions import Version
from prl.orchestrator.replicas import Replica
from prl.runfolder.weights import MODULUS


@dataclass(eq=False)
class Update:
    """A version that is under way to a group."""

    version: Version
    epoch: int
    replicas: tuple[Replica, ...]
    armed_s: float  # when the first of them was asked to receive it
    transport: str = "gather"  # how it goes, in the words of weights.transport
    senders: int = 1  # trainer ranks in the transfer group
    tensors: Sequence[Any] = ()  # what the version consists of, as on the wire
    refused: dict[int, str] = field(default_factory=dict)  # by files: replica -> why it could not read them
    sending_s: float = 0.0  # when all of them were to receive it
    staged: dict[tuple[int, int], str] = field(default_factory=dict)  # (replica, worker) -> digest
    left: dict[tuple[int, int], Halt | None] = field(default_factory=dict)  # the same -> where it left, if known
    overdue: bool = False  # somebody left as the deadline had passed
    receive_s: float = 0.0
    digest: str | None = None  # of what the trainer sent, once it has
    lane_digests: Sequence[str] = ()  # by lanes: of what it sent to worker 0, 1, ... of every replica
    sent_s: float = 0.0  # when
    send_s: float = 0.0
    sent_bytes: int = 0
    gathered_bytes: int = 0  # of tensors that one trainer rank put together for it
    changed_share: float | None = None  # of the values, where only those were sent
    direct_share: float = 1.0  # of the bytes, the least of all workers: written where they lie, past vLLM's loader
    failed: str = ""  # why not everyone has it or will get it: another group is needed

    @property
    def by_files(self) -> bool:
        return self.transport == "filesystem"

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.gone.is_set()]

    @property
    def crippled(self) -> bool:
        """Whether some of the group are gone."""
        return len(self.alive) < len(self.replicas)

    @property
    def world_size(self) -> int:
        """Ranks of the transfer group: the trainer's, then each replica's workers."""
        return self.senders + sum(replica.workers for replica in self.replicas)

    def sent(self, body: Mapping[str, Any], now_s: float) -> None:
        """The trainer has sent everything."""
        self.send_s, self.sent_bytes = float(body["send_s"]), int(body["bytes"])
        self.gathered_bytes = int(body["gathered_bytes"])
        self.changed_share, self.lane_digests = body["changed_share"], body["lanes"]
        self.digest, self.sent_s = str(body["digest"]), now_s

    def leaves(self, replica: int, worker: int, halt: Mapping[str, Any] | None) -> None:
        """A worker has left the transfer; `halt`: where it was, as on the wire."""
        where = self.left[replica, worker] = None if halt is None else Halt(**halt)
        self.overdue = self.overdue or (where is not None and where.overdue)

    def missing(self, replica: Replica) -> list[int]:
        """Its workers that have not reported and still may."""
        return [worker for worker in self._lacking(replica) if (replica.index, worker) not in self.left]

    def arrived(self) -> bool:
        return self.digest is not None and not any(map(self._lacking, self.alive))

    def _lacking(self, replica: Replica) -> list[int]:
        """Its workers that do not hold the version, unless it could not read it."""
        if replica.index in self.refused:
            return []
        return [worker for worker in range(replica.workers) if (replica.index, worker) not in self.staged]

    def broken(self) -> str:
        """Why the trainer need not go on sending; nothing where it has to. Files do not break where somebody leaves."""
        if self.failed or not self.crippled or self.by_files:
            return self.failed
        gone = [replica.name for replica in self.replicas if replica.gone.is_set()]
        return f"{', '.join(gone)} left the group"

    def wrong(self, replica: Replica) -> str:
        """How what a replica that has arrived holds differs from what was sent; nothing where it does not."""
        for holder, (held, sent) in self._compared(replica).items():
            if held != sent:
                return (
                    f"{replica.name} {holder} staged other weights than the trainer sent for version {self.version}: digest "
                    f"{held}, not {sent}"
                )
        return ""

    def _compared(self, replica: Replica) -> dict[str, tuple[str, str | None]]:
        """By who took it: the digest of what is held, and of what was sent. A worker has taken the whole version, or its own
        lane; from files each reads its own part, and the digests of the parts add up to the version's."""
        held = {worker: self.staged[replica.index, worker] for worker in range(replica.workers)}
        if self.by_files:
            return {"of all workers": (str(sum(map(int, held.values())) % MODULUS), self.digest)}
        sent = dict(enumerate(self.lane_digests)) if self.transport == "lanes" else dict.fromkeys(held, self.digest)
        return {f"worker {worker}": (digest, sent.get(worker)) for worker, digest in held.items()}

    def places(self, body: Mapping[str, Any], group_s: float) -> list[dict[str, Any]]:
        """What each replica needs to join the group, from what the trainer offered."""
        group = {"world_size": self.world_size, "epoch": self.epoch, "timeout_s": group_s, "facts": body["facts"]}
        group |= {"master_address": body["master_address"], "master_port": body["master_port"]}
        if self.transport == "lanes":
            group["lanes"] = {"trainer_ranks": self.senders, "samplers": [replica.index for replica in self.replicas]}
        places, offset = [], self.senders
        for replica in self.replicas:
            places.append({**group, "rank_offset": offset})
            offset += replica.workers
        return places

    def of_ranks(self, ranks: Sequence[int]) -> list[Replica]:
        """The replicas to which these ranks of the transfer group belong."""
        owners = [replica for replica in self.replicas for _ in range(replica.workers)]
        return list(dict.fromkeys(owners[rank - self.senders] for rank in ranks if rank >= self.senders))
