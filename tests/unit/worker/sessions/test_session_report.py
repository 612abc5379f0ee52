"""Checks how sessions are told apart in reports: by client, first words, conversation."""

from dataclasses import replace

from hearth.shared.wire_messages import Speaker
from hearth.worker.sessions.session_visit import KEPT
from tests.helpers.worker.session_prompts import ME, QUESTION, SAID, WORDS, Desk, echo


def named_by_client(client: str = "", conversation: str = "", title: str = "") -> Speaker:
    text = client.capitalize() and f"{client.capitalize()} 1.2"
    return Speaker("key", client=client, client_name=text, conversation=conversation, title=title)


def test_clients_without_ids_are_told_apart_by_client_and_conversation() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS, speaker=named_by_client("curl", "curl-1", "Hello"))
    other = [QUESTION[0], {"role": "user", "content": "Another question?"}]
    desk.ask(other, WORDS, speaker=named_by_client("pi", "pi-2", "Another question?"))
    rows = {row["session"]: row for row in desk.sessions.reports.sessions()}
    assert list(rows) == ["pi-2", "curl-1"], "the last used first"
    assert [rows[name]["title"] for name in rows] == ["Another question?", "Hello"]
    assert [rows[name]["client"] for name in rows] == ["Pi 1.2", "Curl 1.2"]
    assert {row["begun_at"] is not None for row in rows.values()} == {True}
    told = desk.sessions.reports.session("curl-1")
    assert told is not None and [line["turns"] for line in told["lines"]] == [1]
    assert [name for name, _ in desk.log.rows] == ["curl", "pi"], "a file of each client"


def test_a_title_is_in_no_row_of_the_log() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS, speaker=named_by_client("pi", "pi-1", "Xylophone"))
    desk.ask(QUESTION, WORDS, speaker=replace(ME, title="Xylophone"))
    assert [row["title"] for row in desk.sessions.reports.sessions()] == ["Xylophone"] * 2
    assert "Xylophone" not in repr(desk.log.rows)


def test_the_title_of_a_side_call_makes_way_for_that_of_the_conversation() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS, speaker=replace(ME, title="Name this conversation"))
    mended = replace(ME, title="Mend the test")
    desk.end(
        desk.arrive(QUESTION, mended, tools=[{"type": "function", "function": {"name": "read"}}]),
        WORDS,
    )
    desk.ask(QUESTION, WORDS, speaker=replace(ME, title="Name it again"))
    (row,) = desk.sessions.reports.sessions()
    assert row["title"] == "Mend the test"


def test_a_conversation_that_moves_to_another_client_still_finds_its_line() -> None:
    desk = Desk()
    desk.ask(QUESTION, SAID, speaker=named_by_client("curl", "curl-1"))
    visit = desk.arrive(
        [*QUESTION, echo(replace(SAID, reasoning="")), {"role": "user", "content": "And?"}],
        named_by_client("pi", "pi-1"),
    )
    assert visit.place.line is not None and visit.count(KEPT) == 1
