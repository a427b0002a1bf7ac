"""Cases for every attention backend, and what each must give: dense attention in float64 numpy, one query at a time."""

from dataclasses import dataclass

import numpy as np
import torch

from services.engine.kernels.paging import Paging, write_kv


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...]  # per sequence: (query rows, context length with them)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    strided: bool = (
        False  # the layer is cut out of a block-major cache of several layers, the query out of a wider tensor
    )
    scale: float = 0.3


CASES = {
    "one token": Case(((1, 1),)),
    "decodes": Case(((1, 1), (1, 7), (1, 8), (1, 9), (1, 33))),
    "prefill": Case(((13, 13),)),
    "chunk": Case(((5, 13),)),
    "mixed": Case(((1, 12), (4, 4), (1, 3), (7, 30), (2, 2))),
    "block borders": Case(((3, 3), (4, 4), (5, 5), (1, 4), (1, 5), (4, 8), (4, 9))),
    "odd sizes": Case(((1, 11), (6, 17)), num_heads=9, num_kv_heads=3, head_dim=20, block_size=3),
    "multi-query": Case(((1, 11), (6, 17)), num_heads=5, num_kv_heads=1),
    "no groups": Case(((1, 11), (6, 17)), num_heads=3, num_kv_heads=3),
    "strided": Case(((1, 12), (4, 4), (7, 30)), strided=True),
    "window": Case(((1, 40), (9, 9), (6, 30), (1, 3)), window=5),
    "window of one": Case(((1, 20), (6, 10)), window=1),
    "wide window": Case(((1, 20), (6, 10)), window=100),
    "softcap": Case(((1, 12), (7, 30), (6, 6)), softcap=2.0),
    "window and softcap": Case(((1, 12), (7, 30), (6, 6)), softcap=1.0, window=4),
    "several tiles": Case(((70, 70), (1, 70), (40, 130)), block_size=16),
    "long decode": Case(((1, 150), (1, 2)), block_size=16),
}


DECODES = {  # for padding behind them
    "decodes": CASES["decodes"],
    "long decode": CASES["long decode"],
    "window and softcap": Case(((1, 1), (1, 7), (1, 40)), window=5, softcap=2.0),
    "odd sizes": Case(((1, 11), (1, 17)), num_heads=9, num_kv_heads=3, head_dim=20, block_size=3),
}


@dataclass(frozen=True)
class Inputs:
    query: torch.Tensor
    layer: torch.Tensor
    paging: Paging
    expected: torch.Tensor


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Scatter random KV over shuffled blocks; every slot that no sequence owns holds NaN."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // case.block_size) for _, length in case.lengths]
    num_blocks = sum(counts) + 3
    ids = rng.permutation(num_blocks)[: sum(counts)]
    tables = np.split(ids, np.cumsum(counts)[:-1])
    shape = (num_blocks, 2, case.num_kv_heads, case.block_size, case.head_dim)
    if case.strided:
        layer = torch.full((num_blocks, 3, *shape[1:]), float("nan"))[:, 1]
    else:
        layer = torch.full(shape, float("nan"))
    num_tokens = sum(rows for rows, _ in case.lengths)
    wide = torch.from_numpy(rng.standard_normal((num_tokens, case.num_heads + 3, case.head_dim), dtype=np.float32))
    query = wide[:, 1 : case.num_heads + 1] if case.strided else wide[:, 1 : case.num_heads + 1].contiguous()
    expected, slots, new_keys, new_values = [], [], [], []
    row = 0
    for (rows, length), table in zip(case.lengths, tables, strict=True):
        key = rng.standard_normal((length, case.num_kv_heads, case.head_dim)).astype(np.float32)
        value = rng.standard_normal((length, case.num_kv_heads, case.head_dim)).astype(np.float32)
        for position in range(length - rows):
            block, slot = table[position // case.block_size], position % case.block_size
            layer[block, 0, :, slot] = torch.from_numpy(key[position])
            layer[block, 1, :, slot] = torch.from_numpy(value[position])
        for position in range(length - rows, length):
            slots.append(int(table[position // case.block_size]) * case.block_size + position % case.block_size)
            expected.append(_dense(query[row].numpy(), key, value, position, case))
            row += 1
        new_keys.append(key[length - rows :])
        new_values.append(value[length - rows :])
    paging = _paging(case, tables, slots)
    write_kv(layer, torch.from_numpy(np.concatenate(new_keys)), torch.from_numpy(np.concatenate(new_values)), paging)
    return Inputs(query, layer, paging, torch.from_numpy(np.stack(expected)).float())


def with_padding(inputs: Inputs, num: int, columns: int, bound: int | None = None) -> tuple[torch.Tensor, Paging]:
    """Query and paging of a step of decodes with `num` rows of padding behind it and block tables of `columns`.

    `bound`: what the host lists say of every sequence's length, as in a CUDA graph.
    """
    paging = inputs.paging
    rows = len(paging.host_seq_lens)
    tables = torch.zeros(rows + num, columns, dtype=torch.int32)  # block 0 of `make_inputs` may well be all NaN
    tables[:rows, : paging.block_tables.shape[1]] = paging.block_tables
    query = torch.cat([inputs.query, torch.full((num, *inputs.query.shape[1:]), 3.0)])
    lengths = paging.host_seq_lens + [0] * num
    starts = list(range(rows + num + 1))
    return query, Paging(
        block_tables=tables,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        slot_mapping=torch.cat([paging.slot_mapping, torch.full((num,), -1)]),
        host_seq_lens=lengths if bound is None else [bound] * len(lengths),
        host_query_starts=starts,
        block_size=paging.block_size,
        num_padding_tokens=num,
    )


def _dense(query: np.ndarray, key: np.ndarray, value: np.ndarray, position: int, case: Case) -> np.ndarray:
    first = 0 if case.window is None else max(0, position + 1 - case.window)
    out = []
    for head, q in enumerate(query.astype(np.float64)):
        kv_head = head // (case.num_heads // case.num_kv_heads)
        scores = key[first : position + 1, kv_head].astype(np.float64) @ q * case.scale
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights = np.exp(scores - scores.max())
        out.append(weights @ value[first : position + 1, kv_head].astype(np.float64) / weights.sum())
    return np.stack(out)


def _paging(case: Case, tables: list[np.ndarray], slots: list[int]) -> Paging:
    longest = max(len(table) for table in tables)
    padded = [np.concatenate([table, np.full(longest - len(table), table[0])]) for table in tables]
    starts = np.concatenate(([0], np.cumsum([rows for rows, _ in case.lengths])))
    lengths = [length for _, length in case.lengths]
    return Paging(
        block_tables=torch.from_numpy(np.stack(padded)).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.from_numpy(starts).int(),
        slot_mapping=torch.tensor(slots),
        host_seq_lens=lengths,
        host_query_starts=starts.tolist(),
        block_size=case.block_size,
    )
