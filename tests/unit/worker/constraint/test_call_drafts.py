"""Checks which tokens of a call are forced in an answer that no grammar is enforced on."""

import re
import signal
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint import call_drafts
from hearth.worker.constraint.call_drafts import TAIL_BYTES, VAIN_MAX, CallDrafts
from hearth.worker.constraint.grammar_client import (
    GrammarEnded,
    GrammarError,
    GrammarLost,
    GrammarProcess,
    GrammarStill,
)
from hearth.worker.constraint.grammar_compiler import GRAMMAR_CHARS_MAX, GrammarCompiler
from hearth.worker.constraint.grammar_protocol import ENDED, SOUND
from scripts.harness.constrained_answers import constrainer_for, tool
from scripts.harness.model_families import family

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
TOOLS = [tool("get_weather", WEATHER), tool("stop", None)]
MODULE = "hearth.worker.constraint.grammar_process"
STARTED_S_MAX = 60.0

# Family -> a call as the model writes it, and the share of its tokens that is forced at least.
WRITTEN = {
    "qwen3": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "celsius"}}'
        "\n</tool_call>",
        0.6,
    ),
    "qwen3_5": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n"
        "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
        0.6,
    ),
    "glm4": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
        "<arg_key>unit</arg_key>\n<arg_value>celsius</arg_value>\n</tool_call>",
        0.5,
    ),
    "harmony": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Ulm","unit":"celsius"}',
        0.4,
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": {"city": "Ulm", "unit": "celsius"}}',
        0.6,
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "celsius"}}]',
        0.6,
    ),
}
QWEN = WRITTEN["qwen3"][0]
UNKNOWN = QWEN.replace("city", "town")


def tokens_of(text: str, name: str = "qwen3") -> list[int]:
    return list(family(name).tokenizer.encode(text, add_special_tokens=False))


def compiler_for(name: str = "qwen3") -> GrammarCompiler:
    return constrainer_for(family(name))


def drafts_of(compiler: GrammarCompiler, tools: list[Any] | None = None) -> CallDrafts:
    found = compiler.call_drafts(Constraints(), TOOLS if tools is None else tools)
    assert found is not None
    return found


def forced_in_time(drafts: CallDrafts) -> list[int]:
    """Return what is forced once the call's process has started."""
    deadline = time.monotonic() + STARTED_S_MAX
    while drafts.is_starting:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return drafts.forced(99)


def forced_count(drafts: CallDrafts, answer: list[int]) -> int:
    """Return how many of an answer's tokens were forced; fail where one is that does not come."""
    place = count = 0
    while place < len(answer):
        forced = forced_in_time(drafts)
        assert forced == answer[place : place + len(forced)]
        count += len(forced)
        drafts.take(answer[place : place + len(forced) + 1])
        place += len(forced) + 1
    return count


@pytest.fixture
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_drafts, "WAIT_S_MAX", STARTED_S_MAX)


real = pytest.mark.usefixtures("_is_patient")


@real
@pytest.mark.process
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_written_as_usual_is_forced_in_large_part(name: str) -> None:
    text, share = WRITTEN[name]
    answer = tokens_of(text, name)
    assert forced_count(drafts_of(compiler_for(name)), answer) >= share * len(answer)


@real
@pytest.mark.process
def test_text_around_calls_has_no_forced_tokens_and_each_call_has() -> None:
    compiler = compiler_for()
    drafts, call, text = drafts_of(compiler), tokens_of(QWEN), tokens_of("And so on. ")
    alone = forced_count(drafts_of(compiler), call)
    assert forced_count(drafts, [*call, *text, *call, *text]) == 2 * alone
    assert not drafts.is_following
    assert drafts.forced(9) == []


@real
@pytest.mark.process
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_whose_arguments_come_in_another_order_is_forced_on(name: str) -> None:
    order = {"city": "unit", "unit": "city", "Ulm": "celsius", "celsius": "Ulm"}
    text = re.sub("|".join(order), lambda found: order[found[0]], WRITTEN[name][0])
    compiler = compiler_for(name)
    drafts, answer = drafts_of(compiler), tokens_of(text, name)
    place = text.index("city")
    count = 0
    for at, token in enumerate(answer):
        forced = forced_in_time(drafts)
        if len(family(name).tokenizer.decode(answer[:at])) > place:
            count += forced[:1] == [token]
        drafts.take([token])
    assert count >= 0.2 * len(tokens_of(text[place:], name)), "in order alone it is 0"
    assert compiler.draft_counts["left"] == 0


@real
@pytest.mark.process
def test_a_call_with_an_unknown_argument_is_silent_until_the_next_call_opens() -> None:
    compiler = compiler_for()
    drafts, call = drafts_of(compiler), tokens_of(QWEN)
    for token in tokens_of(UNKNOWN):
        forced_in_time(drafts)
        drafts.take([token])
    assert compiler.draft_counts["left"] == 1
    assert forced_count(drafts, call) == forced_count(drafts_of(compiler), call)


