"""How a sequence comes by its blocks, makes them known to the prefix index, and gives them back.

take      all blocks of an admission at once: the cached prefix first, then new ones; or nothing at all
grow      the blocks that newly known tokens want
index     blocks that became full and computed
give_back all of them
"""

from services.engine.block_pool import BlockPool, BooksError
from services.engine.prefix_index import block_key, root_key
from services.engine.sequence import Sequence


def update_keys(seq: Sequence, num_tokens: int, block_size: int) -> None:
    """Extend the sequence's chain keys to all full blocks of its first num_tokens; costs O(new blocks)."""
    keys = seq.block_keys
    num_blocks = num_tokens // block_size
    if len(keys) >= num_blocks:
        return
    parent = keys[-1] if keys else root_key(seq.cache_salt)
    for start in range(len(keys) * block_size, num_blocks * block_size, block_size):
        parent = block_key(parent, seq.token_ids(start, start + block_size))
        keys.append(parent)


def cached_prefix(pool: BlockPool, seq: Sequence, most_cached: int) -> list[int]:
    """The cached blocks of the sequence's known tokens that hold no position from most_cached on."""
    update_keys(seq, seq.num_tokens, pool.block_size)
    return pool.index.match_keys(seq.block_keys, most_cached // pool.block_size)


def take(
    pool: BlockPool, seq: Sequence, num_tokens: int, *, most_cached: int, spare: int = 0, most_new: int | None = None
) -> int | None:
    """Give the sequence blocks for num_tokens, reusing cached ones for up to its first most_cached tokens.

    Returns how many blocks are new; or None, and nothing has changed, where that is more than most_new or would leave
    fewer than `spare` blocks available. The reused ones are held before anything may evict them.
    """
    hits = cached_prefix(pool, seq, most_cached)
    num_new = pool.blocks_for(num_tokens) - len(hits)
    too_many = most_new is not None and num_new > most_new
    if too_many or num_new > pool.num_available - pool.num_cached(hits) - spare:
        return None
    pool.use(hits)
    new = pool.allocate(num_new)
    if new is None:
        raise BooksError(f"{num_new} blocks were available and are not")
    seq.block_ids = hits + new
    seq.num_indexed_blocks = len(hits)
    seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * pool.block_size
    return num_new


def grow(pool: BlockPool, seq: Sequence) -> bool:
    """Make the block table cover all known tokens; False (and nothing changed) if there are too few blocks."""
    new = pool.allocate(pool.blocks_for(seq.num_tokens) - len(seq.block_ids))
    if new is None:
        return False
    seq.block_ids += new
    return True


def index_computed(pool: BlockPool, seq: Sequence) -> None:
    """Put the blocks that are full and computed, and were not before, into the prefix index."""
    num_full = seq.num_computed_tokens // pool.block_size
    if num_full <= seq.num_indexed_blocks or not seq.indexable:
        return
    update_keys(seq, seq.num_computed_tokens, pool.block_size)
    pool.index.insert_keys(seq.block_keys, seq.block_ids, seq.num_indexed_blocks, num_full)
    seq.num_indexed_blocks = num_full


def unshare(pool: BlockPool, seq: Sequence, num_computed_tokens: int) -> bool:
    """Exchange the reused blocks from position num_computed_tokens on for new ones, since they will be written.

    They are computed from the start of the first exchanged block. False if there are too few new blocks: then the
    sequence holds only what it keeps.
    """
    num_kept = num_computed_tokens // pool.block_size
    if num_kept * pool.block_size >= seq.num_cached_tokens:
        return True
    exchanged = seq.block_ids[num_kept:]
    pool.unuse(reversed(exchanged))
    new = pool.allocate(len(exchanged))
    seq.block_ids = seq.block_ids[:num_kept] + (new or [])
    seq.num_indexed_blocks = num_kept
    seq.num_computed_tokens = seq.num_cached_tokens = num_kept * pool.block_size
    return new is not None


def give_back(pool: BlockPool, seq: Sequence) -> None:
    """Drop the sequence's hold on all its blocks. Costs O(own blocks)."""
    pool.unuse(reversed(seq.block_ids))
    seq.block_ids = []
    seq.num_indexed_blocks = 0
