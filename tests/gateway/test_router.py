"""The router, on snapshots."""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.gateway.membership import Load, Role, WorkerInfo, WorkerKey
from services.gateway.router import Candidate, Need, pick

NEED = Need(num_prompt_tokens=100, num_tokens=200, block_size=16)


def worker(
    role: Role, name: str, own: tuple[int, int] = (0, 0), load: dict[str, Any] | None = None, **more: Any
) -> Candidate:
    loaded = Load(**({"num_blocks": 100, "num_free_blocks": 100} | (load or {})))
    info = WorkerInfo(WorkerKey(name, "1"), role, f"{name}:1", "m", load=loaded, max_model_len=1000, **more)
    return Candidate(info, *own)


def p(name: str, own: tuple[int, int] = (0, 0), load: dict[str, Any] | None = None, **more: Any) -> Candidate:
    return worker(Role.PREFILL, name, own, load, **more)


def d(name: str, own: tuple[int, int] = (0, 0), load: dict[str, Any] | None = None, **more: Any) -> Candidate:
    return worker(Role.DECODE, name, own, load, **more)


def names(route: Any) -> tuple[str | None, str]:
    return route.prefill and route.prefill.key.worker_id, route.decode.key.worker_id


def test_shortest_queue_in_seconds_and_fewest_sequences() -> None:
    slow = p("slow", load={"backlog_tokens": 1000, "tokens_per_s": 100.0})
    fast = p("fast", load={"backlog_tokens": 5000, "tokens_per_s": 1000.0})
    busy, free = d("busy", load={"num_running": 5}), d("free", load={"num_running": 1, "num_receiving": 1})
    assert names(pick([slow, fast], [busy, free], NEED)) == ("fast", "free")


def test_what_we_gave_since_the_heartbeat_counts() -> None:
    assert names(pick([p("a", (3, 900)), p("b")], [d("c", (2, 0)), d("e")], NEED)) == ("b", "e")


def test_equal_workers_take_turns() -> None:
    pools = [p("a"), p("b")], [d("c"), d("e")]
    seen = Counter(names(pick(*pools, NEED, turn=turn)) for turn in range(10))
    assert set(seen.values()) == {5}


def test_room_comes_before_few_sequences() -> None:
    full, roomy = d("full", load={"num_free_blocks": 2}), d("roomy", load={"num_running": 9})
    assert names(pick([], [full, roomy], NEED)) == (None, "roomy")
    assert names(pick([], [full], NEED)) == (None, "full")


def test_an_empty_prefill_pool_never_fails() -> None:
    route = pick([], [d("c")], NEED)
    assert route is not None and route.prefill is None and route.fallback == "no_prefill"


def test_no_decode_worker_is_none() -> None:
    assert pick([p("a")], [], NEED) is None
    assert pick([p("a")], [d("c", draining=True)], NEED) is None
    assert pick([p("a")], [d("c", load={"num_blocks": 10})], NEED) is None


def test_draining_and_sick_workers_get_nothing() -> None:
    sick = {"runnable": True, "since_last_step_s": 31.0}
    waiting = {"runnable": False, "since_last_step_s": 900.0}
    assert names(pick([p("a", **sick), p("b", draining=True)], [d("c", **waiting)], NEED)) == (None, "c")
    assert pick([], [d("c", **sick)], NEED) is None


def test_fingerprints_must_match() -> None:
    theirs = {"weights_fingerprint": "w2"}
    assert names(pick([p("a"), p("b", **theirs)], [d("c", **theirs)], NEED)) == ("b", "c")
    for field in ("weights_fingerprint", "tokenizer_fingerprint", "layout_fingerprint"):
        route = pick([p("a", **{field: "x"})], [d("c")], NEED)
        assert route is not None and route.prefill is None and route.fallback == "mismatch"
    # a healthy pair is preferred to a lonely decode worker, even a less busy one
    busy = d("busy", load={"num_running": 3}, **theirs)
    assert names(pick([p("b", **theirs)], [d("lonely"), busy], NEED)) == ("b", "busy")


def test_workers_to_avoid() -> None:
    a, b, c, e = WorkerKey("a", "1"), WorkerKey("b", "1"), WorkerKey("c", "1"), WorkerKey("e", "1")
    pools = [p("a"), p("b")], [d("c"), d("e", load={"num_running": 7})]
    assert names(pick(*pools, NEED, {a, c})) == ("b", "e")
    assert names(pick(*pools, NEED, {a, b, c, e})) == ("a", "c")
    assert names(pick(*pools, NEED, {c}, exclude={a})) == ("b", "e")
    route = pick(*pools, NEED, {c, e}, exclude={a, b})
    assert route is not None and names(route) == (None, "c") and route.fallback == "prefill_failed"


def test_a_resumed_request_stays_with_its_model() -> None:
    need = Need(100, 200, 16, weights_fingerprint="w2")
    assert pick([], [d("c", weights_fingerprint="w1")], need) is None
    assert names(pick([], [d("c"), d("e", weights_fingerprint="w2")], need)) == (None, "e")


def test_a_prompt_too_long_for_the_prefill_pool_goes_to_decode_alone() -> None:
    route = pick([p("a", load={"num_blocks": 4})], [d("c")], NEED)
    assert route is not None and route.prefill is None and route.fallback == "too_long"
