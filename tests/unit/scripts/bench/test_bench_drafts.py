"""The bench of drafts counts what the engine would do, and its answers are as told."""

import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, strategies as st
from tiktoken.load import load_tiktoken_bpe

from hearth.commands.replay.traces import EXCERPTS_DIR
from hearth.worker.draft.draft import NO_DRAFT, Draft, chain
from scripts.bench import drafts, drafts_answers
from scripts.bench.drafts_forced import Lies, compiler, forced_by_schema
from scripts.bench.drafts_replay import (
    WAITING_MAX,
    DraftCounts,
    TokenAnswer,
    accepted_path,
    replay,
    rows_cost,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}


def answer_of(tokens: Sequence[int], prompt: Sequence[int] = ()) -> TokenAnswer:
    return TokenAnswer(prompt, tokens, ["text"] * len(tokens))


class Oracle:
    """Knows the answer, and lies about each token with a chance."""

    def __init__(self, answer: TokenAnswer, lies: float) -> None:
        self.count = 0
        self._answer, self._lies, self._draws = answer, lies, random.Random(1)

    def take(self, tokens: Sequence[int]) -> None:
        self.count += len(tokens)

    def is_promising(self) -> bool:
        return True

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        truth = self._answer.tokens[self.count : self.count + tokens_max]
        told = [token + 1 if self._draws.random() < self._lies else token for token in truth]
        return chain(told, ["history"] * len(told)) if told else NO_DRAFT

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        pass


class Silent(Oracle):
    """Has no draft."""

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        return NO_DRAFT


# ---------------------------------------------------------------- replay


def test_plain_decoding_has_a_forward_of_one_row_for_each_token_but_the_prompts_own() -> None:
    answer = answer_of(range(10))
    counts = replay(Silent(answer, 0), answer, rows_max=8, has_states=False)["text"]
    assert (counts.tokens, counts.forwards, counts.rows) == (9, 9, 9)
    assert counts.costs == {"m4": 9.0, "m5": 9.0}


def test_an_oracle_that_never_lies_fills_each_forward() -> None:
    answer = answer_of(range(17))
    counts = replay(Oracle(answer, lies=0), answer, rows_max=8, has_states=False)["text"]
    assert (counts.tokens, counts.forwards, counts.rows) == (16, 2, 16)
    assert counts.accepted == {"history": 14}
    assert counts.costs["m4"] == 5.0


def test_an_oracle_that_always_lies_costs_rows_alone() -> None:
    answer = answer_of(range(100, 121))
    counts = replay(Oracle(answer, lies=1), answer, rows_max=4, has_states=False)["text"]
    assert (counts.tokens, counts.forwards) == (20, 20)
    # The draft is what the oracle still knows: three tokens but for the last forwards.
    assert counts.rows == 20 * 4 - 3
    assert not counts.accepted.total()


def test_with_states_what_a_reject_leaves_is_fed_again_until_nothing_is_drafted() -> None:
    answer = answer_of(range(100, 110))
    counts = replay(Oracle(answer, lies=1), answer, rows_max=9, has_states=True)["text"]
    drafted_to_the_full = 7 * 9
    assert counts.rows == drafted_to_the_full + WAITING_MAX + 2
    assert counts.forwards == 9


class Late(Oracle):
    """Has no draft at first."""

    is_hopeful = True

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        return super().propose(tokens_max, waiting) if self.count > 1 else NO_DRAFT

    def is_promising(self) -> bool:
        return self.is_hopeful


@pytest.mark.parametrize(("is_hopeful", "forwards"), [(True, 3), (False, 16)])
def test_behind_a_forward_without_a_draft_only_a_promise_has_the_next_one_wait(
    is_hopeful: bool, forwards: int
) -> None:
    answer = answer_of(range(17))
    late = Late(answer, lies=0)
    late.is_hopeful = is_hopeful
    counts = replay(late, answer, rows_max=8, has_states=False)["text"]
    assert (counts.forwards, counts.tokens) == (forwards, 16)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    rows_max=st.integers(1, 8),
    has_states=st.booleans(),
    lies=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_each_token_comes_of_a_forward_or_of_a_right_draft(
    tokens: list[int], rows_max: int, has_states: bool, lies: float
) -> None:
    answer = answer_of(tokens)
    counts = replay(Oracle(answer, lies), answer, rows_max, has_states)["text"]
    assert counts.tokens == len(tokens) - 1
    right = counts.accepted.total()
    # The answer's last token may be a draft's: what the model says behind it is not taken.
    assert counts.tokens <= counts.forwards + right <= counts.tokens + 1
    assert counts.forwards <= counts.rows
    if not has_states:
        assert counts.rows == counts.forwards + counts.drafted.total()


def test_the_longest_right_path_of_a_tree_is_accepted() -> None:
    tree = Draft((5, 6, 7, 8), (-1, -1, 1, 2), ("history",) * 4)
    assert accepted_path(tree, [6, 7, 9]) == [1, 2]
    assert accepted_path(tree, [5, 7]) == [0]
    assert accepted_path(tree, [9]) == []
    assert accepted_path(chain([1, 2], ["history"] * 2), [1, 2, 3]) == [0, 1]


