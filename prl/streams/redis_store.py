"""The rollout stream in a Redis server: one Redis stream a writer, one Arrow file an entry.

An entry's id is its sequence number, so it can be put again after a lost answer and found from an announcement alone. The
stream is bounded: a writer whose entries are not released waits, and nothing is trimmed that somebody may still read. What a
step waits for is put all the same: until that step is complete, nothing of it is released.
"""

import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from prl.control.child import EndsRun
from prl.streams.contract import Cursor, Published, check_writer, is_writer
from prl.streams.files import Encoded, Header, StreamError, check_bytes
from prl.streams.options import RedisOptions

_ANSWER_S = 30.0  # of one request
_MAX_ASIDE = 100  # entries kept for a person to look at
_BULK_BYTES = 512 * 2**20  # what a server takes in one piece, unless set otherwise
_AT_ONCE = 4  # entries of a walk, which the server holds twice meanwhile
_FACTS = """
local facts = {}
for number, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
    local field = {}
    for place = 1, #entry[2], 2 do
        field[entry[2][place]] = entry[2][place + 1]
    end
    facts[number] = {entry[1], #(field.data or ''), field.checksum or '', field.attempt or ''}
end
return facts
"""
_LAST_ID = """
if redis.call('EXISTS', KEYS[1]) == 0 then
    return '0-0'
end
local stream = redis.call('XINFO', 'STREAM', KEYS[1])
for place = 1, #stream, 2 do
    if stream[place] == 'last-generated-id' then
        return stream[place + 1]
    end
end
"""  # a stream remembers it also where all is released
log = logging.getLogger(__name__)
ONCE = Retry(NoBackoff(), 0)  # the client tries nothing again: that is done here, with a deadline


class RedisLost(ConnectionError):
    """The server did not answer for as long as it may."""


class RedisFull(EndsRun):
    """The server is at its maxmemory."""


class RedisEvicts(EndsRun):
    """The server would throw away what it has acknowledged."""


class RedisForgot(EndsRun):
    """The server has lost what it had acknowledged."""


class RedisUnsaved(EndsRun):
    """The server takes nothing more, since it cannot save it. `filename` is where that is, as of an OSError."""

    def __init__(self, filename: str, words: str) -> None:
        super().__init__(filename, words)
        self.filename = filename

    def __str__(self) -> str:
        return f"{self.filename} {self.args[1]}"


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """Where a run's streams lie."""

    url: str
    password: str | None = field(repr=False)
    prefix: str  # of its keys: one server may serve many runs

    def key(self, writer: str) -> str:
        return f"{self.prefix}:rollouts:{check_writer(writer)}"

    @property
    def writers_key(self) -> str:
        return f"{self.prefix}:writers"

    @property
    def quarantine_key(self) -> str:
        return f"{self.prefix}:quarantine"

    @property
    def mark_key(self) -> str:
        return f"{self.prefix}:mark"