@real
@pytest.mark.process
def test_a_call_that_is_never_asked_about_is_followed_all_the_same() -> None:
    """A drafter may ask late: what was wrong is left, the next call found in what came since."""
    drafts = drafts_of(compiler_for())
    drafts.take(tokens_of(UNKNOWN + QWEN.removesuffix('elsius"}}\n</tool_call>')))
    assert forced_in_time(drafts) == [], "it has left the first call, and the second one starts"
    assert family("qwen3").tokenizer.decode(forced_in_time(drafts)).endswith("\n</tool_call>")


@real
@pytest.mark.process
def test_no_schema_that_cannot_be_compiled_is_compiled_twice() -> None:
    compiler = compiler_for()
    broken = [tool("f", {"properties": {"a": {"type": "string", "pattern": "(.{1,500}a){500}"}}})]
    for _ in range(2):
        drafts = drafts_of(compiler, broken)
        drafts.take(tokens_of("<tool_call>"))
        assert forced_in_time(drafts) == []
        assert not drafts.is_following
    assert compiler.draft_counts["unavailable"] == 2
    assert compiler.report()["ended"] <= 1


@pytest.mark.process
def test_nothing_is_compiled_before_a_call_opens() -> None:
    compiler = compiler_for()
    drafts_of(compiler).take(tokens_of("No call at all, only tool_call as a word."))
    assert compiler.compiled_count == 0


@real
@pytest.mark.process
def test_the_grammar_of_calls_is_remembered_for_its_owner_alone() -> None:
    compiler = compiler_for()
    for owner in ("a", "a", "b"):
        drafts = compiler.call_drafts(Constraints(), TOOLS, owner)
        assert drafts is not None
        drafts.take(tokens_of("<tool_call>"))
        assert forced_in_time(drafts)
    assert compiler.hits == {"a": 1}
    assert compiler.compiled_count == 2


@real
@pytest.mark.process
def test_an_answer_whose_process_is_killed_goes_on_without_forced_tokens() -> None:
    compiler = compiler_for()
    drafts = drafts_of(compiler)
    drafts.take(tokens_of("<tool_call>"))
    assert forced_in_time(drafts)
    everyone = psutil.Process().children(recursive=True)
    last = max(everyone, key=lambda each: each.create_time())
    assert MODULE in last.cmdline()
    last.send_signal(signal.SIGKILL)
    last.wait(60)
    drafts.take(tokens_of("x"))
    assert drafts.forced(9) == []
    assert compiler.draft_counts["lost"] == 1
    assert compiler.report()["call_drafts_ended"] == 1
    drafts.take(tokens_of("<tool_call>"))
    assert not drafts.is_following, "no other call of this answer is followed"


def test_only_free_answers_with_tools_and_a_known_format_are_drafted() -> None:
    compiler = compiler_for()
    assert compiler.call_drafts(Constraints(), []) is None
    assert compiler.call_drafts(Constraints(tool_choice="none"), TOOLS) is None
    assert compiler.call_drafts(Constraints(tool_choice="required"), TOOLS) is None
    assert compiler.call_drafts(Constraints(is_json=True), TOOLS) is None
    assert compiler.call_drafts(Constraints(), TOOLS) is not None
    unknown = constrainer_for(family("qwen3"), tool_form="unheard of")
    assert unknown.call_drafts(Constraints(), TOOLS) is None


# ---------------------------------------------------------------- with a process that is played