def test_a_kind_has_the_forwards_whose_first_token_it_is() -> None:
    answer = TokenAnswer((), range(9), ["thought"] * 5 + ["edit"] * 4)
    counts = replay(Oracle(answer, lies=0), answer, rows_max=3, has_states=False)
    assert {kind: (count.tokens, count.forwards) for kind, count in counts.items()} == {
        "thought": (6, 2),
        "edit": (2, 1),
    }


def test_what_rows_cost_lies_on_the_curves_of_the_macs() -> None:
    assert rows_cost("m4", 1) == rows_cost("m5", 1) == 1
    assert rows_cost("m4", 5) == pytest.approx((1.48 + 2.05) / 2)


def test_counts_add_up() -> None:
    answer = answer_of(range(17))
    one = replay(Oracle(answer, lies=0), answer, rows_max=8, has_states=False)["text"]
    total = DraftCounts()
    total.add(one)
    total.add(one)
    assert (total.tokens, total.forwards, total.rows) == (32, 4, 32)
    assert total.costs["m4"] == 2 * one.costs["m4"]
    assert drafts.figures(total)["forwards_per_token"] == 0.125


def test_a_lying_grammar_forces_what_never_comes() -> None:
    answer = answer_of(range(20))
    lies = Lies(answer)
    lies.take([0])
    assert lies.forced(3) == [2, 3, 4]


# ---------------------------------------------------------------- answers in tokens


def test_texts_are_tokenised_as_cl100k_does() -> None:
    found = find_spec("litellm")
    assert found is not None and found.origin is not None
    tokenizers = Path(found.origin).parent / "litellm_core_utils" / "tokenizers"
    ranks = load_tiktoken_bpe(str(tokenizers / drafts_answers.CL100K_FILE))
    reference = tiktoken.Encoding(
        "cl100k", pat_str=drafts_answers.CL100K_WORDS, mergeable_ranks=ranks, special_tokens={}
    )
    for text in ("def f(x):\n    return 12345\n", "It's  naïve…\t\n\n日本", '{"a": [1, 2]}'):
        assert list(drafts_answers.encode(text)) == reference.encode_ordinary(text)


def test_a_mark_is_a_token() -> None:
    tokens = [drafts_answers.encode(mark) for mark in drafts_answers.MARKS]
    assert all(len(found) == 1 for found in tokens)
    assert len(set(tokens)) == len(tokens)


def test_a_prompt_is_the_conversation_and_an_answer_ends_with_its_mark() -> None:
    answers = drafts.recorded("swe-agent")
    session = next(iter(answers.values()))
    decoded = drafts_answers.tokenizer().decode(session[1].prompt, skip_special_tokens=False)
    first = drafts_answers.tokenizer().decode(session[0].tokens, skip_special_tokens=False)
    assert first.endswith(drafts_answers.END)
    assert f"{drafts_answers.BEGIN}{first}\n" in decoded
    assert decoded.endswith(drafts_answers.BEGIN)


def test_each_call_counts_once_behind_its_whole_prompt() -> None:
    path = EXCERPTS_DIR / "claude-code-session-1.jsonl.xz"
    once = list(drafts_answers.captured_calls(path))
    decode = drafts_answers.tokenizer().decode
    texts = [decode(each.tokens, skip_special_tokens=False) for each in once]
    assert texts and len(set(texts)) == len(texts)
    assert all(each.startswith('<tool_call>\n{"name": ') for each in texts)
    assert all(each.endswith("</tool_call><|im_end|>") for each in texts)
    assert once[0].tools


# ---------------------------------------------------------------- forced tokens of calls


def forced_in(text: str, tools: list[dict[str, Any]]) -> str:
    answer = TokenAnswer((), [0], ["call"], tuple(tools))
    forced = forced_by_schema(answer)
    if forced is None:
        return ""
    forced.take(drafts_answers.encode(text))
    found = drafts_answers.tokenizer().decode(forced.forced(16), skip_special_tokens=False)
    assert isinstance(found, str)
    return found


def test_the_only_tools_name_and_argument_are_forced_behind_the_mark() -> None:
    assert forced_in("I read.\n<tool_call>", [TOOL]).startswith('\n{"name": "read", "arguments')
    assert forced_in("I read.", [TOOL]) == ""
    assert forced_in("<tool_call>", []) == ""


def test_nothing_is_forced_behind_a_call_or_where_it_left_the_grammar() -> None:
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    assert forced_in(call, [TOOL]) == ""
    assert forced_in('<tool_call>\n{"name": "write"', [TOOL]) == ""
    assert compiler().report()["call_drafts_ended"] == 0


# ---------------------------------------------------------------- the drafter on all this


@pytest.mark.parametrize("name", ["fresh-prose", "random-tokens", "all-wrong", "lying-grammar"])
@pytest.mark.parametrize("has_states", [False, True])
def test_where_nothing_is_to_accept_drafting_costs_next_to_nothing(
    name: str, has_states: bool
) -> None:
    sessions = drafts.all_sets(EXCERPTS_DIR)[name]()
    count = DraftCounts()
    for one in drafts.replay_sessions(sessions, drafts.way(name), 8, has_states).values():
        count.add(one)
    assert count.forwards <= count.tokens
    assert count.rows <= 1.05 * count.tokens
