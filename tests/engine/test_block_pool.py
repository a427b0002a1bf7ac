import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.block_pool import BlockCounts, BlockPool, BooksError


def cached_chain(pool, tokens, salt=b""):
    """Blocks with these tokens, released: one per block_size tokens, all cached."""
    blocks = pool.allocate(len(tokens) // pool.block_size)
    pool.index.insert(tokens, salt, blocks)
    pool.unuse(reversed(blocks))
    return blocks


def test_allocates_each_block_once_and_never_more_than_there_are():
    pool = BlockPool(5, 4)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.unuse(first)
    assert pool.allocate(3) is None  # all or nothing
    assert pool.counts() == BlockCounts(free=2, cached=0, used=3, leased=0, quarantined=0, total=5)
    pool.check(used=dict.fromkeys(second, 1), leased={}, quarantined={})


def test_blocks_for_rounds_up():
    pool = BlockPool(1, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_a_state_is_the_highest_of_its_holders():
    pool = BlockPool(1, 4)
    (block,) = pool.allocate(1)
    seen = []

    def note():
        counts = pool.counts()
        seen.append(next(name for name in ("free", "used", "leased", "quarantined") if getattr(counts, name) == 1))
        pool.check()

    note()
    pool.lease([block])
    note()
    pool.quarantine([block])
    note()
    pool.unlease([block])
    note()
    pool.unuse([block])
    note()
    pool.lease([block])
    note()
    pool.unquarantine([block])
    note()
    pool.unlease([block])
    note()
    assert seen == ["used", "leased", "quarantined", "quarantined", "quarantined", "quarantined", "leased", "free"]


def test_references_are_counted_per_holder():
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.use([block])
    pool.lease([block, block])
    pool.quarantine([block])
    pool.check(used={block: 2}, leased={block: 2}, quarantined={block: 1})
    for wrong in (
        {"used": {block: 1}},
        {"leased": {block: 3}},
        {"quarantined": {}},
        {"used": {block: 2, 1 - block: 1}},
    ):
        with pytest.raises(BooksError, match="block"):
            pool.check(**wrong)


def test_nobody_holds_a_free_block_or_lets_go_twice():
    pool = BlockPool(2, 4)
    for hold in (pool.use, pool.lease, pool.quarantine):
        with pytest.raises(BooksError, match="block 0 is free"):
            hold([0])
    (block,) = pool.allocate(1)
    pool.unuse([block])
    for let_go in (pool.unuse, pool.unlease, pool.unquarantine):
        with pytest.raises(BooksError, match=f"block {block} "):
            let_go([block])
    pool.check(used={}, leased={}, quarantined={})


def test_indexed_blocks_stay_cached_and_can_be_used_again():
    pool = BlockPool(4, 2)
    blocks = cached_chain(pool, [1, 2, 3, 4])
    assert pool.counts() == BlockCounts(free=2, cached=2, used=0, leased=0, quarantined=0, total=4)
    assert pool.num_available == 4
    hits = pool.index.match([1, 2, 3, 4], b"")
    assert hits == blocks
    pool.use(hits)
    assert pool.counts().used == 2
    assert sorted(pool.allocate(2) + hits) == [0, 1, 2, 3]
    assert pool.allocate(1) is None  # what is used is never evicted
    assert pool.index.match([1, 2, 3, 4], b"") == blocks


def test_evicts_the_longest_unused_first_and_leaves_before_what_they_continue():
    pool = BlockPool(5, 1)
    a, b, c = cached_chain(pool, [1, 2, 3])
    x, y = cached_chain(pool, [8, 9])
    pool.use([a, b])  # a hit on the beginning of the older chain
    pool.unuse([b, a])
    order = [pool.allocate(1)[0] for _ in range(5)]
    # c was held longest ago; y and x before b and a, which were just hit
    assert order == [c, y, x, b, a]
    assert pool.num_evictions == 5
    assert len(pool.index) == 0


def test_a_parent_that_was_let_go_earlier_still_outlives_its_child():
    pool = BlockPool(3, 1)
    parent, child = pool.allocate(2)
    pool.index.insert([1, 2], b"", [parent, child])
    pool.unuse([parent])
    pool.unuse([child])
    (other,) = cached_chain(pool, [7])
    assert [pool.allocate(1)[0] for _ in range(3)] == [child, parent, other]


def test_takes_free_blocks_before_evicting():
    pool = BlockPool(3, 1)
    cached_chain(pool, [1, 2])
    pool.allocate(1)
    assert pool.num_evictions == 0
    assert len(pool.index.match([1, 2], b"")) == 2


def test_a_cached_block_continued_by_a_held_one_can_still_be_evicted():
    """Two sequences computed [1] at once; the second one's [2] continues the first one's block."""
    pool = BlockPool(3, 1)
    (first,) = pool.allocate(1)
    pool.index.insert([1], b"", [first])
    second = pool.allocate(2)
    pool.index.insert([1, 2], b"", second)
    pool.unuse([first])
    assert pool.counts().cached == 1
    pool.check(used=dict.fromkeys(second, 1), leased={}, quarantined={})
    assert pool.allocate(1) == [first]
    assert pool.index.match([1, 2], b"") == []
    pool.unuse([first])
    pool.unuse(second)
    assert pool.counts().free == 3
    pool.check(used={}, leased={}, quarantined={})


def test_a_cached_block_that_is_continued_meanwhile_is_no_leaf_any_more():
    pool = BlockPool(4, 1)
    (first,) = pool.allocate(1)
    pool.index.insert([1], b"", [first])
    second = pool.allocate(2)  # computed [1] too, at the same time
    pool.unuse([first])
    pool.index.insert([1, 2], b"", second)
    (other,) = cached_chain(pool, [7])
    assert pool.allocate(1) == [other]  # held more recently, but nothing continues it
    assert pool.index.match([1, 2], b"") == [first, second[1]]


def test_dropping_a_corrupt_block_frees_what_was_cached_and_leaves_holders_alone():
    pool = BlockPool(4, 1)
    a, b, c, d = cached_chain(pool, [1, 2, 3, 4])
    pool.lease([d])
    assert sorted(pool.drop(b)) == sorted([b, c, d])
    assert pool.counts() == BlockCounts(free=2, cached=1, used=0, leased=1, quarantined=0, total=4)
    assert pool.index.match([1, 2, 3, 4], b"") == [a]
    pool.unlease([d])
    assert pool.counts().free == 3
    pool.check(used={}, leased={}, quarantined={})
    assert len(pool.allocate(4)) == 4
    assert pool.drop(a) == []


def test_a_quarantined_block_is_in_no_index():
    pool = BlockPool(3, 1)
    a, b, c = cached_chain(pool, [1, 2, 3])
    pool.use([a, b, c])
    pool.quarantine([b])
    pool.unuse([c, b, a])
    assert pool.index.match([1, 2, 3], b"") == [a]
    assert pool.counts() == BlockCounts(free=1, cached=1, used=0, leased=0, quarantined=1, total=3)
    assert pool.allocate(3) is None
    pool.unquarantine([b])
    assert pool.counts().free == 2
    assert len(pool.allocate(3)) == 3


def test_num_returns_grows_exactly_when_blocks_become_available():
    pool = BlockPool(3, 1)
    blocks = pool.allocate(2)
    pool.use(blocks[:1])
    pool.lease(blocks[1:])
    pool.unuse(blocks)
    assert pool.num_returns == 0
    pool.unuse(blocks[:1])
    assert pool.num_returns == 1
    pool.unlease(blocks[1:])
    assert pool.num_returns == 2


def test_hitting_the_same_block_for_ever_does_not_grow_the_books():
    pool = BlockPool(2, 1)
    blocks = cached_chain(pool, [1])
    for _ in range(1000):
        pool.use(blocks)
        pool.unuse(blocks)
    assert len(pool._leaves) <= 2 * 2 + 64
    pool.check(used={}, leased={}, quarantined={})


def test_a_pool_of_nothing_is_refused():
    for shape in ((0, 16), (4, 0)):
        with pytest.raises(ValueError, match="needs blocks and slots"):
            BlockPool(*shape)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("auULQlqdi"), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_books_hold_for_any_order_of_calls(operations):
    """Model: a multiset of references per holder. Any allowed call keeps the pool's books equal to it."""
    pool = BlockPool(6, 1)
    held = {name: dict.fromkeys(range(6), 0) for name in ("use", "lease", "quarantine")}
    names = {"u": "use", "L": "lease", "Q": "quarantine", "U": "use", "l": "lease", "q": "quarantine"}
    for operation, block, number in operations:
        is_held = any(held[name][block] for name in held)
        if operation == "a":
            available = sum(1 for b in range(6) if not any(held[name][b] for name in held))
            got = pool.allocate(number)
            assert (got is None) == (number > available)
            for each in got or []:
                assert not any(held[name][each] for name in held)
                held["use"][each] += 1
        elif operation in "uLQ" and (is_held or block in pool.index):
            getattr(pool, names[operation])([block])
            held[names[operation]][block] += 1
        elif operation in "Ulq" and held[names[operation]][block]:
            getattr(pool, "un" + names[operation])([block])
            held[names[operation]][block] -= 1
        elif operation == "d":
            pool.drop(block)
        elif operation == "i" and held["use"][block] and not held["quarantine"][block] and block not in pool.index:
            pool.index.insert([number], b"", [block])
        pool.check(used=held["use"], leased=held["lease"], quarantined=held["quarantine"])
    counts = pool.counts()
    assert counts.quarantined == sum(1 for n in held["quarantine"].values() if n)
    assert counts.free + counts.cached + counts.used + counts.leased + counts.quarantined == 6
