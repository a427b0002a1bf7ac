"""Who the workers are, and which of them holds which prefix blocks. Plain state; the service around it is elsewhere.

A block is named by its chain key, which stands for the block and everything before it: holding a key means holding its
prefix, as long as no earlier block was evicted. So a prompt's longest cached prefix is found by walking its keys in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.kvtransfer import metrics
from services.kvtransfer.transport import Endpoint, PeerRef

ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that has joined."""

    role: str  # prefill, decode
    endpoint: Endpoint

    @property
    def peer(self) -> PeerRef:
        """Which life of which worker it is."""
        return self.endpoint.peer


@dataclass(frozen=True, slots=True)
class Change:
    """News of the membership."""

    joined: tuple[Member, ...] = ()
    left: tuple[PeerRef, ...] = ()


Watcher = Callable[[Change], None]


class Membership:
    """The workers by id, and who wants to hear of changes."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[Member, Watcher]] = {}

    def join(self, member: Member, watcher: Watcher) -> None:
        """Admits a member and tells it of all others; an earlier life of the same worker leaves.

        The same life may join again before its first stream is seen broken: then the later `watcher` stands for it.
        """
        earlier = self._members.pop(member.peer.worker_id, None)
        watcher(Change(joined=tuple(self.all())))
        if earlier is not None and earlier[0].peer.epoch != member.peer.epoch:
            earlier[1](Change(left=(earlier[0].peer,)))
            self._tell(Change(left=(earlier[0].peer,)))
        self._tell(Change(joined=(member,)))
        self._members[member.peer.worker_id] = (member, watcher)
        self._count()

    def leave(self, member: Member, watcher: Watcher) -> None:
        """Ends what `watcher` stood for; nothing where another stands for the worker by now. Idempotent."""
        if self._members.get(member.peer.worker_id) == (member, watcher):
            del self._members[member.peer.worker_id]
            self._tell(Change(left=(member.peer,)))
            self._count()

    def has(self, peer: PeerRef) -> bool:
        """True where that life of the worker is a member."""
        entry = self._members.get(peer.worker_id)
        return entry is not None and entry[0].peer.epoch == peer.epoch

    def all(self) -> list[Member]:
        """Everyone who is here."""
        return [member for member, _ in self._members.values()]

    def _tell(self, change: Change) -> None:
        for _, watcher in list(self._members.values()):
            watcher(change)

    def _count(self) -> None:
        for role in ROLES:
            metrics.DIRECTORY_MEMBERS.labels(role).set(sum(member.role == role for member in self.all()))


@dataclass(slots=True)
class _Holdings:
    peer: PeerRef
    next_number: int = 0
    keys: set[bytes] = field(default_factory=set)


class PrefixMap:
    """Which worker holds which blocks, as far as they reported it."""

    def __init__(self) -> None:
        self._holdings: dict[str, _Holdings] = {}
        self._holders: dict[bytes, set[str]] = {}

    def report(self, peer: PeerRef, number: int, full: bool, added: Iterable[bytes], removed: Iterable[bytes]) -> bool:
        """Takes a report in. False where one before it is missing: then nothing is taken, and a full one is wanted."""
        name = peer.agent_name
        if full:
            self.forget(peer)
            self._holdings[name] = _Holdings(peer)
        holdings = self._holdings.get(name)
        if holdings is None or (not full and number != holdings.next_number):
            return False
        holdings.next_number = number + 1
        for key in removed:
            self._remove(name, holdings, key)
        for key in added:
            holdings.keys.add(key)
            self._holders.setdefault(key, set()).add(name)
        metrics.DIRECTORY_KEYS.set(len(self._holders))
        return True

    def forget(self, peer: PeerRef) -> None:
        """The worker holds nothing any more."""
        holdings = self._holdings.pop(peer.agent_name, None)
        if holdings is not None:
            for key in list(holdings.keys):
                self._remove(peer.agent_name, holdings, key)
        metrics.DIRECTORY_KEYS.set(len(self._holders))

    def find(self, chain: Sequence[bytes]) -> list[tuple[PeerRef, int]]:
        """How many blocks of the chain, from its first, each worker holds; the longest first, none with nothing."""
        found: list[tuple[str, int]] = []
        alive: set[str] | None = None
        for length, key in enumerate(chain):
            holders = self._holders.get(key, set())
            before = alive if alive is not None else set(holders)
            alive = before & holders
            found += [(name, length) for name in sorted(before - alive)]
            if not alive:
                break
        found += [(name, len(chain)) for name in sorted(alive or ())]
        return [(self._holdings[name].peer, length) for name, length in reversed(found) if length > 0]

    def _remove(self, name: str, holdings: _Holdings, key: bytes) -> None:
        holdings.keys.discard(key)
        if holders := self._holders.get(key):
            holders.discard(name)
            if not holders:
                del self._holders[key]