class _Server:
    """Requests that outlive a lost connection, until a deadline."""

    def __init__(self, place: RedisPlace, options: RedisOptions) -> None:
        self._url = place.url
        self._mark_key = place.mark_key
        self._reconnect_s = options.reconnect_s
        self._client = redis.Redis.from_url(
            place.url,
            password=place.password,
            socket_timeout=_ANSWER_S,
            socket_connect_timeout=_ANSWER_S,
            retry=ONCE,
        )
        self._check_policy()
        self._mark = self._found_mark()

    def _check_policy(self) -> None:
        """Raises RedisEvicts. Policies of volatile keys evict none of prl's, which never expire; servers of other makes may not
        say."""
        memory = self.ask("info", "memory")
        policy = str(memory.get("maxmemory_policy"))
        if int(memory.get("maxmemory", 0)) and policy.startswith("allkeys"):
            raise RedisEvicts(
                f"Redis at {self._url} throws away what it holds once its maxmemory is used (maxmemory-policy {policy}), "
                "rollouts that nobody has read among it: have it refuse what is too much (CONFIG SET maxmemory-policy "
                "noeviction, which its other users should know of), or use a server of the run's own (streams.redis.start)"
            )

    def _found_mark(self) -> bytes:
        """What the run has left in the server: drawn by the first of its processes, and gone with everything else."""
        if self.ask("get", self._mark_key) is None:
            self.ask("set", self._mark_key, uuid.uuid4().hex, nx=True)
        return bytes(self.ask("get", self._mark_key) or b"")

    def check_mark(self) -> None:
        """Raises RedisForgot where the server no longer has what it had when this client came."""
        if self.ask("get", self._mark_key) != self._mark:
            raise RedisForgot(
                f"Redis at {self._url} has lost the run's rollouts (its key {self._mark_key} is gone or another): it was "
                "started again without its data, emptied (FLUSHALL) or has evicted them. Lost are those that lay in no step "
                "file; what was trained lies in the run folder. Let it save what it is given (appendonly yes, "
                "maxmemory-policy noeviction), then go on with prl-submit --resume RUN: what is lost is sampled again"
            )

    def ask(self, command: str, *arguments: Any, **named: Any) -> Any:
        """The answer to a command that may be given again. Raises RedisLost, RedisFull, RedisUnsaved, or redis.RedisError where
        the server refuses for another reason."""
        end = time.monotonic() + self._reconnect_s
        while True:
            try:
                return getattr(self._client, command)(*arguments, **named)
            except redis.AuthenticationError as error:  # a ConnectionError, too
                raise redis.AuthenticationError(
                    f"Redis at {self._url} lets nobody in with this password, or without one ({error}): have "
                    "streams.redis.password_file name a file with the server's"
                ) from error
            except redis.OutOfMemoryError as error:
                raise RedisFull(
                    f"Redis at {self._url} has no room left: all of its maxmemory is used. Set that higher (CONFIG SET "
                    "maxmemory), or remove what else lies there"
                ) from error
            except redis.ResponseError as error:
                if not str(error).startswith("MISCONF"):
                    raise
                raise RedisUnsaved(
                    f"Redis at {self._url}",
                    f"takes nothing more, since it cannot save its data: is the disk of its folder full (CONFIG GET dir; its "
                    f"log says more)? Make room there. It said: {error}",
                ) from error
            except (redis.ConnectionError, redis.TimeoutError) as error:  # also while it loads its data
                if time.monotonic() >= end:
                    raise RedisLost(
                        f"Redis at {self._url} did not answer for {self._reconnect_s:g} s ({error}): is it running, and is "
                        "streams.redis right?"
                    ) from error
            pause()

    def walk(self, key: str) -> Iterator[tuple[int, int, bytes, bytes]]:
        """(sequence, bytes, checksum, attempt) of the entries of a stream, a few at a time. What is in them stays there."""
        after = -1
        while found := self.ask("eval", _FACTS, 1, key, _id_of(after + 1), _AT_ONCE):
            for entry_id, size, checksum, attempt in found:
                after = _sequence_of(entry_id)
                yield after, size, checksum, attempt

    def bulk_bytes(self) -> int:
        """The most that the server takes in one piece: it hangs up on more."""
        try:
            return int(self.ask("config_get", "proto-max-bulk-len")["proto-max-bulk-len"])
        except (redis.ResponseError, KeyError):  # some servers do not say
            return _BULK_BYTES

    def close(self) -> None:
        self._client.close()


class RedisAppender:
    """One writer's stream."""

    def __init__(
        self, place: RedisPlace, writer: str, options: RedisOptions, awaited: Callable[[], bool] = lambda: False
    ) -> None:
        """`awaited`: whether a step waits for what this writer has."""
        self._server = _Server(place, options)
        self._options = options
        self._awaited = awaited
        self._key = place.key(writer)
        self._bulk_bytes = self._server.bulk_bytes()
        self._server.ask("sadd", place.writers_key, writer)
        # Sizes of the entries in the stream, the oldest first. Which of them were released is not asked, but how many are left,
        # for which the newest are taken.
        self._sizes = deque(size for _, size, _, _ in self._server.walk(self._key))
        if self._sizes:  # the last may never have been announced, and is then released behind the next one only
            self._sizes[-1] = 0
        self.next_sequence = _sequence_of(self._server.ask("eval", _LAST_ID, 1, self._key)) + 1
        self._full: RedisFull | None = None  # what the server said to what is being put

    def put(self, header: Header, data: Encoded) -> Published:
        """Raises TimeoutError where nobody makes room in time, RedisForgot, StreamError where no room would help."""
        if data.size > self._bulk_bytes:
            raise StreamError(
                f"{self._key}: {data.size / 2**20:.0f} MiB of rollouts in one entry, and the server takes "
                f"{self._bulk_bytes / 2**20:.0f} MiB (its proto-max-bulk-len): lower streams.roll_mib (where a single group is "
                "so large, run.rollouts_per_group), set that higher in the server, or use streams.backend=folder"
            )
        fields = {"data": data.whole(), "checksum": data.checksum, "attempt": header.attempt}
        end = time.monotonic() + self._options.full_s
        self._full = None
        while not self._has_room(data.size) or not self._add(header.sequence, fields):
            if time.monotonic() >= end:
                why = self._full or "more than streams.redis.max_mib lets in. Who reads them does not get done with them"
                raise TimeoutError(
                    f"{self._key}: no room for rollouts for {self._options.full_s:g} s: {len(self._sizes)} entries of "
                    f"{sum(self._sizes) / 2**20:.0f} MiB wait. {why}"
                )
            pause()
        self._sizes.append(data.size)
        writer, sequence = header.writer, header.sequence
        return Published(f"{writer}/{sequence}", writer, header.attempt, sequence, data.size, data.checksum)

    def _has_room(self, size: int) -> bool:
        length = self._server.ask("xlen", self._key)
        while len(self._sizes) > length:
            self._sizes.popleft()
        waiting = sum(self._sizes)
        return not waiting or waiting + size <= self._options.max_mib * 2**20 or self._awaited()

    def _add(self, sequence: int, fields: Mapping[str, Any]) -> bool:
        """False: the server is full."""
        entry_id = _id_of(sequence)
        self._server.check_mark()
        try:
            self._server.ask("xadd", self._key, fields, id=entry_id)
        except RedisFull as error:
            self._full = error
            return False
        except redis.ResponseError:
            # The id is taken: by this very entry, where the answer to an earlier request was lost.
            found = self._server.ask("xrange", self._key, entry_id, entry_id)
            if not found or found[0][1].get(b"checksum") != fields["checksum"].encode():
                raise
        return True

    def close(self) -> None:
        self._server.close()


