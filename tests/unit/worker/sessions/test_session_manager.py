"""Checks what is recorded of an answer, and how it is rendered when a client sends it back."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions import session_manager as module
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.find_divergence import cause_of
from hearth.worker.sessions.session_context import (
    CHANGED,
    DROPPED,
    KEPT,
    RENDERED,
    Cause,
    Divergence,
    SessionContext,
)
from hearth.worker.sessions.session_manager import REJECTED, UNEXPLAINED
from tests.helpers.worker.session_prompts import (
    HEADER,
    ME,
    QUESTION,
    READ,
    SAID,
    SLACK,
    WORDS,
    Desk,
    echo,
)


def stripped(said: TurnContent, call_ids: Sequence[str] = ()) -> dict[str, Any]:
    return echo(replace(said, reasoning=""), call_ids)


def ids_of(visit: SessionContext) -> tuple[str, ...]:
    assert visit.turn is not None
    return visit.turn.call_ids


# ---------------------------------------------------------------- recording


def test_a_turn_is_its_generation_prompt_with_all_that_was_sampled() -> None:
    desk = Desk()
    visit = desk.ask(QUESTION, SAID, (4, 5, 6))
    assert visit.turn is not None and visit.answer == SAID
    assert visit.turn.ids.tolist() == [*HEADER, 4, 5, 6]
    assert visit.turn.link == visit.line_match.links[-1]
    (line,) = visit.line_match.session.lines.values()
    assert line.tokens.tolist() == [*visit.tokens.tolist(), 4, 5, 6]
    assert line.prompt_tokens == len(visit.tokens)


def test_each_call_and_each_thought_is_given_an_id_that_nobody_can_guess() -> None:
    two = replace(SAID, calls=(READ, READ))
    visits = [Desk().ask(QUESTION, two) for _ in range(3)]
    turns = [visit.turn for visit in visits if visit.turn is not None]
    ids = [each for turn in turns for each in (*turn.call_ids, turn.signature)]
    assert len(set(ids)) == 9
    assert all(re.fullmatch("[A-Za-z0-9]{22}", each) for each in ids)
    silent = Desk().ask(QUESTION, TurnContent("", "hello", ())).turn
    assert silent is not None and (silent.call_ids, silent.signature) == ((), "")


def test_a_cancelled_request_records_nothing() -> None:
    desk = Desk()
    visit = desk.arrive(QUESTION)
    assert desk.end(visit, WORDS, is_whole=False, is_cancelled=True, cached=0) is None
    assert visit.turn is None and visit.answer is None
    assert visit.line_match.session.lines == {}
    assert desk.sessions.counters()["turns"] == 0
    assert desk.arrive([*QUESTION, echo(WORDS)]).states == {2: RENDERED}
    assert not desk.sessions.thinking.items()
    assert len(desk.log.rows) == 1, "but the log has it"


@pytest.mark.parametrize(
    "ending", [{"is_whole": False}, {"sampled": ()}], ids=["stop string", "nothing"]
)
def test_an_answer_that_was_not_delivered_as_sampled_is_no_turn(ending: dict[str, Any]) -> None:
    desk = Desk()
    visit = desk.ask(QUESTION, WORDS, **ending)
    assert visit.turn is None and visit.answer == WORDS
    assert len(visit.line_match.session.lines) == 1, "the line goes on"
    again = desk.arrive([*QUESTION, echo(WORDS), QUESTION[1]])
    assert again.states == {2: RENDERED} and again.line_match.line is not None
    assert again.turns == [None] * 4


def test_a_request_whose_messages_have_no_names_is_not_known() -> None:
    sessions = Desk().sessions
    assert sessions.request_arrived(Prompt(QUESTION, speaker=ME)) is None
    assert sessions.session_rows() == []


# ---------------------------------------------------------------- kept


@pytest.mark.parametrize("is_stripped", [True, False])
def test_an_echo_is_rendered_as_sampled_and_its_thinking_restored(is_stripped: bool) -> None:
    desk = Desk()
    first = desk.ask(QUESTION, WORDS)
    sent = stripped(WORDS) if is_stripped else echo(WORDS)
    before = dict(sent)
    visit = desk.arrive([*QUESTION, sent, QUESTION[1]])
    assert visit.states == {2: KEPT} and visit.turns == [None, None, first.turn, None]
    assert visit.messages[2]["reasoning_content"] == WORDS.reasoning
    assert (visit.messages[2] is sent) != is_stripped
    assert sent == before, "the prompt is as the client sent it"
    assert visit.healed == 0


def test_an_echo_with_its_ids_is_found_behind_other_messages() -> None:
    desk = Desk()
    first = desk.ask(QUESTION, SAID)
    sent = stripped(SAID, [re.sub("(.)", r"_\1", ids_of(first)[0])])
    compacted = [QUESTION[0], {"role": "user", "content": "what was done"}, sent]
    assert desk.arrive(compacted).turns[2] is first.turn
    assert desk.arrive([*compacted[:2], stripped(SAID)]).states == {2: RENDERED}


def test_an_answer_that_its_client_never_parsed_is_known_as_it_was_written() -> None:
    desk = Desk()
    text = "Let me check.\n<tool_call>read /a</tool_call>\n"
    first = desk.ask(QUESTION, SAID, text=text)
    sent = {"role": "assistant", "content": text.rstrip()}
    assert desk.arrive([*QUESTION, sent]).turns[2] is first.turn


def test_a_turn_that_the_prompt_has_no_place_for_counts_as_dropped() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS)
    visit = desk.arrive([*QUESTION, echo(WORDS)])
    assert visit.states == {2: KEPT}
    visit.set_prompt(visit.tokens, visit.header, frozenset())
    assert visit.states == {2: DROPPED}


# ---------------------------------------------------------------- changed, unknown, ambiguous


@pytest.mark.parametrize(
    "sent",
    [
        echo(WORDS, content="All is lost."),
        echo(WORDS, content=""),
        echo(WORDS, reasoning_content="easy"),
        echo(replace(WORDS, calls=(READ,))),
    ],
    ids=["words", "silence", "thinking", "a call more"],
)
def test_what_the_client_changed_is_rendered_as_it_was_sent(sent: dict[str, Any]) -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS)
    visit = desk.arrive([*QUESTION, sent])
    assert visit.states == {2: CHANGED} and visit.turns[2] is None
    assert visit.messages[2] == sent and visit.healed == 0


def test_arguments_that_the_client_changed_are_rendered_although_the_id_is_ours() -> None:
    desk = Desk()
    first = desk.ask(QUESTION, SAID)
    edited = replace(SAID, calls=(("read", {"path": "/b", "limit": 5000}),))
    assert desk.arrive([*QUESTION, stripped(edited, ids_of(first))]).states == {2: CHANGED}
    same = replace(SAID, calls=(("read", {"limit": 5000, "path": "/a"}),))
    assert desk.arrive([*QUESTION, stripped(same, ids_of(first))]).states == {2: KEPT}


def test_two_answers_that_say_the_same_in_other_tokens_are_told_apart_by_ids_alone() -> None:
    desk = Desk()
    one = desk.ask(QUESTION, SAID, (1, 2))
    two = desk.ask(QUESTION, SAID, (3, 4))
    assert desk.arrive([*QUESTION, stripped(SAID, ids_of(one))]).turns[2] is one.turn
    assert desk.arrive([*QUESTION, stripped(SAID, ids_of(two))]).turns[2] is two.turn
    doubtful = desk.arrive([*QUESTION, stripped(SAID)])
    assert doubtful.states == {2: RENDERED} and doubtful.ambiguous == 1


def test_a_call_whose_id_the_client_lost_is_shown_with_that_which_it_was_given() -> None:
    desk = Desk()
    (given,) = ids_of(desk.ask(QUESTION, SAID))
    lost = stripped(SAID, ["call2n0"])
    result = {"role": "tool", "tool_call_id": "call2n0", "content": "x"}
    called, answered = desk.arrive([*QUESTION, lost, result]).messages[2:]
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"] == given
    assert lost["tool_calls"][0]["id"] == result["tool_call_id"] == "call2n0"


def test_one_id_in_two_conversations_is_that_of_the_call_at_its_place() -> None:
    desk = Desk()
    desk.sessions.new_id = lambda: "a1B2c3D4e"
    other = [{**QUESTION[0], "content": "else"}, *QUESTION[1:]]
    one, two = desk.ask(QUESTION, SAID, (1, 2)), desk.ask(other, SAID, (3, 4))
    assert desk.arrive([*QUESTION, stripped(SAID, ids_of(one))]).turns[2] is one.turn
    assert desk.arrive([*other, stripped(SAID, ids_of(two))]).turns[2] is two.turn


def test_thinking_that_was_sent_tells_two_answers_apart() -> None:
    desk = Desk()
    one = desk.ask(QUESTION, WORDS, (1, 2))
    two = desk.ask(QUESTION, replace(WORDS, reasoning="easy"), (3, 4))
    assert desk.arrive([*QUESTION, echo(WORDS)]).turns[2] is one.turn
    sent = echo(WORDS, reasoning_content="easy")
    assert desk.arrive([*QUESTION, sent]).turns[2] is two.turn


# ---------------------------------------------------------------- healing


def test_thinking_comes_back_where_the_tokens_are_not_known() -> None:
    desk = Desk()
    desk.ask(QUESTION, SAID)
    desk.forget_turns()
    sent = stripped(replace(SAID, calls=(("read", {"limit": 5000, "path": "/a"}),)))
    visit = desk.arrive([*QUESTION, sent])
    assert visit.states == {2: RENDERED} and visit.healed == 1
    assert visit.messages[2] == {**sent, "reasoning_content": SAID.reasoning}
    assert "reasoning_content" not in sent
    desk.end(visit, WORDS)
    assert desk.sessions.counts["turns_healed"] == 1


@pytest.mark.parametrize(
    ("messages", "speaker"),
    [
        ([*QUESTION, stripped(SAID)], Speaker("another key", "s1")),
        ([QUESTION[1], stripped(SAID)], ME),
        ([*QUESTION, stripped(replace(SAID, content="Let me see."))], ME),
        ([*QUESTION, stripped(replace(SAID, calls=()))], ME),
        ([*QUESTION, echo(SAID, reasoning_content="my own")], ME),
    ],
    ids=["key", "place", "words", "calls", "it has thinking"],
)
def test_thinking_never_comes_back_to_other_words(
    messages: list[dict[str, Any]], speaker: Speaker
) -> None:
    desk = Desk()
    desk.ask(QUESTION, SAID)
    desk.forget_turns()
    visit = desk.arrive(messages, speaker)
    assert visit.healed == 0 and visit.messages == messages


def test_a_changed_turn_is_not_given_the_thinking_of_another_that_says_so() -> None:
    desk = Desk()
    first = desk.ask(QUESTION, SAID)
    other = replace(SAID, content="Let me see.", reasoning="of another")
    desk.ask(QUESTION, other, (4, 5))
    visit = desk.arrive([*QUESTION, stripped(other, ids_of(first))])
    assert visit.states == {2: CHANGED} and visit.healed == 0
    assert "reasoning_content" not in visit.messages[2]


# ---------------------------------------------------------------- counting and telling


def test_turns_are_counted_once_the_request_has_ended() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS)
    unknown = echo(TurnContent("", "never said", ()))
    changed = [*QUESTION, echo(WORDS, content="edited"), QUESTION[1], unknown]
    visits = [desk.arrive([*QUESTION, stripped(WORDS), QUESTION[1]]), desk.arrive(changed)]
    assert desk.sessions.counters()["turns_kept"] == 0
    for number, visit in enumerate(visits):
        desk.end(visit, WORDS, (9, number))
    counts = desk.sessions.counters()
    assert (counts["turns_kept"], counts["turns_changed"], counts["turns_rendered"]) == (1, 1, 1)
    assert counts["turns"] == 3 and counts["turn_bytes"] > 3 * 500
    assert (counts["canonical_drift"], counts["exact_key_rejected_by_model_lcp"]) == (0, 0)


def test_tokens_of_the_own_line_that_were_not_kept_are_told_and_counted() -> None:
    desk = Desk()
    history = QUESTION * 20
    desk.ask(history, WORDS)
    visit = desk.arrive([*history, echo(WORDS), QUESTION[1]])
    shared = visit.shared
    assert shared == 400
    told = desk.end(visit, WORDS, cached=shared - 100, limit=shared - 5)
    assert told is not None and told["cause"] == "eviction"
    assert (told["token"], told["lost"]) == (shared - 100, 95)
    assert desk.sessions.counts["lost_tokens"] == 95
    assert desk.log.rows[-1][1]["divergence"]["lost"] == 95


def test_other_tokens_of_an_answer_that_stands_as_it_was_sampled_are_unexplained() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS)
    visit = desk.arrive([*QUESTION, echo(WORDS), *QUESTION[1:]])
    before = visit.line_match.earlier
    assert before is not None
    cause = cause_of(before, visit.line_match.shape, before.prompt_tokens, len(QUESTION), KEPT)
    assert cause.name == UNEXPLAINED


@pytest.mark.parametrize(("unused_s", "cause"), [(9.0, "eviction"), (11.0, "expired")])
def test_what_went_for_its_age_is_told_as_such(unused_s: float, cause: str) -> None:
    desk = Desk(ttl_s=10.0)
    history = QUESTION * 20
    desk.ask(history, WORDS)
    (line,) = desk.sessions.lines.lines
    line.used_at -= unused_s
    visit = desk.arrive([*history, echo(WORDS), QUESTION[1]])
    told = desk.end(visit, WORDS, cached=0)
    assert told is not None and told["cause"] == cause


def test_what_a_prefills_cuts_cost_is_no_loss() -> None:
    desk = Desk()
    history = QUESTION * 20
    desk.ask(history, WORDS)
    visit = desk.arrive([*history, echo(WORDS), QUESTION[1]])
    assert desk.end(visit, WORDS, cached=visit.shared - SLACK - 16) is None
    assert desk.sessions.counts["lost_tokens"] == 0


def test_a_row_of_the_log_has_the_request_and_no_word_of_it() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS)
    visit = desk.arrive([*QUESTION, stripped(WORDS), QUESTION[1]])
    desk.end(visit, WORDS)
    session, row = desk.log.rows[-1]
    assert session == "s1"
    expected = {"messages": 4, "stable_prefix_msg_count": 2, "reused_turns": 1, "turn": 2}
    expected |= {"line": 1, "parent": None, "kind": "main", "healed_turns": 0}
    assert row.items() >= expected.items()
    assert not any(word in str(row) for word in ("brief", "fix it", "well", "hard"))


def test_the_session_is_told_with_its_lines_and_requests() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS)
    desk.ask([*QUESTION, echo(WORDS), QUESTION[1]], WORDS)
    desk.ask([*QUESTION, echo(WORDS), QUESTION[0]], WORDS)
    told = desk.sessions.lines_report("s1")
    assert told is not None
    main, branch = told["lines"]
    assert (main["line"], main["kind"], main["turns"], len(main["requests"])) == (1, "main", 2, 2)
    assert (branch["parent"], branch["kind"], branch["branch_message"]) == (1, "branch", 3)
    assert branch["branch_token"] == 42, "what both prompts begin with"
    assert desk.sessions.lines_report("another") is None
    (row,) = desk.sessions.session_rows()
    assert (row["session"], row["lines"], row["turns"]) == ("s1", 2, 3)


def test_once_the_cache_is_emptied_nothing_is_lost_against_it_and_turns_are_still_known() -> None:
    desk = Desk()
    running = desk.arrive([*QUESTION, *QUESTION])
    first = desk.ask(QUESTION, WORDS)
    on_it = desk.arrive([*QUESTION, echo(WORDS), QUESTION[1]])
    assert on_it.line_match.line is not None
    desk.sessions.forget_lines()
    visit = desk.arrive([*QUESTION, stripped(WORDS), QUESTION[1]])
    assert visit.line_match.earlier is None and visit.turns[2] is first.turn
    assert desk.end(visit, WORDS, cached=0) is None
    for each in (on_it, running):  # they were computed while the cache was emptied
        desk.end(each, WORDS)
        assert desk.log.rows[-1][1]["parent"] is None
    told = desk.sessions.lines_report("s1")
    assert told is not None and len(told["lines"]) == 3


@pytest.mark.parametrize("is_back", [True, False])
def test_a_session_that_was_forgotten_while_its_request_ran_has_its_line(
    monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    desk = Desk(idle_s=100.0)
    desk.ask(QUESTION, WORDS)
    visit = desk.arrive([*QUESTION, echo(WORDS), QUESTION[1]])
    now[0] = 1_000.0
    desk.arrive(QUESTION, ME if is_back else Speaker("key", "another"))
    desk.end(visit, WORDS)
    assert desk.log.rows[-1][1]["turn"] == 1
    told = desk.sessions.lines_report("s1")
    assert told is not None and [line["turns"] for line in told["lines"]] == [1]


# ---------------------------------------------------------------- tools that a session loaded


def test_loaded_tools_are_remembered_of_a_session_with_an_id() -> None:
    desk = Desk()
    tools = [{"type": "function", "function": {"name": n}} for n in ("grep", "web", "sql")]
    result = {"role": "tool", "content": "", "tool_references": ["grep", "web", "not listed"]}
    for speaker in (ME, Speaker("key")):
        desk.arrive([*QUESTION, result], speaker, deferred=tools)
    desk.arrive([*QUESTION, {**result, "tool_references": ["web", "sql"]}], deferred=tools)
    compacted = [QUESTION[0], {"role": "user", "content": "a summary"}]
    assert desk.arrive(compacted).loaded == ["grep", "web", "sql"]
    assert desk.arrive(QUESTION).loaded == [], "taken back to before it was loaded"
    assert desk.arrive(compacted, Speaker("key")).loaded == []
    assert desk.arrive(compacted, Speaker("key", "s2")).loaded == []
    desk.sessions.forget_lines()
    assert desk.arrive(compacted).loaded == ["grep", "web", "sql"]


def test_the_trace_tells_of_each_request_what_the_three_counters_sum() -> None:
    desk = Desk()
    names = ("vlm_retreat", "hybrid_trim_miss", REJECTED)
    desk.ask(QUESTION, WORDS)
    assert [desk.log.rows[-1][1][name] for name in names] == [0, 0, 0]
    visit = desk.arrive(QUESTION)
    again = pack([*range(2, len(visit.tokens))])
    visit.divergence = Divergence(Cause(UNEXPLAINED, 1), 2, len(again), "", reread=again)
    desk.end(visit, WORDS, raised=frozenset(names[:2]), cached=2)
    assert [desk.log.rows[-1][1][name] for name in names] == [1, 1, 1]
    assert desk.sessions.counters()[REJECTED] == 1


def test_a_client_that_numbers_each_answers_calls_anew_has_results_at_their_own_calls() -> None:
    desk = Desk()
    desk.ask(QUESTION, SAID)
    result = {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    known, unknown = echo(SAID, ["call_0"]), echo(replace(SAID, content="Once more."), ["call_0"])
    visit = desk.arrive([*QUESTION, known, result, unknown, result])
    calls = [visit.messages[at]["tool_calls"][0]["id"] for at in (2, 4)]
    assert [visit.messages[at]["tool_call_id"] for at in (3, 5)] == calls
    assert calls[0] != calls[1] == "call_0"


# ---------------------------------------------------------------- who is told by which client


def named_by_client(client: str = "", conversation: str = "", title: str = "") -> Speaker:
    text = client.capitalize() and f"{client.capitalize()} 1.2"
    return Speaker("key", client=client, client_name=text, conversation=conversation, title=title)


def test_clients_without_ids_are_told_apart_by_client_and_conversation() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS, speaker=named_by_client("curl", "curl-1", "Hello"))
    other = [QUESTION[0], {"role": "user", "content": "Another question?"}]
    desk.ask(other, WORDS, speaker=named_by_client("pi", "pi-2", "Another question?"))
    rows = {row["session"]: row for row in desk.sessions.session_rows()}
    assert list(rows) == ["pi-2", "curl-1"], "the last used first"
    assert [rows[name]["title"] for name in rows] == ["Another question?", "Hello"]
    assert [rows[name]["client"] for name in rows] == ["Pi 1.2", "Curl 1.2"]
    assert {row["begun_at"] is not None for row in rows.values()} == {True}
    told = desk.sessions.lines_report("curl-1")
    assert told is not None and [line["turns"] for line in told["lines"]] == [1]
    assert [name for name, _ in desk.log.rows] == ["curl", "pi"], "a file of each client"


def test_a_title_is_in_no_row_of_the_log() -> None:
    desk = Desk()
    desk.ask(QUESTION, WORDS, speaker=named_by_client("pi", "pi-1", "Xylophone"))
    desk.ask(QUESTION, WORDS, speaker=replace(ME, title="Xylophone"))
    assert [row["title"] for row in desk.sessions.session_rows()] == ["Xylophone"] * 2
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
    (row,) = desk.sessions.session_rows()
    assert row["title"] == "Mend the test"


def test_a_conversation_that_moves_to_another_client_still_finds_its_line() -> None:
    desk = Desk()
    desk.ask(QUESTION, SAID, speaker=named_by_client("curl", "curl-1"))
    visit = desk.arrive(
        [*QUESTION, echo(replace(SAID, reasoning="")), {"role": "user", "content": "And?"}],
        named_by_client("pi", "pi-1"),
    )
    assert visit.line_match.line is not None and visit.count(KEPT) == 1
