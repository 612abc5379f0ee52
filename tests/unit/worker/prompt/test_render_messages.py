"""Each thing that a template cannot take, and what it gets in its place; and deferred tools."""

import ast
import copy
import json
from functools import cache
from typing import Any

import pytest
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import TokenizerWrapper

from hearth.shared.wire_messages import ThinkingWish
from hearth.worker.prompt.render_messages import NONE, Renderer, call_text, with_loaded_tools
from scripts.harness.model_families import bare_tokenizer, family
from tests.helpers.cases import cases
from tests.helpers.worker.chat_templates import CHATML, LLAMA, tokenizer_with

Messages = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "fix it"}
MORE = {"role": "user", "content": "and quick"}
SAID = {"role": "assistant", "content": "well"}
RESULT = {"role": "tool", "tool_call_id": "call_a", "content": "its text"}
OTHER_RESULT = {"role": "tool", "tool_call_id": "call_b", "content": "other text"}


def call(name: str = "read", call_id: str = "call_a", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


CALLED = calling(call(path="/a"))
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads ä.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


@cache
def renderer(name: str) -> Renderer:
    return Renderer(family(name).tokenizer, True, True)


def templated(template: str) -> Renderer:
    """Return the renderer of a template that writes ChatML's or Llama's marks."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = template
    bare_tokenizer(tokenizer).chat_template = template
    return Renderer(tokenizer, True, True)


def text(name: str, messages: Messages, tools: list[Any] | None = None, **options: Any) -> str:
    return renderer(name).render(messages, tools or [], options).text


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "native") for name in ("qwen3", "qwen3_5", "glm4", "harmony", "llama3")),
        ("mistral", "native"),
        ("gemma3", "tool_code"),
        ("chatml", "manual"),
        ("deepseek", "manual"),
    ],
)
def test_what_a_template_shows_of_tools_is_found_by_rendering(name: str, form: str) -> None:
    assert renderer(name).capabilities.tool_form == form
    assert bool(renderer(name).markup) == (form != "native")


def test_tools_are_given_by_the_name_by_which_a_template_asks_for_them() -> None:
    asks = "{% for tool in xml_tools or () %}{{ tool }}{% endfor %}"
    given = (TOOL["function"], {"name": "mine"})
    for options, shown in zip(({}, {"xml_tools": given[1:]}), given, strict=True):
        rendered = templated(asks + CHATML).render([ASKED], [TOOL], options).text
        assert rendered == str(shown) + templated(CHATML).render([ASKED], [], {}).text


@pytest.mark.parametrize("reads", [True, False])
def test_thinking_in_what_is_said_is_thinking_where_the_template_takes_it_for_that(
    reads: bool,
) -> None:
    said = "m.content.split('</think>')[-1]" if reads else "m.content"
    template = "{% for m in messages %}[{{ m.role + ':' + " + said + " }}]{% endfor %}"
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nwell"}
    shown = templated(template).render([ASKED, thought, MORE], [], {}).text
    assert ("hm" in shown) is not reads and "\n\nwell]" in shown


def test_a_call_in_python_says_what_it_says_in_json() -> None:
    arguments = {
        "path": 'say "hi"\n\\ é \u2028 ```',
        "limit": 3,
        "deep": {"all": [True, None, 1.5, {"x y": []}]},
        "größe": 7,
        "ﬁle": "a name that Python rewrites",
        "from": 1,
        "x-y": False,
    }
    written = call_text({"name": "read", "arguments": arguments}, "tool_code")
    fence, source, end = written.split("\n")
    assert (fence, end) == ("```tool_code", "```")
    node = ast.parse(source, mode="eval").body
    assert isinstance(node, ast.Call) and not node.args
    found: dict[str, Any] = {}
    for keyword in node.keywords:
        value = ast.literal_eval(keyword.value)
        found |= {keyword.arg: value} if keyword.arg else value
    assert found == arguments
    assert "größe=7" in written


def test_arguments_that_are_no_object_are_shown_in_every_form() -> None:
    broken = calling(call())
    broken["tool_calls"][0]["function"]["arguments"] = '{"path": '
    assert 'read(input="{\\"path\\": ")' in text("gemma3", [ASKED, broken, RESULT])
    assert (
        '"arguments": {"input": "{\\"path\\": "}'
        in templated(LLAMA).render([ASKED, broken], [], {}).text
    )


def test_arguments_that_spell_half_a_character_are_shown_as_they_are_spelt() -> None:
    half = calling(call())
    half["tool_calls"][0]["function"]["arguments"] = '{"path": "\\ud83d"}'
    for shown in (
        text("gemma3", [ASKED, half, RESULT]),
        templated(LLAMA).render([ASKED, half], [], {}).text,
    ):
        assert "ud83d" in shown and shown.encode(), "a tokenizer reads UTF-8"


def test_a_template_that_needs_descriptions_gets_them() -> None:
    """Harmony writes '// ' + description for each."""
    bare = {"type": "function", "function": {"name": "look"}}
    assert "type look = () => any;" in text("harmony", [ASKED], [bare])
    assert '{"name": "look"}' in text("qwen3", [ASKED], [bare])


@pytest.mark.parametrize("name", ["harmony", "llama3"])
def test_a_template_for_one_call_a_message_gets_each_in_a_message_of_its_own(name: str) -> None:
    two = calling(call("read"), call("list_dir", "call_b"), content="Why.")
    words = ("read", "its text", "list_dir", "other text", "and quick")
    for results in ((RESULT, OTHER_RESULT), (OTHER_RESULT, RESULT)):
        shown = text(name, [ASKED, two, *results, MORE])
        places = [shown.find(word) for word in words]
        assert -1 not in places and places == sorted(places)
        assert shown.count("Why.") == (name == "harmony"), "Llama's leaves words beside a call out"
    shown, grown = (text(name, [ASKED, two, RESULT, *more]) for more in ((), (OTHER_RESULT,)))
    assert shown.index("list_dir") > shown.index("its text") and grown.startswith(
        shown[: shown.index("list_dir")]
    )


# ---------------------------------------------------------------- order


def test_llama_does_not_take_a_first_answer_for_the_question_that_it_shows_tools_in() -> None:
    shown = text("llama3", [SAID, ASKED], [TOOL])
    assert "assistant<|end_header_id|>\n\nwell<|eot_id|>" in shown


def test_a_result_of_no_call_is_the_users_where_the_template_refuses_it() -> None:
    told = "<|start|>user<|message|><tool_response>\nits text\n</tool_response><|end|>"
    assert told in text("harmony", [ASKED, SAID, RESULT])
    assert "<tool_response>" not in text("harmony", [ASKED, CALLED, RESULT, OTHER_RESULT])


LLAMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_a_template_without_a_system_role_has_it_at_the_head_of_the_first_question() -> None:
    renderer = templated(LLAMA2)
    shown = renderer.render(
        [SYSTEM, ASKED, SAID, {**SYSTEM, "content": "hush"}, MORE], [TOOL], {}
    ).text
    assert shown.startswith("<|im_start|>user\nbe brief\n\n# Tools\n")
    assert "</tool_response>.\n\nfix it<|im_end|>" in shown
    assert "user\n<system>\nhush\n</system>\n\nand quick<|im_end|>" in shown


def test_many_neighbours_are_joined_in_linear_time() -> None:
    texts = [str(number) for number in range(20_000)]
    messages = [{"role": "user", "content": each} for each in texts]
    assert "\n\n".join(texts) in text("gemma3", messages)


PARTED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == "assistant" and not m.content %}{{ raise_exception("nothing") }}{% endif %}
{%- if m.role == "system" or m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}+{{ p.text or p.thinking }}{% endfor %}{% endif %}
{%- endfor %}"""


def test_text_parts_are_the_templates_where_it_takes_them_and_lines_elsewhere() -> None:
    parts = [{"type": "text", "text": word} for word in ("a", "b")]
    roles = ("system", "user", "assistant")
    asked: Messages = [{"role": role, "content": parts} for role in roles]
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    messages: Messages = [*asked, ASKED, thought, ASKED, thought | {"reasoning_content": ""}]
    parted = templated(PARTED)
    assert parted.render(messages, [], {}).text.replace("<|im_start|>", "\n").split("\n") == [
        "",
        "systema",
        "b",
        "user+a+b",
        "assistant+a+b",
        "userfix it",
        "assistant+hm+",
        "userfix it",
        "assistant+",
    ]
    begun = parted.render(asked, [], {}, continues=True).text
    assert begun.endswith("<|im_start|>assistant+a+b")
    assert "a\nb<" in text("qwen3", asked)


TWO = calling(call(), call("list_dir", "call_b"))


@pytest.mark.parametrize(
    ("name", "messages", "runs"),
    [
        ("qwen3", [SYSTEM, ASKED, CALLED, RESULT, SAID, SAID, ASKED], [[2], [4, 5]]),
        ("mistral", [ASKED, CALLED, RESULT, MORE, SAID], [[1], [NONE], [4]]),
        ("harmony", [ASKED, TWO, RESULT, OTHER_RESULT, SAID], [[NONE], [NONE], [4]]),
        ("gemma3", [ASKED, CALLED, RESULT, MORE, SAID, SAID, MORE, SAID], [[1], [NONE], [7]]),
        ("gemma3", [SAID, RESULT, SAID], [[0], [2]]),
    ],
)
def test_each_turn_of_the_models_is_known_by_its_place_among_what_was_sent(
    name: str, messages: Messages, runs: list[list[int]]
) -> None:
    assert renderer(name).render(messages, [TOOL], {}).runs == runs


def test_a_template_that_is_a_function_is_given_what_it_knows() -> None:
    tokenizer = TokenizerWrapper(
        bare_tokenizer(tokenizer_with(CHATML)), chat_template=deepseek_v32.apply_chat_template
    )
    renderer = Renderer(tokenizer, True, True)
    options = {"reasoning_effort": "low", "anything": 1}
    shown = renderer.render([SYSTEM, ASKED], [TOOL], options).text
    assert shown.endswith("fix it<｜Assistant｜><think>")
    off = renderer.render([ASKED], [], {}, thinking=ThinkingWish(False)).text
    assert off.endswith("</think>")
    broken = {**CALLED["tool_calls"][0], "function": {"name": "read", "arguments": '{"path": "/a'}}
    told = renderer.render([ASKED, calling(broken), RESULT], [TOOL], {}).text
    assert '<｜DSML｜parameter name="input" string="true">{"path": "/a</' in told


# ---------------------------------------------------------------- deferred tools

BEGIN = "These tools are available from now on:\n<tools>\n"


def tool(name: str) -> dict[str, Any]:
    function = {"name": name, "description": "lädt", "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def message_of(row: dict[str, Any]) -> dict[str, Any]:
    loads = {"tool_references": row["loads"]} if "loads" in row else {}
    role = next(iter(row))
    return {"role": role, "content": row[role], **loads}


@pytest.mark.parametrize("case", cases("prompt/deferred_tools.yaml"))
def test_a_loaded_tool_is_appended_to_one_message_and_all_else_is_as_it_was(
    case: dict[str, Any],
) -> None:
    messages = [message_of(row) for row in case["messages"]]
    tools = [tool(name) for name in case.get("listed", ["grep", "web"])]
    before = copy.deepcopy((messages, tools))
    placed = with_loaded_tools(messages, tools, case.get("loaded", []))
    assert (messages, tools) == before
    for old, new, names in zip(messages, placed, case["shown"], strict=True):
        lines = "".join(json.dumps(tool(name), ensure_ascii=False) + "\n" for name in names)
        said = f"{old['content']}\n" if old["content"] else ""
        content = f"{said}{BEGIN}{lines}</tools>" if names else old["content"]
        assert new == old | {"content": content}
