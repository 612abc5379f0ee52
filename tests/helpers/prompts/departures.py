"""Names the changes to a conversation with which a template gives what Hearth shows, and why.

Each is written anew here, from the templates and from what their makers say, so that it holds
Hearth's own code to something. Which templates have a prompt by one of them is measured: the page
tells.
"""

import itertools
import json
import re
from collections import namedtuple
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

Message = dict[str, Any]

# What a template is given: `source` is its own text, `marks` are the added tokens.
Asked = namedtuple("Asked", "messages tools variables source marks")
# One change, and why it is made. It counts where the template has its `sign`, a pattern, and
# without it refuses the conversation or shows less of it; where it `is_chosen`, for its own reason.
# One that `follows` may have something to do only behind others.
Departure = namedtuple(
    "Departure", "name changed reason change sign is_chosen follows", defaults=("", False, False)
)
# How calls, results and tools are written for a family whose template shows none: `sign` is a text
# of such templates, `around` stands around all calls of a message.
CallForm = namedtuple(
    "CallForm", "sign call around between result prompt tool", defaults=("", None)
)
Change = Callable[[Asked], Asked]


def may_change(departure: Departure, asked: Asked) -> bool:
    is_its = re.search(departure.sign, asked.source) is not None
    return is_its and (departure.follows or departure.change(asked) != asked)


def each_message(change: Callable[[Message, Asked], Message]) -> Change:
    return lambda asked: asked._replace(messages=[change(each, asked) for each in asked.messages])


