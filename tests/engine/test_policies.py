from scheduler_rig import make

from services.engine.policies import Admission, is_protected, most_tokens, rank, tokens_to_admit, victim
from services.engine.sequence import PriorityClass


def test_rank_is_class_then_arrival_then_order_of_being_added():
    late_realtime = make("a", 1, priority=PriorityClass.REALTIME, arrival_s=9.0)
    early_batch = make("b", 1, priority=PriorityClass.BATCH, arrival_s=1.0)
    early = make("c", 1, arrival_s=1.0, order=1)
    tie = make("d", 1, arrival_s=1.0, order=2)
    late = make("e", 1, arrival_s=2.0, order=0)
    ranked = sorted([late, early_batch, tie, late_realtime, early], key=rank)
    assert [seq.sequence_id for seq in ranked] == ["a", "c", "d", "e", "b"]


def test_most_tokens_is_bounded_by_the_context():
    assert most_tokens(make("s", 10, 5), 100) == 15
    assert most_tokens(make("s", 10, 500), 100) == 100
    assert most_tokens(make("s", 10, 5, forced=[1, 2]), 100) == 15  # forced output counts towards max_tokens
    assert most_tokens(make("s", 10, 1, forced=[1, 2]), 100) == 12
    assert most_tokens(make("s", 10, 5, leaves_after_first_token=True), 100) == 10


def test_a_protected_sequence_is_admitted_as_in_the_worst_case():
    seq = make("s", 10, 5)
    assert tokens_to_admit(seq, Admission.OPTIMISTIC, 4, 100) == 10
    assert tokens_to_admit(seq, Admission.WORST_CASE, 4, 100) == 15
    seq.num_preemptions = 3
    assert tokens_to_admit(seq, Admission.OPTIMISTIC, 4, 100) == 10
    seq.num_preemptions = 4
    assert is_protected(seq, 4)
    assert tokens_to_admit(seq, Admission.OPTIMISTIC, 4, 100) == 15


def test_victim_is_of_the_lowest_class_the_latest_to_arrive_and_not_protected():
    realtime = make("a", 1, priority=PriorityClass.REALTIME, arrival_s=9.0)
    batch_early = make("b", 1, priority=PriorityClass.BATCH, arrival_s=1.0)
    batch_late = make("c", 1, priority=PriorityClass.BATCH, arrival_s=2.0)
    running = [batch_late, realtime, batch_early]
    assert victim(running, 4) is batch_late
    batch_late.num_preemptions = 4
    assert victim(running, 4) is batch_early
    batch_early.num_preemptions = 4
    assert victim(running, 4) is realtime
    assert victim([batch_late], 4) is None
    assert victim([], 4) is None
