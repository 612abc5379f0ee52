"""Legacy completions: raw prompts in, text out, in the shapes of the API before chat."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import Completion

from hearth.proxy.api import answer_frames, legacy_completions, server_sent_events as sse
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.shared.errors import RequestError, WorkerLost
from tests.helpers.proxy.virtual_time import run_in_virtual_time
from tests.helpers.worker_processes.fixed_answers import Step, end, listed, logprob, said, ticket


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Once", **fields}


def prompts(prompt: Any) -> list[Any]:
    request = legacy_completions.parse(body(prompt=prompt))
    return [row.prompt.text or row.prompt.ids for row in request.submissions()]


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        legacy_completions.parse(body(**fields))
    assert caught.value.status == 400
    return caught.value


def made(*scripts: Sequence[Step], **fields: Any) -> AdmittedRequest:
    return ticket(legacy_completions.parse(body(**fields)), *scripts)


def whole(*scripts: Sequence[Step], **fields: Any) -> Any:
    return run_in_virtual_time(legacy_completions.whole(made(*scripts, **fields)))


def frames(given: AdmittedRequest) -> list[bytes]:
    writer = legacy_completions.CompletionWriter(given)
    return run_in_virtual_time(listed(answer_frames.frames(given, writer)))


def chunks(*scripts: Sequence[Step], **fields: Any) -> list[Any]:
    """Return the chunks of a stream that ended well."""
    *rows, last = frames(made(*scripts, stream=True, **fields))
    assert last == b"data: [DONE]\n\n"
    return [json.loads(row.removeprefix(b"data: ")) for row in rows]


def test_a_prompt_is_raw_text_or_token_ids_one_or_several() -> None:
    assert prompts("Once upon") == ["Once upon"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2, 3]) == [[1, 2, 3]]
    assert prompts([[1, 2], [3]]) == [[1, 2], [3]]
    assert prompts(["a", [1]]) == ["a", [1]]
    request = legacy_completions.parse(body())
    assert request.prompt.messages == []
    assert request.sampling.max_tokens is None


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], [1, "a"], [1, -1], [1.5], [True], {}, 5, ["a"] * 33]
)
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    assert str(refused(prompt=prompt).param).startswith("prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("best_of", 2),
        ("logprobs", 6),
        ("logprobs", True),
        ("n", 9),
        ("echo", "yes"),
        ("max_tokens", -3),
        ("temperature", 3),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


def test_what_says_nothing_is_accepted() -> None:
    request = legacy_completions.parse(
        body(suffix="", best_of=2, n=2, logprobs=None, echo=False, user="u")
    )
    assert (request.choices, request.sampling.top_logprobs) == (2, None)
    assert refused(prompt=["a"] * 30, n=2).param == "n"


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"n_predict": 0}], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_a_limit_of_no_tokens_was_refused(fields: dict[str, int], count: int) -> None:
    asked = {"prompt": ["a", "b"], "n": count, "echo": True, **fields}
    ends = [[end("prefilled")] for _ in range(2 * count)]
    texts = [text for text in "ab" for _ in range(count)]
    choices = whole(*ends, **asked)["choices"]
    assert [(row["text"], row["finish_reason"]) for row in choices] == [
        (text, "length") for text in texts
    ]
    told = [row for chunk in chunks(*ends, **asked) for row in chunk["choices"]]
    for index, text in enumerate(texts):
        own = [row for row in told if row["index"] == index]
        assert "".join(row["text"] for row in own) == text
        assert [row["finish_reason"] for row in own if row["finish_reason"]] == ["length"]


def test_an_echo_needs_text_and_no_logprobs() -> None:
    assert refused(prompt=[1, 2], echo=True).param == "echo"
    assert refused(echo=True, logprobs=0).param == "echo"
    assert whole([said(" upon"), end()], echo=True)["choices"][0]["text"] == "Once upon"
    rows = chunks([said("1"), end()], [said("2"), end()], prompt=["a", "b"], echo=True)
    texts = ["", ""]
    for row in rows:
        texts[row["choices"][0]["index"]] += row["choices"][0]["text"]
    assert texts == ["a1", "b2"]


def test_an_answer_is_whole_and_counts_every_prompt_and_choice() -> None:
    scripts = [[said("a"), said("b"), end()]] + [[said("c"), end("length")]] * 3
    answer = whole(*scripts, prompt=["x", "y"], n=2)
    assert answer["object"] == "text_completion"
    assert [row["text"] for row in answer["choices"]] == ["ab", "c", "c", "c"]
    assert [row["index"] for row in answer["choices"]] == [0, 1, 2, 3]
    assert [row["finish_reason"] for row in answer["choices"]] == ["stop"] + ["length"] * 3
    assert answer["usage"]["prompt_tokens"] == 24
    assert answer["usage"]["completion_tokens"] == 28
    Completion.model_validate(answer)


def test_logprobs_have_the_old_shape_with_offsets_into_the_text() -> None:
    rows = [logprob("é", "é", "e"), logprob("bc", "x"), logprob("d")]
    steps = [said("ébc", logprobs=rows[:2]), said("d", logprobs=rows[2:]), end()]
    told = whole(steps, logprobs=2)["choices"][0]["logprobs"]
    assert told == {
        "tokens": ["é", "bc", "d"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"é": -1.0, "e": -2.0}, {"x": -1.0, "bc": -0.5}, {"d": -0.5}],
        "text_offset": [0, 1, 3],
    }
    streamed = [row["choices"][0]["logprobs"] for row in chunks(steps, logprobs=2)]
    parts = [row for row in streamed if row]
    for name in told:
        assert [value for row in parts for value in row[name]] == told[name]
    assert whole([said("a"), end()])["choices"][0]["logprobs"] is None


def test_a_stream_begins_at_once_and_ends_with_usage_where_it_is_wanted() -> None:
    rows = chunks([said("a"), end()], stream_options={"include_usage": True})
    assert [row["choices"][0]["text"] for row in rows[:-1]] == ["", "a", ""]
    assert rows[-2]["choices"][0]["finish_reason"] == "stop"
    assert rows[-1]["choices"] == []
    assert rows[-1]["usage"]["completion_tokens"] == 7
    assert len({(row["id"], row["created"], row["model"]) for row in rows}) == 1
    assert not any("usage" in row for row in chunks([said("a"), end()]))


def test_a_silent_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    rows = chunks([0.13, said("a"), end()])
    assert [row["choices"][0]["text"] for row in rows] == ["", "", "", "a", ""]


def test_a_stream_that_breaks_ends_with_the_error() -> None:
    given = made([said("a"), WorkerLost("gone")], stream=True)
    *_, last = frames(given)
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_unavailable"