class Played(GrammarProcess):
    """A process that answers as it is told here."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.told: list[list[int]] = []
        self.waits: list[float] = []

    def forced(self, tokens: Any, wait_s: float) -> tuple[list[int], bytes]:
        self.told.append(list(tokens))
        self.waits.append(wait_s)
        answer = self.answers.pop(0) if self.answers else ([], SOUND)
        if isinstance(answer, Exception):
            raise answer
        tokens_forced, state = answer
        return list(tokens_forced), state


MARK = b"<call>"


class Started:
    """Drafts whose tokens are single bytes, and whose calls open at MARK."""

    def __init__(self, *processes: Played | None) -> None:
        self.counts: Counter[str] = Counter()
        self.futures: list[Future[GrammarProcess | None]] = []
        self._processes = list(processes)
        self.drafts = CallDrafts(
            MARK.decode(),
            self._start,
            lambda token: bytes([token]),
            lambda text: list(text.encode()),
            self.counts,
        )

    def _start(self) -> Future[GrammarProcess | None]:
        future: Future[GrammarProcess | None] = Future()
        if self._processes:
            future.set_result(self._processes.pop(0))
        self.futures.append(future)
        return future


def test_tokens_that_were_forced_and_came_are_not_asked_about_again() -> None:
    process = Played(([7, 8, 9], SOUND), ([5], SOUND))
    drafts = Started(process).drafts
    drafts.take(MARK)
    assert drafts.forced(2) == [7, 8]
    drafts.take([7])
    assert drafts.forced(9) == [8, 9]
    drafts.take([8, 9])
    assert drafts.forced(9) == [5]
    drafts.take([6])
    assert drafts.forced(9) == []
    assert drafts.forced(9) == [], "nothing came since"
    assert process.told == [list(MARK), [7, 8, 9], [6]]
    assert set(process.waits) == {call_drafts.WAIT_S_MAX}
    assert call_drafts.WAIT_S_MAX <= 0.02


def test_forced_tokens_that_did_not_come_are_forgotten() -> None:
    process = Played(([7, 8, 9], SOUND), ([5], SOUND))
    drafts = Started(process).drafts
    drafts.take(MARK)
    assert drafts.forced(9) == [7, 8, 9]
    drafts.take([1])
    assert drafts.forced(9) == [5]


def test_no_draft_waits_for_a_process_that_is_starting() -> None:
    started = Started()
    drafts, process = started.drafts, Played(([9], SOUND))
    drafts.take([*MARK, 1])
    assert drafts.is_starting
    assert drafts.forced(9) == []
    drafts.take([2])
    started.futures[0].set_result(process)
    assert drafts.forced(9) == [9]
    assert process.told == [[*MARK, 1, 2]]


def test_a_process_that_never_starts_keeps_no_answer() -> None:
    drafts = (started := Started()).drafts
    drafts.take([*MARK, *[1] * (call_drafts.UNTOLD_TOKENS_MAX + 1)])
    assert started.counts == {"slow": 1}
    assert not drafts.is_following
    drafts.take(MARK)
    assert drafts.forced(9) == []


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (GrammarStill("no answer"), "slow"),
        (GrammarLost("killed"), "lost"),
        (GrammarEnded("CPU time"), "ended"),
        (RuntimeError("a bug of ours"), "broken"),
    ],
)
def test_a_process_that_fails_leaves_the_answer_without_forced_tokens(
    failure: Exception, why: str
) -> None:
    started = Started(Played(failure), Played(([9], SOUND)))
    started.drafts.take(MARK)
    assert started.drafts.forced(9) == []
    started.drafts.take(MARK)
    assert started.drafts.forced(9) == []
    assert started.counts == {why: 1}


def test_a_call_that_ends_lets_the_next_one_begin() -> None:
    started = Started(Played(([], ENDED)), Played(([9], SOUND)))
    started.drafts.take(MARK)
    assert started.drafts.forced(9) == []
    assert started.counts == {"followed": 1}
    started.drafts.take([1, *MARK])
    assert started.drafts.forced(9) == [9]


def test_text_that_only_looks_like_calls_starts_few_processes() -> None:
    wrong = [Played(GrammarError("no such token")) for _ in range(VAIN_MAX + 2)]
    started = Started(*wrong)
    for _ in range(VAIN_MAX + 2):
        started.drafts.take([*MARK, 1])
        started.drafts.forced(9)
    assert len(started.futures) == VAIN_MAX


def test_a_mark_that_ends_amid_a_token_opens_a_call_if_tokens_can_spell_it() -> None:
    process = Played(([9], SOUND))
    pieces = {100: b"..<ca", 101: b"ll>{", 102: b"<call>{"}
    for tokens, spelt in (([100, 101], [102]), ([102], [102])):
        process.told.clear()
        process.answers[:] = [([9], SOUND)]
        future: Future[GrammarProcess | None] = Future()
        future.set_result(process)
        drafts = CallDrafts(
            "<call>", lambda f=future: f, pieces.__getitem__, lambda _: [102], Counter()
        )
        drafts.take(tokens)
        assert drafts.forced(9) == [9]
        assert process.told == [spelt]
    unspelt = CallDrafts("<call>", Future, pieces.__getitem__, lambda _: [101], Counter())
    unspelt.take([100, 101])
    assert not unspelt.is_following


def test_a_mark_is_shorter_than_what_is_kept_of_the_answer() -> None:
    with pytest.raises(AssertionError):
        CallDrafts("x" * TAIL_BYTES, Future, bytes, list, Counter())


def test_tools_that_no_grammar_is_made_of_are_not_kept_as_they_were_sent() -> None:
    compiler = compiler_for()
    for number in range(3):
        large = tool(f"tool{number}", WEATHER | {"description": " " * GRAMMAR_CHARS_MAX})
        drafts = drafts_of(compiler, [large])
        drafts.take(tokens_of("<tool_call>"))
        assert forced_in_time(drafts) == []
    kept = [text for name in compiler._undraftable for text in name]
    assert len(kept) == 6 and sum(map(len, kept)) < 1_000
