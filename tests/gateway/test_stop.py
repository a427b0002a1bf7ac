"""Stop strings: the outcome depends on the text alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stop import StopMatcher


def one_shot(text: str, stops: list[str]) -> tuple[str, bool]:
    """By the definition: the shortest prefix of the text that ends in a stop string, less the longest such string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def in_pieces(text: str, stops: list[str], cuts: list[int]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out, begin = "", 0
    for cut in [*sorted(cuts), len(text)]:
        out += matcher.feed(text[begin:cut])
        begin = max(begin, cut)
        assert text.startswith(out)
    return out + matcher.flush(), matcher.stopped


texts = st.text(alphabet="abc", max_size=30)


@given(texts, st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 30)))
def test_every_split_gives_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    cuts = [min(cut, len(text)) for cut in cuts]
    assert in_pieces(text, stops, cuts) == one_shot(text, stops)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END."])
    assert matcher.feed("The EN") == "The "
    assert matcher.num_held == 2
    assert matcher.feed("EMY") == "ENEMY"
    assert matcher.feed(" EEND") == " E"
    assert matcher.feed(".after") == ""
    assert matcher.stopped
    assert matcher.feed("more") == "" and matcher.flush() == ""


def test_the_first_to_complete_wins_and_of_those_the_longest() -> None:
    matcher = StopMatcher(["bcd", "c", "abc"])
    assert matcher.feed("xab") == "x"
    assert matcher.feed("cd") == ""
    assert matcher.stopped


def test_a_stop_string_at_the_very_beginning() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.feed("\nhello") == "" and matcher.stopped
