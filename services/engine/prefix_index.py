"""Which prefixes are cached: a tree over full blocks, each addressed by a key chained from the root.

The key of a block is BLAKE3(parent's key, its token ids as little-endian uint32); the root's key is the BLAKE3 of
the salt. So equal keys mean equal tokens from position 0 on, and different salts share nothing. A node has at most
one block. A block with the tokens of an indexed one is a duplicate: it stays out of the index.

The index knows nothing of holders. The BlockPool owns it and is the only one that removes from it.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from blake3 import blake3


def root_key(salt: bytes) -> bytes:
    """The key that the first block of a prompt is chained to (32 bytes)."""
    return blake3(salt).digest()


def block_key(parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block that holds `token_ids` and follows the block of `parent_key` (32 bytes)."""
    return blake3(parent_key + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def chain_keys(token_ids: Sequence[int], salt: bytes, block_size: int) -> list[bytes]:
    """The keys of all full blocks of `token_ids`."""
    keys: list[bytes] = []
    parent = root_key(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys


@dataclass(slots=True, eq=False)
class _Node:
    key: bytes
    block_id: int
    parent: "_Node | None"  # None: its parent is a root
    children: "set[_Node]" = field(default_factory=set)


class PrefixIndex:
    """Chain key to block, with the tree that says whose prefix a block is."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._by_key: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._changes: dict[bytes, bool] = {}  # key -> added (True) or removed since the last take_changes

    def __len__(self) -> int:
        """Blocks in the index."""
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        """Whether a block is in the index."""
        return block_id in self._by_block

    def match(self, token_ids: Sequence[int], salt: bytes, limit: int | None = None) -> list[int]:
        """The blocks of the longest cached prefix of `token_ids`, at most `limit` of them."""
        return self.match_keys(chain_keys(token_ids, salt, self.block_size), limit)

    def match_keys(self, keys: Sequence[bytes], limit: int | None = None) -> list[int]:
        """The blocks of the longest run of `keys` from the first that is cached, at most `limit` of them."""
        block_ids: list[int] = []
        for key in keys if limit is None else keys[:limit]:
            node = self._by_key.get(key)
            if node is None:
                break
            block_ids.append(node.block_id)
        return block_ids

    def insert(
        self, token_ids: Sequence[int], salt: bytes, block_ids: Sequence[int], first_block: int = 0
    ) -> list[bytes]:
        """Index the full blocks of `token_ids` from `first_block` on; `block_ids` is the whole block table.

        Returns the chain keys of the full blocks. One that keeps its keys calls `insert_keys`: O(new blocks).
        """
        keys = chain_keys(token_ids, salt, self.block_size)
        self.insert_keys(keys, block_ids, first_block, len(keys))
        return keys

    def insert_keys(self, keys: Sequence[bytes], block_ids: Sequence[int], start: int, stop: int) -> None:
        """Index blocks `[start, stop)` of the table `block_ids`, whose chain keys are `keys`.

        Stops where the parent is no longer in the index: what follows could not be found. Keeps the block that is
        there already where a key has one. Raises ValueError for a block that is indexed for other tokens.
        """
        parent = self._by_key.get(keys[start - 1]) if start > 0 else None
        for position in range(start, stop):
            if position > 0 and parent is None:
                return
            node = self._by_key.get(keys[position])
            if node is None:
                if block_ids[position] in self._by_block:
                    raise ValueError(f"block {block_ids[position]} is indexed already, for other tokens")
                node = _Node(keys[position], block_ids[position], parent)
                self._by_key[node.key] = self._by_block[node.block_id] = node
                if parent is not None:
                    parent.children.add(node)
                self._note(node.key, added=True)
            parent = node

    def is_leaf(self, block_id: int) -> bool:
        """Whether no indexed block continues this one. The block must be indexed."""
        return not self._by_block[block_id].children

    def parent(self, block_id: int) -> int | None:
        """The block before this one, None for the first of a prefix. The block must be indexed."""
        node = self._by_block[block_id].parent
        return None if node is None else node.block_id

    def drop(self, block_id: int) -> list[int]:
        """Take a block and all that continue it out of the index; returns them, nothing if it is not indexed.

        For the BlockPool alone, which then settles their states: call `BlockPool.drop`.
        """
        top = self._by_block.get(block_id)
        if top is None:
            return []
        if top.parent is not None:
            top.parent.children.discard(top)
        dropped, stack = [], [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            del self._by_key[node.key], self._by_block[node.block_id]
            self._note(node.key, added=False)
            dropped.append(node.block_id)
        return dropped

    def keys(self) -> list[bytes]:
        """The chain keys of all indexed blocks: a full report to the directory."""
        return list(self._by_key)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The chain keys (added, removed) since the last call; what came and went in between is in neither."""
        changes, self._changes = self._changes, {}
        return [key for key, added in changes.items() if added], [key for key, added in changes.items() if not added]

    def links(self) -> Iterator[tuple[int, int | None]]:
        """Every (block id, parent's block id or None), for the check of the books."""
        return ((node.block_id, node.parent.block_id if node.parent else None) for node in self._by_block.values())

    def _note(self, key: bytes, *, added: bool) -> None:
        if self._changes.pop(key, added) == added:  # the opposite change, if pending, is undone instead
            self._changes[key] = added
