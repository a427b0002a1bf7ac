from services.engine.deadlines import Deadlines


def test_tells_the_earliest_of_the_live_ones_each_once():
    live = {"a", "b", "c"}
    deadlines = Deadlines(live)
    for when, who in ((3.0, "a"), (1.0, "b"), (2.0, "c")):
        deadlines.push(when, who)
    assert deadlines.next() == 1.0
    live.discard("b")
    assert deadlines.next() == 2.0
    assert deadlines.pop_expired(1.9) == []
    assert deadlines.pop_expired(3.0) == ["c", "a"]
    assert deadlines.pop_expired(99.0) == []
    assert deadlines.next() is None


def test_forgets_those_that_ended_long_before_their_deadline():
    live: set[str] = set()
    deadlines = Deadlines(live)
    for i in range(10_000):
        live.clear()
        live.add(str(i))
        deadlines.push(1e9 + i, str(i))
    assert len(deadlines._heap) < 100
    assert deadlines.next() == 1e9 + 9_999
