"""Names the changes to a conversation with which a template gives what Hearth shows, and why.

Each is written anew here, from the templates and from what their makers say, so that it holds
Hearth's own code to something. Whether a template has a prompt by one of them is measured: the
page has which.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

Messages = list[dict[str, Any]]


class Asked(NamedTuple):
    """What a template is given."""

    messages: Messages
    tools: list[Any] | None
    variables: dict[str, Any]
    source: str  # of the template
    marks: tuple[str, ...]  # its added tokens

    def each(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> "Asked":
        return self._replace(messages=[change(message) for message in self.messages])


@dataclass(frozen=True)
class Departure:
    """One change, and why it is made.

    It counts where the template refuses the conversation without it, or shows less of it;
    `is_chosen`: it counts anywhere, for its own reason.
    """

    name: str
    changed: str
    reason: str
    change: Callable[[Asked], Asked]
    sign: str = ""  # a pattern that such a template has
    is_chosen: bool = False
    follows: bool = False  # may have something to do only behind other changes

    def may(self, asked: Asked) -> bool:
        """Whether it may change what is asked."""
        is_its = re.search(self.sign, asked.source) is not None
        return is_its and (self.follows or self.change(asked) != asked)


# ---------------------------------------------------------------- the same words elsewhere


def _developer(asked: Asked) -> Asked:
    return asked.each(lambda m: {**m, "role": "system"} if m["role"] == "developer" else m)


def _nothing_said(asked: Asked) -> Asked:
    return asked.each(lambda m: {**m, "content": ""} if m.get("content") is None else m)


def _arguments(write: Callable[[Any], Any]) -> Callable[[Asked], Asked]:
    def rewritten(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": write(function["arguments"])}}

    def change(message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": list(map(rewritten, calls))} if calls else message

    return lambda asked: asked.each(change)


def text_of(content: Any, joint: str = "") -> str:
    return content if isinstance(content, str) else joint.join(part["text"] for part in content)


def _joined_parts(joint: str) -> Callable[[Asked], Asked]:
    def change(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return {**message, "content": text_of(content, joint)} if content is not None else message

    return lambda asked: asked.each(change)


def _parts(asked: Asked) -> Asked:
    return asked.each(
        lambda m: (
            {**m, "content": [{"type": "text", "text": m["content"]}]}
            if isinstance(m.get("content"), str)
            else m
        )
    )


def _result_names(asked: Asked) -> Asked:
    names = {call["id"]: call["function"]["name"] for call in _calls(asked.messages)}
    return asked.each(
        lambda m: {**m, "name": names.get(m["tool_call_id"])} if m["role"] == "tool" else m
    )


def _calls(messages: Messages) -> Iterable[dict[str, Any]]:
    return itertools.chain.from_iterable(message.get("tool_calls") or () for message in messages)


def _chunks(asked: Asked) -> Asked:
    def change(message: dict[str, Any]) -> dict[str, Any]:
        if not (thought := message.get("reasoning_content")):
            return message
        said = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        return {**message, "content": [{"type": "thinking", "thinking": thought}, *said]}

    return asked.each(change)


def _named_thinking(asked: Asked) -> Asked:
    def change(message: dict[str, Any]) -> dict[str, Any]:
        thought = message.get("reasoning_content")
        return {**message, "thinking": thought, "reasoning": thought} if thought else message

    return asked.each(change)


# ---------------------------------------------------------------- ids and order


def _ids(new_id: Callable[[dict[str, Any], int], str]) -> Callable[[Asked], Asked]:
    def change(asked: Asked) -> Asked:
        new = {each["id"]: new_id(each, n) for n, each in enumerate(_calls(asked.messages))}

        def renamed(message: dict[str, Any]) -> dict[str, Any]:
            if message["role"] == "tool":
                given = message["tool_call_id"]
                return {**message, "tool_call_id": new.get(given, given)}
            calls = [{**call, "id": new[call["id"]]} for call in message.get("tool_calls") or ()]
            return {**message, "tool_calls": calls} if calls else message

        return asked.each(renamed)

    return change


def _kimi_id(call: dict[str, Any], number: int) -> str:
    return f"functions.{call['function']['name']}:{number}"


def _nine_letters(call: dict[str, Any], number: int) -> str:
    own: str = call["id"]
    if re.fullmatch(r"[A-Za-z0-9]{9}", own):
        return own
    return hashlib.blake2b(own.encode(), digest_size=5).hexdigest()[:9]


def _one_call_each(asked: Asked) -> Asked:
    said: Messages = []
    for message in asked.messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":  # behind its call, which may have others behind it by now
            own = [message["tool_call_id"]]
            ids = [[call["id"] for call in _calls([each])] for each in said]
            place = ids.index(own) + 1 if own in ids else len(said)
            said.insert(place, message)
        elif len(calls) < 2:
            said.append(message)
        else:
            bare = {"role": "assistant", "content": ""}
            said += [{**(bare if n else message), "tool_calls": [c]} for n, c in enumerate(calls)]
    return asked._replace(messages=said)


# ---------------------------------------------------------------- roles that may not stand there


def _as_user(is_late: bool) -> Callable[[Asked], Asked]:
    def change(asked: Asked) -> Asked:
        said = list(asked.messages)
        for at, message in enumerate(said):
            if message["role"] == "system" and bool(at) == is_late:
                text = text_of(message["content"])
                shown = f"<system>\n{text}\n</system>" if is_late else text
                said[at] = {"role": "user", "content": shown}
        return asked._replace(messages=said)

    return change


def _merged(asked: Asked) -> Asked:
    said: Messages = []
    for message in asked.messages:
        last = said[-1] if said else {"role": ""}
        plain = message["role"] != "tool" and not message.get("tool_calls")
        if plain and last["role"] == message["role"] and not last.get("tool_calls"):
            texts = filter(None, (text_of(last["content"]), text_of(message["content"])))
            said[-1] = {**last, "content": "\n\n".join(texts)}
        else:
            said.append(message)
    return asked._replace(messages=said)


def _answered(asked: Asked) -> Asked:
    said: Messages = []
    for message in asked.messages:
        if said and (said[-1]["role"], message["role"]) == ("tool", "user"):
            said.append({"role": "assistant", "content": "Done."})
        said.append(message)
    return asked._replace(messages=said)


def _opened(role: str) -> Callable[[Asked], Asked]:
    def change(asked: Asked) -> Asked:
        if asked.messages[0]["role"] in ("system", role):
            return asked
        return asked._replace(messages=[{"role": role, "content": ""}, *asked.messages])

    return change


def _folded(asked: Asked) -> Asked:
    def change(message: dict[str, Any]) -> dict[str, Any]:
        thought, said = message.get("reasoning_content"), message.get("content")
        if not (message.get("tool_calls") and thought and said):
            return message
        return {**message, "content": "", "reasoning_content": f"{thought}\n{said}"}

    return asked.each(change)


# ---------------------------------------------------------------- tools


def _whole_tools(asked: Asked) -> Asked:
    def whole(tool: dict[str, Any]) -> dict[str, Any]:
        function = {"description": "", **tool["function"]}
        given = {"type": "object", "properties": {}, **function.get("parameters", {})}
        shown = {name: {"description": "", **value} for name, value in given["properties"].items()}
        return {**tool, "function": {**function, "parameters": {**given, "properties": shown}}}

    return asked._replace(tools=[whole(tool) for tool in asked.tools or ()] or None)


def _control_text(asked: Asked) -> Asked:
    """Break the marks that are spelled in what is not the model's own; `ids` mends them."""

    def broken(value: Any) -> Any:
        if isinstance(value, str):
            marks = "|".join(map(re.escape, sorted(asked.marks, key=len, reverse=True)))
            return re.sub(marks, lambda hit: f"{hit[0][0]}{BREAK}{hit[0][1:]}", value)
        if isinstance(value, list):
            return [broken(each) for each in value]
        if isinstance(value, dict):
            return {name: broken(each) for name, each in value.items()}
        return value

    return asked._replace(
        messages=[
            {
                name: broken(each) if name in ("content", "tool_calls") else each
                for name, each in message.items()
            }
            for message in asked.messages
        ],
        tools=broken(asked.tools),
    )


