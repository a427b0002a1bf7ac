"""The one owner of all KV blocks, and the books that prove it.

A block has a count of references per kind of holder: USED by sequences, LEASED to a peer that may read it,
QUARANTINED because a transfer may still write it. Its state is the highest of

    quarantined > leased > used > cached (no holder, in the prefix index) > free (no holder, not in it)

and the states sum to the total at every moment. Cached blocks are evicted when free ones run out: least recently
held first, and a block never before the blocks that continue it. Only the engine thread calls this.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from services.engine.prefix_index import PrefixIndex


class BooksError(AssertionError):
    """References, states or the index contradict one another; names the block. Always a bug."""


class _State(IntEnum):
    FREE = 0
    CACHED = 1
    USED = 2
    LEASED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; the five sum to `total`."""

    free: int
    cached: int
    used: int
    leased: int
    quarantined: int
    total: int


class BlockPool:
    """Blocks 0 to num_blocks - 1 of block_size token slots each, and the prefix index over them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and slots, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(block_size)
        self.num_returns = 0  # grows whenever a block becomes available: "try again" for those that wait
        self.num_evictions = 0
        self._used = [0] * num_blocks
        self._leased = [0] * num_blocks
        self._quarantined = [0] * num_blocks
        self._states = [_State.FREE] * num_blocks
        self._counts = [num_blocks, 0, 0, 0, 0]  # by state
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; exactly the blocks in state FREE
        self._last_held = [0] * num_blocks  # tick at which a block lost its last holder
        self._tick = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (last_held, block id); every cached leaf, and stale entries

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give out."""
        return self._counts[_State.FREE] + self._counts[_State.CACHED]

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, cached, used, leased, quarantined = self._counts
        return BlockCounts(free, cached, used, leased, quarantined, self.num_blocks)

    def num_cached(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody holds."""
        return sum(self._states[block_id] is _State.CACHED for block_id in block_ids)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens."""
        return -(-num_tokens // self.block_size)

    # Holders

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks with one USED reference each and no content, or None if there are not as many."""
        if num_blocks > self.num_available:
            return None
        while len(self._free) < num_blocks:
            self._evict()
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._used[block_id] = 1
            self._set_state(block_id, _State.USED)
        return block_ids

    def use(self, block_ids: Iterable[int]) -> None:
        """One more USED reference each; like lease and quarantine only for blocks that are held or cached."""
        self._hold(self._used, block_ids)

    def unuse(self, block_ids: Iterable[int]) -> None:
        """One USED reference less each. Give the blocks of a prefix last first: what continues it is evicted sooner."""
        self._let_go(self._used, block_ids)

    def lease(self, block_ids: Iterable[int]) -> None:
        """One more LEASED reference each: a peer may read them."""
        self._hold(self._leased, block_ids)

    def unlease(self, block_ids: Iterable[int]) -> None:
        """One LEASED reference less each."""
        self._let_go(self._leased, block_ids)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """One more QUARANTINED reference each: a transfer may still write them, so they leave the index as well."""
        block_ids = list(block_ids)
        self._hold(self._quarantined, block_ids)
        for block_id in block_ids:
            self.drop(block_id)

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """One QUARANTINED reference less each."""
        self._let_go(self._quarantined, block_ids)

    def drop(self, block_id: int) -> list[int]:
        """Take a block (corrupt, say) and all that continue it out of the index; returns those that were in it.

        Holders keep what they hold; cached blocks become free.
        """
        parent = self.index.parent(block_id) if block_id in self.index else None
        dropped = self.index.drop(block_id)
        for each in dropped:
            if self._states[each] is _State.CACHED:
                self._free.append(each)
                self._set_state(each, _State.FREE)
        if parent is not None and self._states[parent] is _State.CACHED and self.index.is_leaf(parent):
            self._push_leaf(parent)
        return dropped

    # Inside

    def _hold(self, references: list[int], block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self._states[block_id] is _State.FREE:
                raise BooksError(f"block {block_id} is free: nobody may hold it without allocating it")
            references[block_id] += 1
            self._set_state(block_id, self._state_by_references(block_id))

    def _let_go(self, references: list[int], block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if references[block_id] < 1:
                raise BooksError(f"block {block_id} ({self._states[block_id].name}) is let go once too often")
            references[block_id] -= 1
            state = self._state_by_references(block_id)
            self._set_state(block_id, state)
            if state is _State.CACHED:
                self._tick += 1
                self._last_held[block_id] = self._tick
                if self.index.is_leaf(block_id):
                    self._push_leaf(block_id)
            elif state is _State.FREE:
                self._free.append(block_id)

    def _state_by_references(self, block_id: int) -> _State:
        if self._quarantined[block_id]:
            return _State.QUARANTINED
        if self._leased[block_id]:
            return _State.LEASED
        if self._used[block_id]:
            return _State.USED
        return _State.CACHED if block_id in self.index else _State.FREE

    def _set_state(self, block_id: int, state: _State) -> None:
        old = self._states[block_id]
        if old is state:
            return
        self._states[block_id] = state
        self._counts[old] -= 1
        self._counts[state] += 1
        if state <= _State.CACHED < old:
            self.num_returns += 1

    def _push_leaf(self, block_id: int) -> None:
        heapq.heappush(self._leaves, (self._last_held[block_id], block_id))
        if len(self._leaves) > 2 * self.num_blocks + 64:  # mostly stale: blocks that were hit again
            self._leaves = sorted({entry for entry in self._leaves if self._is_cached_leaf(entry)})

    def _is_cached_leaf(self, entry: tuple[int, int]) -> bool:
        last_held, block_id = entry
        return (
            self._states[block_id] is _State.CACHED
            and self._last_held[block_id] == last_held
            and self.index.is_leaf(block_id)
        )

    def _evict(self) -> None:
        """Make the cached block (at least one is there) that was held least recently free, leaves first."""
        self.num_evictions += 1
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_cached_leaf(entry):
                self.drop(entry[1])
                return
        # Every cached block is continued by a held one (its tokens were computed twice at once): the held ones then
        # leave the index with it.
        cached = (block_id for block_id, state in enumerate(self._states) if state is _State.CACHED)
        self.drop(min(cached, key=self._last_held.__getitem__))

    # Proof

    def check(
        self,
        used: Mapping[int, int] | None = None,
        leased: Mapping[int, int] | None = None,
        quarantined: Mapping[int, int] | None = None,
    ) -> None:
        """Raise BooksError, naming the block, unless references, states, counts, free list and index agree.

        Given what the holders say they hold (references by block id), proves that no reference is missing or extra.
        """
        for name, references, expected in (
            ("used", self._used, used),
            ("leased", self._leased, leased),
            ("quarantined", self._quarantined, quarantined),
        ):
            if expected is None:
                continue
            for block_id, count in enumerate(references):
                if count != expected.get(block_id, 0):
                    raise BooksError(
                        f"block {block_id} has {count} {name} references, its holders say {expected.get(block_id, 0)}"
                    )
        self._check_states()
        self._check_index()

    def _check_states(self) -> None:
        free = set(self._free)
        counts = [0] * len(_State)
        for block_id, state in enumerate(self._states):
            counts[state] += 1
            if min(self._used[block_id], self._leased[block_id], self._quarantined[block_id]) < 0:
                raise BooksError(f"block {block_id} has negative references")
            if state is not self._state_by_references(block_id):
                raise BooksError(f"block {block_id} is {state.name}, not {self._state_by_references(block_id).name}")
            if (state is _State.FREE) != (block_id in free):
                raise BooksError(f"block {block_id} is {state.name}, in the free list: {block_id in free}")
        if counts != self._counts or len(free) != len(self._free):
            raise BooksError(f"counts {self._counts} against {counts}, {len(self._free)} entries in the free list")

    def _check_index(self) -> None:
        entries = set(self._leaves)
        for block_id, parent in self.index.links():
            if self._quarantined[block_id]:
                raise BooksError(f"block {block_id} is quarantined and in the prefix index")
            if parent is not None and (parent not in self.index or self.index.is_leaf(parent)):
                raise BooksError(f"block {block_id} continues {parent}, which does not know it")
            is_cached_leaf = self._states[block_id] is _State.CACHED and self.index.is_leaf(block_id)
            if is_cached_leaf and (self._last_held[block_id], block_id) not in entries:
                raise BooksError(f"block {block_id} is a cached leaf that can't be evicted")