class RedisSource:
    """All writers' streams of a run."""

    def __init__(self, place: RedisPlace, options: RedisOptions) -> None:
        self._server = _Server(place, options)
        self._place = place
        self._released: dict[str, tuple[int, frozenset[int]]] = {}  # writer to the cursor and what was held of it

    def fetch(self, entry: Published, wait_s: float) -> pa.Buffer:
        """What was put is there at once: `wait_s` is of no use here. Raises RedisForgot where the server has lost all that it
        had, be the entry there or not: numbers begin again then."""
        entry_id = _id_of(entry.sequence)
        found = self._server.ask("xrange", self._place.key(entry.writer), entry_id, entry_id)
        self._server.check_mark()
        if not found or b"data" not in found[0][1]:
            raise StreamError(f"{entry.name}: not there")
        return check_bytes(found[0][1][b"data"], entry.bytes, entry.checksum, entry.name)

    def entries(self) -> Iterator[Published]:
        """Whatever somebody else may have put there: what is no entry of prl's is found unreadable by who reads it."""
        names = (name.decode(errors="replace") for name in self._server.ask("smembers", self._place.writers_key))
        for writer in sorted(filter(is_writer, names)):
            for sequence, size, checksum, attempt in self._server.walk(self._place.key(writer)):
                number = int(attempt) if attempt.isdigit() and len(attempt) < 10 else 0
                yield Published(f"{writer}/{sequence}", writer, number, sequence, size, checksum.decode(errors="replace"))

    def set_aside(self, entry: Published) -> None:
        """Into a stream for such entries, the newest of which are kept. A server without room keeps none of it."""
        key, entry_id = self._place.key(entry.writer), _id_of(entry.sequence)
        for _, fields in self._server.ask("xrange", key, entry_id, entry_id):
            try:
                self._server.ask("xadd", self._place.quarantine_key, {**fields, b"name": entry.name}, maxlen=_MAX_ASIDE)
            except RedisFull as full:
                log.warning("the unreadable %s is deleted, and not kept for a person to look at: %s", entry.name, full)
            self._server.ask("xdel", key, entry_id)

    def release(self, done: Cursor, held: Collection[Published] = ()) -> None:
        for writer, last in done.items():
            kept = frozenset(entry.sequence for entry in held if entry.writer == writer)
            if self._released.get(writer) == (last, kept):
                continue
            key, first = self._place.key(writer), min(kept, default=last + 1)
            self._server.ask("xtrim", key, minid=_id_of(first), approximate=False)
            # Of those behind the first that is held only what has come to its end since the last time.
            seen, kept_before = self._released.get(writer, (-1, frozenset()))
            ended = (kept_before | set(range(max(seen + 1, first), last + 1))) - kept
            ids = [_id_of(sequence) for sequence in sorted(ended) if sequence > first]
            if ids:
                self._server.ask("xdel", key, *ids)
            self._released[writer] = last, kept

    def close(self) -> None:
        self._server.close()


def pause() -> None:
    """Between two looks at the server; clients do not ask in step."""
    time.sleep(random.uniform(0.05, 0.15))  # noqa: S311


def _id_of(sequence: int) -> str:
    return f"{sequence + 1}-0"  # 0-0 is no id


def _sequence_of(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0]) - 1
