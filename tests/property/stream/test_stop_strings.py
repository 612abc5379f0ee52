"""StopMatcher against the plain definition: cut before the stop string that completes first."""

from hypothesis import example, given, strategies as st

from hearth.worker.stream.answer_parts import StopMatcher

TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def chunked(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The prefix of `text` at which a stop string is complete first, without that string."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(TEXT, STOPS, st.lists(st.integers(0, 3), max_size=20))
@example("xabcd", ["abcd", "bc"], [])  # in one piece, the one that begins first ends last
def test_any_chunking_shows_the_text_up_to_the_first_stop_that_completes(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher, shown = StopMatcher(stops), ""
    for piece in chunked(text, sizes):
        shown += matcher.feed(piece)
        if matcher.stop is not None:
            break
    else:
        shown += matcher.finish()
    assert (shown, matcher.stop) == reference(text, stops)


@given(TEXT, STOPS)
def test_what_is_held_back_could_still_become_a_stop(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for end, character in enumerate(text, start=1):
        shown += matcher.feed(character)
        if matcher.stop is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