BREAK: Final = "qZqXq"  # letters, which no template escapes


# ---------------------------------------------------------------- where a template has no tools

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


@dataclass(frozen=True)
class CallForm:
    """How calls and results are written for a family whose template shows none."""

    sign: str  # a text of its templates
    call: Callable[[str, Any], str]
    around: str  # all calls of a message
    between: str
    result: str
    prompt: str = OWN_PROMPT

    def calls(self, functions: Sequence[tuple[str, Any]]) -> str:
        texts = (self.call(name, _input(arguments)) for name, arguments in functions)
        return self.around.replace("{}", self.between.join(texts))


def _json(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _python(name: str, arguments: Any) -> str:
    def literal(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)

    return f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"


FORMS: Final = (
    CallForm(
        "<start_of_turn>",
        lambda *each: f"```tool_code\n{_python(*each)}\n```",
        "{}",
        "\n",
        "```tool_output\n{}\n```",
        GEMMA_PROMPT,
    ),
    CallForm("List of tools: ", _python, "<|tool_call_start|>[{}]<|tool_call_end|>", ", ", ""),
    CallForm("start_of_role", _json, "<|tool_call|>[{}]", ", ", ""),
    CallForm(
        "<｜tool▁calls▁begin｜>",
        lambda name, given: (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            f"{name}\n```json\n{json.dumps(given, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        ),
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        "\n",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    CallForm(
        "",
        lambda *each: f"<tool_call>\n{_json(*each)}\n</tool_call>",
        "{}",
        "\n",
        "<tool_response>\n{}\n</tool_response>",
    ),
)


def _form(asked: Asked) -> CallForm:
    return next(form for form in FORMS if form.sign in asked.source)


def _tool_prompt(asked: Asked) -> Asked:
    if not asked.tools:
        return asked
    form = _form(asked)
    is_gemma = form.prompt is GEMMA_PROMPT
    shown = [tool["function"] if is_gemma else tool for tool in asked.tools]
    call = form.calls([("function_name", {"argument_name": "value"})])
    if is_gemma:
        call = call.replace('value"', 'value", other_name=3')
    place = " in <tool_call></tool_call>" if call.startswith("<tool_call>") else ""
    told = form.prompt.format(
        tools="\n".join(json.dumps(each, ensure_ascii=False) for each in shown),
        call=call,
        place=place,
        result=form.result.format("").replace("\n", ""),
    )
    has_system = asked.messages[0]["role"] in ("system", "developer")
    said = text_of(asked.messages[0]["content"], "\n") if has_system else ""
    system = {"role": "system", "content": f"{said}\n\n{told}" if said else told}
    asked = asked._replace(messages=[system, *asked.messages[has_system:]], tools=None)
    asked = _written_calls(asked) if re.search(_NO_CALLS, asked.source) else asked
    return _written_results(asked) if re.search(_NO_RESULTS, asked.source) else asked


def _written_calls(asked: Asked) -> Asked:
    def change(message: dict[str, Any]) -> dict[str, Any]:
        if not (calls := message.get("tool_calls")):
            return message
        functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        texts = filter(None, (message.get("content"), _form(asked).calls(functions)))
        return {"role": "assistant", "content": "\n".join(texts)} | {
            name: value for name, value in message.items() if name == "reasoning_content"
        }

    return asked.each(change)


def _written_results(asked: Asked) -> Asked:
    shape = _form(asked).result
    return asked.each(
        lambda m: (
            {"role": "user", "content": shape.format(text_of(m["content"], "\n"))}
            if m["role"] == "tool"
            else m
        )
    )


def _kept_thinking(asked: Asked) -> Asked:
    return asked._replace(variables={"preserve_thinking": True, **asked.variables})


def _input(arguments: Any) -> Any:
    return {"input": arguments} if isinstance(arguments, str) else arguments


def _text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


# A template that has no word of what is looked for.
_NO_CALLS: Final = r"(?s)\A(?!.*tool_calls)"
_NO_RESULTS: Final = r"(?s)\A(?!.*['\"]tool['\"])"
_NO_TOOLS: Final = r"(?s)\A(?!.*\btools\b)"
_NO_DEVELOPER: Final = r"(?s)\A(?!.*['\"]developer['\"])"

DEPARTURES: Final = (
    Departure(
        "developer",
        "a developer's message is the system's",
        "It is OpenAI's newer word for it, and no role that these models have seen.",
        _developer,
        _NO_DEVELOPER,
        is_chosen=True,
    ),
    Departure(
        "whole tools",
        "a tool has a description and parameters, empty where the client gave none",
        "Without them the template refuses the tool, or leaves it out.",
        _whole_tools,
    ),
    Departure(
        "empty content",
        "`content: null` beside calls is an empty text",
        "OpenAI's clients send null; the template adds it to a text and fails, or writes `None`.",
        _nothing_said,
    ),
    Departure(
        "broken arguments",
        "arguments that are no JSON are the text of the argument `input`",
        "The template goes through an object. Refused, one broken call would end the session.",
        _arguments(_input),
    ),
    Departure(
        "argument text",
        "a call's arguments are the text of their JSON, as OpenAI's clients send them",
        "The template adds them to a text, and refuses an object.",
        _arguments(_text),
    ),
    Departure(
        "joined parts",
        "text parts of one message are one text",
        "The template takes a text; of a list it shows Python's notation, or nothing.",
        _joined_parts(""),
    ),
    Departure(
        "tools in words",
        "tools stand in the system message in words of ours, calls and results in texts",
        "The template has no place for tools. What it has one for stands there.",
        _tool_prompt,
        _NO_TOOLS,
    ),
    Departure(
        "calls in words",
        "calls stand in the answer's text, in the family's own form",
        "The template shows tools, but leaves out the calls.",
        _written_calls,
        _NO_CALLS,
    ),
    Departure(
        "results in words",
        "results are messages of the user's, in the family's own form",
        "The template leaves out, or refuses, messages of the role `tool`.",
        _written_results,
        _NO_RESULTS,
    ),
    Departure(
        "later system",
        "a system message behind the first is the user's, in `<system>`",
        "The template refuses it there, or leaves it out. Moved to the front, it would change the "
        "prompt from its first token on.",
        _as_user(True),
        follows=True,
    ),
    Departure(
        "system as user",
        "a first system message is the user's",
        "The template refuses the system's messages, or leaves this one out.",
        _as_user(False),
        follows=True,
    ),
    Departure(
        "opening question",
        "an empty question stands in front of a first answer",
        "The template refuses a conversation that the model begins.",
        _opened("user"),
        follows=True,
    ),
    Departure(
        "opening system",
        "an empty system message stands in front",
        "Without one the template leaves out the tools.",
        _opened("system"),
    ),
    Departure(
        "one call each",
        "of several calls each is a message, with its result behind it",
        "The template refuses several, or shows the first alone.",
        _one_call_each,
        r"tool_calls\[0\]|tool_calls ?\| ?length|single tool",
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
        "a call's id is `functions.NAME:NUMBER`, its result's too",
        "The template shows a call by its id alone: by another's, the name would be lost.",
        _ids(_kimi_id),
        r"tool_call\['id'\]|Return of",
    ),
    Departure(
        "result names",
        "a result has the name of its function",
        "The template asks for it; OpenAI's clients send the id alone.",
        _result_names,
    ),
    Departure(
        "folded words",
        "words beside thinking and a call are the end of the thinking",
        "The template refuses both together.",
        _folded,
        "both content and thinking",
    ),
    Departure(
        "named thinking",
        "thinking has all names that templates have for it",
        "The template reads `thinking`, which chat's clients do not send.",
        _named_thinking,
    ),
    Departure(
        "thinking chunks",
        "thinking is a part of the content",
        "The template reads it there alone.",
        _chunks,
        "chunk|type.\\] == .thinking",
    ),
    Departure(
        "answered results",
        "`Done.` is said between a result and the next question",
        "The template refuses a question behind a result.",
        _answered,
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
        _parts,
        follows=True,
    ),
    Departure(
        "kept thinking",
        "the template's own variable `preserve_thinking` is set",
        "`PRESERVE_THINKING`, see below.",
        _kept_thinking,
        "preserve_thinking",
        is_chosen=True,
    ),
    Departure(
        "control text",
        "a mark that a client's text, result or argument spells out is text, and no token",
        "Else what a web page has in it could end a turn, or speak as the system.",
        _control_text,
        is_chosen=True,
    ),
)
