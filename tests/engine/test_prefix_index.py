import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from services.engine.prefix_index import PrefixIndex, block_key, chain_keys, root_key


def test_keys_are_a_blake3_chain():
    root = blake3(b"salt").digest()
    first = blake3(root + struct.pack("<2I", 7, 8)).digest()
    second = blake3(first + struct.pack("<2I", 9, 70000)).digest()
    assert root_key(b"salt") == root
    assert chain_keys([7, 8, 9, 70000, 1], b"salt", 2) == [first, second]
    assert block_key(first, [9, 70000]) == second


def test_matches_the_longest_cached_run_of_full_blocks():
    index = PrefixIndex(2)
    index.insert([1, 2, 3, 4, 5], b"", [10, 11, 12])
    assert len(index) == 2  # the third is not full
    assert index.match([1, 2, 3, 4, 5, 6], b"") == [10, 11]
    assert index.match([1, 2, 3, 9], b"") == [10]
    assert index.match([1], b"") == []
    assert index.match([3, 4], b"") == []  # no prefix: the chain starts elsewhere
    assert index.match([1, 2, 3, 4], b"", limit=1) == [10]
    assert index.match([1, 2, 3, 4], b"", limit=0) == []


def test_salts_share_nothing():
    index = PrefixIndex(2)
    index.insert([1, 2], b"a", [10])
    assert index.match([1, 2], b"b") == []
    index.insert([1, 2], b"b", [11])
    assert index.match([1, 2], b"a") == [10]
    assert index.match([1, 2], b"b") == [11]


def test_the_same_tokens_computed_twice_keep_the_first_block():
    index = PrefixIndex(2)
    index.insert([1, 2, 3, 4], b"", [10, 11])
    index.insert([1, 2, 3, 4, 5, 6], b"", [20, 21, 22])
    assert index.match([1, 2, 3, 4, 5, 6], b"") == [10, 11, 22]
    assert 20 not in index
    assert index.parent(22) == 11


def test_a_block_can_be_indexed_for_one_chain_only():
    index = PrefixIndex(2)
    index.insert([1, 2], b"", [10])
    with pytest.raises(ValueError, match="block 10"):
        index.insert([3, 4], b"", [10])


def test_inserting_only_the_new_blocks_is_the_same():
    whole, parts = PrefixIndex(2), PrefixIndex(2)
    tokens, blocks = [1, 2, 3, 4, 5, 6], [10, 11, 12]
    whole.insert(tokens, b"", blocks)
    parts.insert(tokens[:2], b"", blocks)
    parts.insert(tokens[:4], b"", blocks, first_block=1)
    parts.insert_keys(chain_keys(tokens, b"", 2), blocks, 2, 3)
    assert sorted(whole.links()) == sorted(parts.links()) == [(10, None), (11, 10), (12, 11)]


def test_dropping_takes_the_descendants_and_nothing_else():
    index = PrefixIndex(1)
    index.insert([1, 2, 3], b"", [10, 11, 12])
    index.insert([1, 2, 4], b"", [10, 11, 13])
    index.insert([1, 5], b"", [10, 14])
    index.insert([6], b"", [15])
    assert sorted(index.drop(11)) == [11, 12, 13]
    assert index.drop(11) == []
    assert index.match([1, 2, 3], b"") == [10]
    assert index.match([1, 5], b"") == [10, 14]
    assert index.match([6], b"") == [15]
    assert not index.is_leaf(10)
    assert index.drop(14) == [14]
    assert index.is_leaf(10)


def test_what_follows_a_missing_parent_is_not_indexed():
    index = PrefixIndex(1)
    keys = index.insert([1, 2], b"", [10, 11])
    index.drop(10)
    index.insert_keys([*keys, block_key(keys[1], [3])], [10, 11, 12], 2, 3)
    assert len(index) == 0
    assert index.match([1, 2, 3], b"") == []


def test_changes_are_net_and_told_once():
    index = PrefixIndex(1)
    keys = index.insert([1, 2, 3], b"", [10, 11, 12])
    assert index.take_changes() == (keys, [])
    assert index.take_changes() == ([], [])
    index.drop(12)
    index.insert([1, 2, 3], b"", [10, 11, 13])  # gone and back: no change
    (fourth,) = index.insert([4], b"", [14])
    index.drop(11)
    index.insert([5], b"", [15])
    index.drop(15)  # came and went: no change
    added, removed = index.take_changes()
    assert added == [fourth]
    assert sorted(removed) == sorted(keys[1:])
    assert sorted(index.keys()) == sorted([keys[0], fourth])


@given(
    st.lists(
        st.tuples(st.sampled_from([b"", b"x"]), st.lists(st.integers(0, 1), max_size=9), st.booleans()), max_size=12
    )
)
def test_behaves_like_a_dict_of_prefixes(operations):
    """Model: (salt, prefix) -> block id. drop removes every prefix that continues the dropped one."""
    index, model = PrefixIndex(2), {}
    next_id, reported = 0, set()
    for salt, tokens, drop in operations:
        prefixes = [(salt, tuple(tokens[:end])) for end in range(2, len(tokens) + 1, 2)]
        if drop and prefixes and prefixes[-1] in model:
            gone = [p for p in model if p[0] == salt and p[1][: len(prefixes[-1][1])] == prefixes[-1][1]]
            assert sorted(index.drop(model[prefixes[-1]])) == sorted(model[p] for p in gone)
            for each in gone:
                del model[each]
        else:
            table = list(range(next_id, next_id + len(prefixes)))
            next_id += len(table)
            index.insert(tokens, salt, table)
            for prefix, block_id in zip(prefixes, table, strict=True):
                model.setdefault(prefix, block_id)
        expected = []
        for prefix in prefixes:
            if prefix not in model:
                break
            expected.append(model[prefix])
        assert index.match(tokens, salt) == expected
        assert len(index) == len(model)
        added, removed = index.take_changes()
        assert not reported & set(added)
        assert reported >= set(removed)
        reported = (reported | set(added)) - set(removed)
        assert reported == set(index.keys())
