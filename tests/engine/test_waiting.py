import pytest
from scheduler_rig import make

from services.engine.sequence import PriorityClass
from services.engine.waiting import WaitingQueue


def drain(queue):
    order = []
    while (head := queue.head()) is not None:
        order.append(head.sequence_id)
        queue.remove(head)
    return order


def test_returned_ones_go_by_rank_before_all_new_ones():
    queue = WaitingQueue()
    queue.push(make("new batch", 1, priority=PriorityClass.BATCH))
    queue.push(make("new realtime", 1, priority=PriorityClass.REALTIME))
    queue.push(make("new realtime 2", 1, priority=PriorityClass.REALTIME))
    for sequence_id, arrival_s, priority in (("c", 5.0, 2), ("d", 1.0, 3), ("b", 4.0, 2), ("a", 9.0, 1)):
        queue.push_back(make(sequence_id, 1, arrival_s=arrival_s, priority=PriorityClass(priority)))
    assert (len(queue), queue.num_returned) == (7, 4)
    assert drain(queue) == ["a", "b", "c", "d", "new realtime", "new realtime 2", "new batch"]
    assert queue.num_returned == 0


def test_tokens_are_those_of_all_that_wait():
    queue = WaitingQueue()
    a, b, c = make("a", 3), make("b", 4), make("c", 5, forced=[1, 2])
    queue.push(a)
    queue.push(b)
    queue.push_back(c)
    assert queue.num_tokens == 14
    queue.remove(a)
    queue.remove(c)
    assert (queue.num_tokens, len(queue), queue.head()) == (4, 1, b)
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(a)
