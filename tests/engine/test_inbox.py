import threading

from services.engine.inbox import Inbox


def test_drains_in_order_and_at_once():
    inbox = Inbox()
    assert inbox.drain() == []
    inbox.post("a")
    inbox.post("b")
    assert len(inbox) == 2
    assert inbox.drain() == ["a", "b"]
    assert inbox.drain() == []


def test_wait_returns_when_something_is_posted_and_when_time_is_over():
    inbox = Inbox()
    assert inbox.wait(0.001) is False
    timer = threading.Timer(0.01, inbox.post, args=["late"])
    timer.start()
    assert inbox.wait(30) is True
    assert inbox.drain() == ["late"]
    assert inbox.wait(0.001) is False
    timer.join()


def test_loses_nothing_with_many_posters():
    inbox = Inbox()
    num_posters, num_each = 4, 2000
    posters = [
        threading.Thread(target=lambda poster=poster: [inbox.post((poster, i)) for i in range(num_each)])
        for poster in range(num_posters)
    ]
    for poster in posters:
        poster.start()
    seen = []
    while len(seen) < num_posters * num_each:
        assert inbox.wait(30)
        seen += inbox.drain()
    for poster in posters:
        poster.join()
    for poster in range(num_posters):
        assert [i for who, i in seen if who == poster] == list(range(num_each))
