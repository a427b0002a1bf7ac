"""The arithmetic of `bench.transfer`, on figures worked out by hand."""

import pytest

from bench import transfer, transfer_hidden


def values() -> dict[str, dict[str, list[float]]]:
    return {
        "nixl, 64 blocks": {"gbps": [4.0, 6.0]},
        "raw nixl, 64 blocks": {"gbps": [5.0, 5.0]},
        "memcpy, 64 blocks": {"gbps": [8.0, 10.0]},
        "memcpy, 64 blocks, verified": {"gbps": [4.0, 6.0]},
    }


def test_ratios_are_taken_round_by_round() -> None:
    assert transfer.speed_ratio(values(), "nixl", "raw nixl", 64) == pytest.approx([0.8, 1.2])
    assert transfer.speed_ratio(values(), "nixl", "memcpy", 64) == pytest.approx([0.5, 0.6])


def test_verifying_is_counted_in_moves_by_memcpy() -> None:
    # 1/8 s to copy a GB, 1/4 s to copy and verify it: as long again; then 1/10 against 1/6 - 1/10 = 1/15: 1.5
    assert transfer.verify_ratio(values(), 64) == pytest.approx([1.0, 1.5])


def test_a_way_counts_both_ends() -> None:
    class Puller:
        def tell(self, name: str, *arguments: object) -> tuple[float, float]:
            assert name == "pull" and arguments[2] is None
            return 0.010, 0.008

    class Holder:
        cpu_s = 1.0

        def tell(self, name: str, serving: bool) -> float:
            assert name == "serving"
            self.cpu_s += 0.0 if serving else 0.002
            return self.cpu_s

    way = transfer.Way("nixl", Puller(), Holder())  # type: ignore[arg-type]
    figures = way.pull(64, None, 0)
    assert figures["gbps"] == pytest.approx(64 * 368_640 / 0.010 / 1e9)
    assert figures["cpu_s_per_gb"] == pytest.approx(0.010 / (64 * 368_640 / 1e9))


@pytest.mark.parametrize(("length", "most"), [(512, 0.0), (513, 0.5), (1024, 0.5), (2048, 0.75), (4096, 0.875)])
def test_the_last_chunk_cannot_hide(length: int, most: float) -> None:
    assert transfer_hidden.bound(length) == most


def test_hidden_is_what_is_no_longer_exposed() -> None:
    assert transfer_hidden.hidden([5.0, 12.0], [20.0, 10.0]) == pytest.approx([0.75, -0.2])
    figures = {"exposed_s": [5.0, 12.0, 4.0]}
    row = transfer_hidden.compare(2048, figures, {"exposed_s": [20.0, 10.0, 10.0]})
    assert row["hidden"] == pytest.approx({"median": 0.6, "min": -0.2, "max": 0.75})
    found = {"1024": row, "2048": row, "4096": {"hidden": {"median": 0.4}}}
    assert [bar.missed for bar in transfer_hidden.bars(found)] == [False, True]


def test_the_bars_are_those_of_the_docstring() -> None:
    def way(raw: float, memcpy: float) -> dict[str, object]:
        cell = {"of_raw_nixl": {"median": raw}, "of_memcpy": {"median": memcpy}}
        return {"sizes": {"64": cell, "512": cell}}

    result = {
        "ways": {"nixl": way(0.79, 0.3), "shm": way(0.5, 0.8)},
        "verifications_per_memcpy": {"64": {"median": 0.9}},
    }
    missed = [bar.name for bar in transfer.bars(result) if bar.missed]
    assert missed == [
        "nixl over raw nixl at 64 blocks",
        "nixl over raw nixl at 512 blocks",
        "verifications of 64 blocks in the time of their memcpy",
    ]