def _arguments(write: Callable[[Any], Any]) -> Change:
    def rewritten(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": write(function["arguments"])}}

    return each_message(
        lambda m, _: (
            {**m, "tool_calls": list(map(rewritten, m["tool_calls"]))} if m.get("tool_calls") else m
        )
    )


def _as_object(arguments: Any) -> Any:
    return {"input": arguments} if isinstance(arguments, str) else arguments


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _calls(*messages: Message) -> list[Message]:
    return [call for message in messages for call in message.get("tool_calls") or ()]


def _ids(new_id: Callable[[Message, int, int], str]) -> Change:
    """`new_id` takes a call, its number in the conversation and that in its message."""

    def change(asked: Asked) -> Asked:
        numbers = itertools.count()
        calls = [(call, n) for message in asked.messages for n, call in enumerate(_calls(message))]
        new = {call["id"]: new_id(call, next(numbers), n) for call, n in calls}
        messages = [
            {
                **{
                    name: new.get(value, value) if name == "tool_call_id" else value
                    for name, value in message.items()
                },
                **(
                    {"tool_calls": [{**call, "id": new[call["id"]]} for call in _calls(message)]}
                    if _calls(message)
                    else {}
                ),
            }
            for message in asked.messages
        ]
        return asked._replace(messages=messages)

    return change


def _nine_letters(call: Message, *_: int) -> str:
    is_one = re.fullmatch(r"[A-Za-z0-9]{9}", call["id"])
    return call["id"] if is_one else blake2b(call["id"].encode(), digest_size=5).hexdigest()[:9]


def _one_call_each(asked: Asked) -> Asked:
    results = {m["tool_call_id"]: m for m in asked.messages if m["role"] == "tool"}
    bare = {"role": "assistant", "content": ""}
    split = [
        {**(bare if number else message), **({"tool_calls": [call]} if call else {})}
        for message in asked.messages
        for number, call in enumerate(_calls(message) or [None])
    ]
    return asked._replace(
        messages=[
            each
            for said in split
            if said["role"] != "tool"
            for each in (said, *(results[c["id"]] for c in _calls(said) if c["id"] in results))
        ]
    )


def _merged(asked: Asked) -> Asked:
    groups = itertools.groupby(
        enumerate(asked.messages),
        lambda row: row[0] if row[1]["role"] == "tool" or _calls(row[1]) else row[1]["role"],
    )
    said = [[message for _, message in group] for _, group in groups]
    texts = ["\n\n".join(filter(None, (text_of(m["content"] or "") for m in g))) for g in said]
    return asked._replace(
        messages=[
            {**group[0], "content": text} if group[1:] else group[0]
            for group, text in zip(said, texts, strict=True)
        ]
    )


# ---------------------------------------------------------------- text for marks, text for tools

BREAK: Final = "qZqXq"  # letters, which no template escapes


def _control_text(asked: Asked) -> Asked:
    """Break the marks in all that is not the model's own words; `encoded` mends them."""
    marks = "|".join(map(re.escape, sorted(asked.marks, key=len, reverse=True)))

    def broken(value: Any) -> Any:
        text = _dumped(value)
        return json.loads(re.sub(marks, lambda hit: f"{hit[0][0]}{BREAK}{hit[0][1:]}", text))

    messages = [
        {
            **message,
            **{key: broken(message[key]) for key in ("content", "tool_calls") if key in message},
        }
        for message in asked.messages
    ]
    return asked._replace(messages=messages, tools=broken(asked.tools))


def _json(name: str, arguments: Any, *_: str) -> str:
    return _dumped({"name": name, "arguments": arguments})


def _python(name: str, arguments: Any, *_: str) -> str:
    words = {"null": "None", "true": "True", "false": "False"}
    literals = [
        re.sub(r"\b(null|true|false)\b", lambda hit: words[hit[0]], _dumped(value))
        for value in arguments.values()
    ]
    return f"{name}({', '.join(map('='.join, zip(arguments, literals, strict=True)))})"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


OWN_PROMPT: Final = """\
# Tools

You may call functions to help with the user's request. Each line in <tools></tools> is one:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object{place}:
{call}
To call several, write several such blocks. Write nothing behind the last one and wait: each \
result comes back in {result}."""
GEMMA_PROMPT: Final = """\
You have access to functions. Each line here is one, with its parameters as a JSON schema:
{tools}

If you decide to call a function, write the call in Python, wrapped in ```tool_code```. Give every \
argument its name, and use literal values only:
{call}
To call several, write several such blocks. Write nothing behind the last one and wait: each \
result comes back in {result}."""

# Of DeepSeek V3.1's card.
CARD_PROMPT: Final = """\
## Tools
You have access to the following tools:

{tools}
IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments\
<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""
FORMS: Final = (
    CallForm(
        "<start_of_turn>",
        lambda *each: f"```tool_code\n{_python(*each)}\n```",
        "{}",
        "\n",
        "```tool_output\n{}\n```",
        GEMMA_PROMPT,
        lambda tool: _dumped(tool["function"]),
    ),
    CallForm(
        "List of tools: ", _python, "<|tool_call_start|>[{}]<|tool_call_end|>", ", ", "{}", ""
    ),
    CallForm("start_of_role", _json, "<|tool_call|>[{}]", ", ", "{}", ""),
    CallForm(
        "<｜Assistant｜><think></think>",
        None,  # this and what is around it, the template shows
        "",
        "",
        "",
        CARD_PROMPT,
        lambda tool: "### {name}\nDescription: {description}\n\nParameters: {told}\n".format(
            description=tool["function"].get("description") or "",
            told=_dumped(tool["function"].get("parameters") or {}),
            name=tool["function"]["name"],
        ),
    ),
    CallForm(
        "<｜tool▁calls▁begin｜>",
        lambda name, given, _: (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            f"{name}\n```json\n{_dumped(given)}\n```<｜tool▁call▁end｜>"
        ),
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        "\n",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        OWN_PROMPT,
        lambda tool: _dumped(tool),
    ),
    CallForm(
        "",
        lambda *each: f"<tool_call>\n{_json(*each)}\n</tool_call>",
        "{}",
        "\n",
        "<tool_response>\n{}\n</tool_response>",
        OWN_PROMPT,
        lambda tool: _dumped(tool),
    ),
)


def _form(asked: Asked) -> CallForm:
    return next(form for form in FORMS if form.sign in asked.source)


def _in_form(asked: Asked, *calls: Message) -> str:
    form, functions = _form(asked), [(call["function"], call["id"]) for call in calls]
    texts = [form.call(each["name"], _as_object(each["arguments"]), i) for each, i in functions]
    return str(form.around.replace("{}", form.between.join(texts)))


def _tool_prompt(asked: Asked) -> Asked:
    if not asked.tools:
        return asked
    form = _form(asked)
    example = {"argument_name": "value"} | ({"other_name": 3} if "Python" in form.prompt else {})
    call = form.call and _in_form(
        asked, {"id": "", "function": {"name": "function_name", "arguments": example}}
    )
    told = form.prompt.format(
        tools="\n".join(map(form.tool, asked.tools)),
        place=" in <tool_call></tool_call>" if form.sign == "" else "",
        call=call,
        result=form.result.format("").replace("\n", ""),
    )
    has_system = asked.messages[0]["role"] in ("system", "developer")
    said = [text_of(message["content"]) for message in asked.messages[:has_system]]
    system = {"role": "system", "content": "\n\n".join(filter(None, (*said, told)))}
    asked = asked._replace(messages=[system, *asked.messages[has_system:]], tools=None)
    return _WRITTEN_RESULTS(_WRITTEN_CALLS(asked)) if re.search(_NO_CALLS, asked.source) else asked


_WRITTEN_CALLS: Final = each_message(
    lambda m, asked: (
        {
            **{name: value for name, value in m.items() if name != "tool_calls"},
            "content": "\n".join(filter(None, (m["content"], _in_form(asked, *_calls(m))))),
        }
        if _calls(m)
        else m
    )
)
_WRITTEN_RESULTS: Final = each_message(
    lambda m, asked: (
        {
            "role": "user",
            "content": _form(asked).result.replace("{}", text_of(m["content"])),
        }
        if m["role"] == "tool"
        else m
    )
)


def _described(tool: Message) -> Message:
    function = tool["function"]
    return {**tool, "function": function | {"description": function.get("description") or ""}}


def _whole(tool: Message) -> Message:
    function = _described(tool)["function"]
    given = {"type": "object", "properties": {}, **function.get("parameters", {})}
    shown = {name: {"description": "", **value} for name, value in given["properties"].items()}
    return {**tool, "function": {**function, "parameters": {**given, "properties": shown}}}


_DONE: Final = {"role": "assistant", "content": "Done."}
# A template that has no word of what is looked for.
# A sandbox, as transformers has one, lets no template append to a list.
_NO_CALLS: Final = r"(?s)\A(?!.*tool_calls)|\.append\(|is_output_first"
_NO_RESULTS: Final = r"(?s)\A(?!.*['\"]tool['\"])|is_output_first|SmolLM"
_NO_TOOLS: Final = r"(?s)\A(?!.*\btools\b)|tools \| map\("

_LATER_SYSTEM: Final = each_message(
    lambda m, asked: (
        {"role": "user", "content": f"<system>\n{text_of(m['content'])}\n</system>"}
        if m["role"] == "system" and m is not asked.messages[0]
        else m
    )
)

DEPARTURES: Final = (
    Departure(
        "control text",
        "a mark that a client's text, result or argument spells out is text, and no token",
        "Else what a web page has in it could end a turn, or speak as the system.",
        _control_text,
        is_chosen=True,
    ),
    Departure(
        "developer",
        "a developer's message is the system's",
        "It is OpenAI's newer word for it. DeepSeek V3.2's and V4's own role of that name is for "
        "their search agent.",
        each_message(lambda m, _: {**m, "role": "system"} if m["role"] == "developer" else m),
        is_chosen=True,
    ),
    Departure(
        "described tools",
        "a tool has a description, empty where the client gave none",
        "Without one the template refuses the tool, or leaves it out.",
        lambda asked: asked._replace(tools=asked.tools and list(map(_described, asked.tools))),
    ),
    Departure(
        "whole tools",
        "a tool has a description and parameters, empty where the client gave none",
        "Without them the template refuses the tool, or leaves it out.",
        lambda asked: asked._replace(tools=asked.tools and list(map(_whole, asked.tools))),
    ),
    Departure(
        "empty list of tools",
        "who offers no tools offers an empty list of them",
        "The template counts them, and fails without a list.",
        lambda asked: asked._replace(tools=asked.tools or []),
    ),
    Departure(
        "empty content",
        "`content: null` beside calls is an empty text",
        "OpenAI's clients send null where others send an empty text; the template adds it to a "
        "text and fails, writes `None`, or leaves the result open (Apertus).",
        each_message(lambda m, _: {**m, "content": ""} if m.get("content") is None else m),
        is_chosen=True,
    ),
    Departure(
        "broken arguments",
        "arguments that are no JSON are the text of the argument `input`",
        "The template goes through an object. Refused, one broken call would end the session.",
        _arguments(_as_object),
    ),
    Departure(
        "argument text",
        "a call's arguments are the text of their JSON, as OpenAI's clients send them",
        "The template adds them to a text, and refuses an object.",
        _arguments(lambda given: given if isinstance(given, str) else _dumped(given)),
    ),
    Departure(
        "lines of parts",
        "text parts of one message are the lines of one text",
        "The template takes a text; a list it refuses, or shows in Python's notation or in JSON.",
        each_message(
            lambda m, _: (
                {**m, "content": text_of(m["content"])} if isinstance(m["content"], list) else m
            )
        ),
    ),
    Departure(
        "nine letters",
        "a call's id is nine letters or digits that stand for it, its result's too",
        "The template refuses others.",
        _ids(_nine_letters),
        "length 9!",
    ),
    Departure(
        "Kimi's ids",
        "a call's id is `functions.NAME:NUMBER`, counted over the conversation, its result's too",
        "The template shows a call by its id alone: by another's, the name would be lost.",
        _ids(lambda call, number, _: f"functions.{call['function']['name']}:{number}"),
        "Return of",
    ),
    Departure(
        "Kimi's first ids",
        "a result's id is `functions.NAME:NUMBER`, counted in the message",
        "The template shows its call so, whatever id it has.",
        _ids(lambda call, _, number: f"functions.{call['function']['name']}:{number}"),
        "functions\\.",
    ),
    Departure(
        "tools in words",
        "tools stand in the system message in words of ours, calls and results in texts",
        "The template has no place for tools, or fails at them. What it has one for stands there.",
        _tool_prompt,
        _NO_TOOLS,
        follows=True,
    ),
    Departure(
        "calls in words",
        "calls stand in the answer's text, in the family's own form where that is known",
        "The template leaves out the calls, fails at each (`.append` in llama.cpp's Kimi-K2), or "
        "writes the marks around the first alone (R1).",
        _WRITTEN_CALLS,
        _NO_CALLS,
        is_chosen=True,
    ),
    Departure(
        "results in words",
        "results are messages of the user's, in the family's own form",
        "The template leaves out, or refuses, messages of the role `tool`, writes the marks around "
        "the first alone (R1), or shows it as a question (SmolLM3).",
        _WRITTEN_RESULTS,
        _NO_RESULTS,
        is_chosen=True,
    ),
    Departure(
        "later system",
        "a system message behind the first is the user's, in `<system>`",
        "The template refuses it there, or leaves it out. Moved to the front, it would change the "
        "prompt from its first token on.",
        _LATER_SYSTEM,
        follows=True,
    ),
    Departure(
        "system turn",
        "a system message behind the first is the user's, in `<system>`",
        "The template writes it as the turn of a role that Gemma was never shown.",
        _LATER_SYSTEM,
        "System role not supported",
        is_chosen=True,
        follows=True,
    ),
    Departure(
        "system as user",
        "a first system message is the user's",
        "The template refuses the system's messages, or leaves this one out.",
        each_message(
            lambda m, asked: (
                {"role": "user", "content": text_of(m["content"])}
                if m["role"] == "system" and m is asked.messages[0]
                else m
            )
        ),
        follows=True,
    ),
    Departure(
        "opening question",
        "an empty question stands in front of a first answer",
        "The template refuses a conversation that the model begins.",
        lambda asked: asked._replace(
            messages=[{"role": "user", "content": ""}] * (asked.messages[0]["role"] == "assistant")
            + asked.messages
        ),
        follows=True,
    ),
    Departure(
        "opening system",
        "an empty system message stands in front",
        "Without one the template leaves out the tools.",
        lambda asked: asked._replace(
            messages=[{"role": "system", "content": ""}] * (asked.messages[0]["role"] != "system")
            + asked.messages
        ),
    ),
    Departure(
        "one call each",
        "of several calls each is a message, with its result behind it",
        "The template refuses several, or shows the first alone.",
        _one_call_each,
        r"tool_calls\[0\]|tool_calls ?\| ?length|single tool",
    ),
    Departure(
        "result names",
        "a result has the name of its function",
        "The template asks for it; OpenAI's clients send the id alone.",
        each_message(
            lambda m, asked: (
                {
                    **m,
                    "name": {
                        call["id"]: call["function"]["name"] for call in _calls(*asked.messages)
                    }.get(m["tool_call_id"]),
                }
                if m["role"] == "tool" and _calls(*asked.messages)
                else m
            )
        ),
    ),
    Departure(
        "folded words",
        "words beside thinking and a call are the end of the thinking",
        "The template refuses both together.",
        each_message(
            lambda m, _: (
                {
                    **m,
                    "content": "",
                    "reasoning_content": f"{m['reasoning_content']}\n{m['content']}",
                }
                if _calls(m) and m.get("reasoning_content") and m["content"]
                else m
            )
        ),
        "both content and thinking",
    ),
    Departure(
        "named thinking",
        "thinking has all names that templates have for it",
        "The template reads `thinking`, which chat's clients do not send.",
        each_message(
            lambda m, _: (
                {**m, **dict.fromkeys(("thinking", "reasoning"), m["reasoning_content"])}
                if m.get("reasoning_content")
                else m
            )
        ),
    ),
    Departure(
        "thinking chunks",
        "thinking is a part of the content",
        "The template reads it there alone.",
        each_message(
            lambda m, _: (
                {
                    **m,
                    "content": [
                        {"type": "thinking", "thinking": m["reasoning_content"]},
                        *({"type": "text", "text": text} for text in [m["content"]] if text),
                    ],
                }
                if m.get("reasoning_content")
                else m
            )
        ),
        "chunk|type.\\] == .thinking",
    ),
    Departure(
        "answered results",
        "`Done.` is said between a result and the next question",
        "The template refuses a question behind a result.",
        lambda asked: asked._replace(
            messages=[
                each
                for before, m in zip([{"role": ""}, *asked.messages], asked.messages, strict=False)
                for each in (*[_DONE] * ((before["role"], m["role"]) == ("tool", "user")), m)
            ]
        ),
        follows=True,
    ),
    Departure(
        "merged neighbours",
        "messages of one role behind one another are one, a blank line between",
        "The template refuses two of one role.",
        _merged,
        follows=True,
    ),
    Departure(
        "list of parts",
        "a text is a list of one part",
        "The template looks for parts, and shows nothing of a text.",
        each_message(
            lambda m, _: (
                {**m, "content": [{"type": "text", "text": m["content"]}]}
                if isinstance(m["content"], str)
                else m
            )
        ),
        follows=True,
    ),
    Departure(
        "kept thinking",
        "the template's own variable `preserve_thinking` is set",
        "`PRESERVE_THINKING`, see below.",
        lambda asked: asked._replace(variables={"preserve_thinking": True, **asked.variables}),
        "preserve_thinking",
        is_chosen=True,
    ),
)
