"""Checks that a stream's error events tell no secret, wherever they are cut, and nothing else."""

import itertools

from hypothesis import given, strategies as st

from hearth.proxy.gateway.config_file import HELD_BYTES_MAX, ErrorEventRedactor, Secrets

SECRET = "canary-0123456789"
TEXT = b'event: content_block_delta\ndata: {"text": "%b"}\n\n' % SECRET.encode()
ERRORS = (
    b'event: error\ndata: {"error": {"message": "key canary-0123456789 is odd"}}\n\n',
    b'data: {"error": {"message": "key canary-0123456789 is odd"}}\r\n\r\n',
    b'data: {"type":"error","message":"canary-0123456789"}\n\n',
)
EVENTS = (TEXT, *ERRORS, b": ping\n\n", b"data: [DONE]\n\n", b"event: e\r\n\r\n", b"data: {\n\n")


def sent(pieces: list[bytes]) -> bytes:
    redactor = ErrorEventRedactor(Secrets(frozenset({SECRET})))
    return b"".join([*map(redactor.feed, pieces), redactor.rest()])


def redacted(event: bytes) -> bytes:
    return event.replace(SECRET.encode(), b"***") if event in ERRORS else event


@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_only_errors_are_changed_however_the_stream_is_cut(
    events: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(events)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(places)]
    assert sent(pieces) == b"".join(map(redacted, events))


def test_an_error_that_breaks_off_tells_no_secret_and_an_endless_one_is_not_held_for_ever() -> None:
    for error in ERRORS:
        assert sent([error[:-4]]) == redacted(error)[:-4]
    body = b'{"content": "canary-0123456789", "more": "\\n\\n"}'
    assert sent([body[:20], body[20:]]) == body
    long = b"event: error\ndata: " + b"x" * HELD_BYTES_MAX
    assert ErrorEventRedactor(Secrets(frozenset({SECRET}))).feed(long) == long


def test_it_says_whether_an_error_has_gone_by() -> None:
    for event in (*ERRORS, TEXT):
        redactor = ErrorEventRedactor(Secrets(frozenset({SECRET})))
        assert b"".join([redactor.feed(event[:9]), redactor.feed(event[9:])]) == redacted(event)
        assert redactor.has_errors is (event in ERRORS)
