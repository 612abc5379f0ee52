"""Renders messages to text through the model's own chat template. Touches no MLX.

A conversation is first adapted to the template, so that no message of an agent's is refused. Each
change looks only at a message and those before it, so a conversation that grows is changed alike at
each request, and its prompt only appends. Messages are not modified.

Tools, calls and results are text for models whose template has no place for them, in one of two
forms beside the model's own where that is known. "manual" is JSON in <tool_call> tags, as Hermes
and Qwen write it; "tool_code" is a Python call in a fenced block, as Gemma 2 and 3 were trained.
What is written here is what hearth.worker.stream reads of such models' answers.
"""

import hashlib
import inspect
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from hearth.shared import written_numbers
from hearth.shared.errors import RequestError
from hearth.shared.machine import VISION_REMEDY, has_vision
from hearth.shared.our_ids import numbered_call_id, written_call_id
from hearth.shared.wire_messages import Prompt, ThinkingWish
from hearth.shared.written_numbers import object_or_text
from hearth.worker.formats.shared.python_text import python_text
from hearth.worker.prompt.awaited_work import NobodyWaits
from hearth.worker.prompt.chat_template import Template, parts_of, text_of, text_part
from hearth.worker.prompt.template_capabilities import (
    OwnForm,
    TemplateCapabilities,
    ToolForm,
    template_capabilities,
    thinking_switches,
)

log = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
# A message, and its place among those that were sent, or NONE.
MessageRow = tuple[dict[str, Any], int]

NONE: Final = -1  # a message that was not sent, or not as one
_NO_SYSTEM: Final = {"role": "system", "content": ""}
_NO_QUESTION: Final = {"role": "user", "content": ""}
_NO_IMAGE: Final = text_part("[image omitted: this model reads text only]")
# Stands where a template wants an answer before the next question, and none was given.
_NO_ANSWER: Final = {"role": "assistant", "content": "Done."}
_NO_WISH: Final = ThinkingWish()
# Arguments of the renderer itself: a client that could set them could bring its own template.
NOT_TEMPLATE_VARIABLES: Final = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. Immutable."""

    text: str
    runs: list[list[int]]  # those of `adapted`


class Renderer:
    """Renders messages for one model. The prompt threads share it.

    `template_failures` counts prompts that the template refused: whatever a template raises is
    taken for a fault of the request. `capabilities` are the template's.
    """

    def __init__(
        self,
        tokenizer: Any,
        default_thinking: bool | None,
        preserve_thinking: bool,
        own_form: Callable[[ToolForm], OwnForm | None] = lambda form: None,
    ) -> None:
        """`default_thinking` holds where a request says nothing, None = as the template has it.

        `own_form` tells that of a model's calls, by the form in which prompts show tools.
        """
        self._template = Template(tokenizer)
        self.has_template = self._template.exists  # without one, messages are a transcript
        known = template_capabilities(self._template)
        shows_all = known.shows_calls and known.tool_form == "native"
        own = None if shows_all else own_form(known.tool_form)
        if own is None and known.tool_form != "native":  # calls are asked for in words of ours
            known = replace(known, shows_calls=False, shows_results=False)
        self.capabilities = replace(known, own=own)
        # The text around tools that is not the template's, "" where that has all of it.
        self.markup = markup(known.tool_form, own)
        # The tags that the template looks for in an answer that begins with its thinking.
        self.lifted_tags = self._template.think_tags if known.lifts_thinking else None
        self.thinking = thinking_switches(self._template)
        self._default_thinking = default_thinking
        # Templates that know `preserve_thinking` keep the thinking of turns whose tokens are not
        # known too; to others it is one variable more.
        self._preserve_thinking = preserve_thinking
        self.template_failures = 0

    def rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        options: dict[str, Any],
        adds_header: bool = True,
        continues: bool = False,
        thinking: ThinkingWish = _NO_WISH,
    ) -> Rendered:
        """Return the messages as text, with the generation prompt where `adds_header`.

        Where the answer `continues` the last message, the text ends with that one's content.

        Raises:
            RequestError: the template refuses them, or nobody waits for them any more.
        """
        if not_variables := sorted(options.keys() & NOT_TEMPLATE_VARIABLES):
            raise RequestError(
                f"chat_template_kwargs has {', '.join(not_variables)}, which a template cannot be "
                "given. Remove it.",
                param="chat_template_kwargs",
            )
        messages, tools, runs = adapted(messages, tools, self.capabilities, adds_header)
        variables = self._variables(options, thinking)
        try:
            if continues:
                text = self._template.text_to_continue(messages, tools, variables)
            else:
                text = self._template.text(messages, tools, variables, adds_header)
        except NobodyWaits:
            raise
        except Exception as error:  # a template is a program; it raises whatever it likes
            self.template_failures += 1
            log.info("template refused count=%d %s", self.template_failures, type(error).__name__)
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return Rendered(text, runs)

    def _variables(self, options: dict[str, Any], wish: ThinkingWish) -> dict[str, Any]:
        """Return the template's variables for a request's options and its wish about thinking."""
        if wish.on is None:
            wish = replace(wish, on=self._default_thinking)
        kept = {"preserve_thinking": self._preserve_thinking}
        given = kept | self.thinking.variables(wish) | options
        known = self.capabilities.variables
        return {name: given[name] for name in given if known is None or name in known}


# ---------------------------------------------------------------- a conversation


def adapted(
    messages: Messages, tools: list[Any], template: TemplateCapabilities, adds_header: bool
) -> tuple[Messages, list[Any], list[list[int]]]:
    """Return the messages and the tools as this template takes them, and the runs.

    A run is of the model's own messages: each one's place among those sent, or NONE.
    """
    rows = [(message, at) for at, message in enumerate(messages)]
    if template.tool_form != "native":
        rows, tools = _with_tool_prompt(rows, tools, template), []
    elif template.completes_tools:
        tools = [_whole(tool, template.completes_tools) for tool in tools]
    if template.needs_system and tools and (not messages or messages[0]["role"] != "system"):
        rows = [(_NO_SYSTEM, NONE), *rows]
    if template.shows_ids or template.shortens_ids:
        rows = list(_with_ids(rows, template))
    if template.splits_calls:
        rows = list(_one_call_each(rows))
    fitting = ((_adapted_message(row[0], at, template), row[1]) for at, row in enumerate(rows))
    ordered = _in_order(fitting, template, adds_header)
    groups = itertools.groupby(ordered, lambda row: row[0]["role"] == "assistant")
    runs = [[place for _, place in rows] for is_own, rows in groups if is_own]
    return [_with_parts(message, template) for message, _ in ordered], tools, runs


def short_call_id(call_id: str) -> str:
    """Return nine letters and digits that stand for `call_id`: those that the model wrote."""
    written = written_call_id(call_id)
    if len(written) == 9 and written.isascii() and written.isalnum():
        return written
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


# ---------------------------------------------------------------- tools


def _with_tool_prompt(
    rows: list[MessageRow], tools: list[Any], template: TemplateCapabilities
) -> list[MessageRow]:
    """Return the messages with the tools at the end of the system message."""
    if not tools:
        return rows
    prompt = tool_prompt(tools, template.tool_form, template.own)
    if not rows or rows[0][0]["role"] != "system":
        return [({"role": "system", "content": prompt}, NONE), *rows]
    (first, place), *others = rows
    said = text_of(first)
    content = f"{said}\n\n{prompt}" if said else prompt
    return [({**first, "content": content}, place), *others]


def _whole(tool: dict[str, Any], asked: frozenset[str]) -> dict[str, Any]:
    """Return the tool with the fields that are `asked` for, and those of its properties."""
    function = tool["function"]
    parameters = {**(function.get("parameters") or {})}
    if ("schema" if parameters else "parameters") in asked:
        parameters = parameters | {"type": "object", "properties": {}} | parameters  # in its order
    if "properties" in asked and isinstance(parameters.get("properties"), dict):
        parameters["properties"] = {
            name: _whole_property(schema) for name, schema in parameters["properties"].items()
        }
    whole = {"description": function.get("description") or "", "parameters": parameters}
    added = {name: whole[name] for name in whole if name in asked or function.get(name)}
    return {**tool, "function": function | added}


def _whole_property(schema: Any) -> Any:
    """Return a property's JSON schema with the fields that a template may ask for."""
    if not isinstance(schema, dict):
        return schema
    whole = {"description": "", **schema}
    if whole.get("type") == "object":
        whole["additionalProperties"] = _whole_property(whole.get("additionalProperties", {}))
    return whole


def _one_call_each(rows: list[MessageRow]) -> Iterator[MessageRow]:
    """Yield the messages with one call in each; what is said beside several stays with the first.

    Each call's results stand behind it, and those of other calls behind the last.
    """
    waiting = [*reversed(rows)]
    while waiting:
        message, place = waiting.pop()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message, place
            continue
        said, results = message, defaultdict[Any, list[MessageRow]](list)
        while waiting and waiting[-1][0]["role"] == "tool":
            results[waiting[-1][0].get("tool_call_id")].append(waiting.pop())
        for call in calls:
            yield {**said, "tool_calls": [call]}, NONE
            said = {"role": "assistant", "content": ""}
            yield from results.pop(call.get("id"), ())
        yield from itertools.chain(*results.values())


def _with_ids(rows: list[MessageRow], template: TemplateCapabilities) -> Iterator[MessageRow]:
    """Yield the messages with the call ids that the template takes, and its results with them.

    What the model wrote stays. Else Mistral's demands nine letters and digits; Kimi's wants a name
    and its number in the conversation, or where it numbers calls itself, in the message.
    """
    numbers = itertools.count()
    ids: dict[str, str] = {}  # of the calls so far
    for message, place in rows:
        calls = []
        numbers = itertools.count() if template.numbers_by_message else numbers
        for call in message.get("tool_calls") or ():
            given, name = call.get("id") or "", call["function"]["name"]
            ids[given] = _shown_id(given, template, name, next(numbers))
            calls.append({**call, "id": ids[given]})
        given = message.get("tool_call_id") or ""
        new_id = ids.get(given, given and _shown_id(given, template))
        changed = {"tool_calls": calls} if calls else {"tool_call_id": new_id} if new_id else {}
        yield {**message, **changed}, place


def _shown_id(given: str, template: TemplateCapabilities, name: str = "", number: int = 0) -> str:
    """Return the id that is shown of a call of `name`, or of a result whose call is not known."""
    if template.names_by_id and name:
        return numbered_call_id(given, name, number)
    return short_call_id(given) if template.shortens_ids else written_call_id(given)


# ---------------------------------------------------------------- one message


def _adapted_message(
    message: dict[str, Any], at: int, template: TemplateCapabilities
) -> dict[str, Any]:
    """Return message `at` as this template takes it.

    A system message behind the first stays where it is, as a user's where the template knows
    no other: moved to the front, it would change the prompt from its first token on.
    """
    role = message["role"]
    if role == "system" and not (template.places_system if at else template.opens_with_system):
        content = text_of(message)
        return {"role": "user", "content": f"<system>\n{content}\n</system>" if at else content}
    if role == "tool" and not template.shows_results:
        return _result_as_user(message, template)
    if message.get("tool_calls"):
        return _adapted_calls(message, template)
    return message


def _result_as_user(result: dict[str, Any], template: TemplateCapabilities) -> dict[str, Any]:
    """Return a tool's result as a message of the user's."""
    return {
        "role": "user",
        "content": result_text(text_of(result), template.tool_form, template.own),
    }


def _adapted_calls(message: dict[str, Any], template: TemplateCapabilities) -> dict[str, Any]:
    """Return a message with calls as this template takes it.

    Harmony's refuses words and thinking beside one call, and writes either as thinking.
    """
    calls, content = message["tool_calls"], text_of(message)
    if not template.shows_calls:
        functions = [_with_object(call)["function"] for call in calls]
        usual = [call_text(each, template.tool_form) for each in functions]
        texts = [template.own.calls(functions)] if template.own else usual
        said = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**said, "content": "\n".join([content, *texts] if content else texts)}
    # A broken call of long ago must not end the conversation.
    fitted = _with_object if template.takes_objects else _with_text
    calls = [fitted(call, template.takes_text) for call in calls]
    message = {**message, "tool_calls": calls}
    reasoning = message.get("reasoning_content")
    if template.folds_thinking and content and reasoning:
        message |= {"content": "", "reasoning_content": f"{reasoning}\n{content}"}
    return message


def _with_object(call: dict[str, Any], keeps_text: bool = False) -> dict[str, Any]:
    """Return the call with arguments that are an object.

    Text that is none becomes its `input`, or stays. An object with digits that would be lost came
    as text, and keeps them. One with half a character cannot be read: its text spells that out.
    """
    function = call["function"]
    given = function["arguments"]
    if isinstance(given, str) and "\\ud" not in given.lower():
        given = object_or_text(given, written_numbers.loads)
    if isinstance(given, str) and not keeps_text:
        given = {"input": given}
    return {**call, "function": {**function, "arguments": given}}


def _with_text(call: dict[str, Any], keeps_text: bool) -> dict[str, Any]:
    """Return the call with arguments that are a text, that of an object unless it `keeps_text`."""
    given = call["function"]["arguments"]
    if isinstance(given, str) and (keeps_text or isinstance(object_or_text(given), dict)):
        return call
    function = _with_object(call)["function"]
    arguments = written_numbers.dumps(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


# ---------------------------------------------------------------- one behind the other


def _in_order(
    rows: Iterable[MessageRow], template: TemplateCapabilities, adds_header: bool
) -> list[MessageRow]:
    """Return the messages, none behind one that it may not follow in this template.

    Neighbours of one role become one message; else an empty one comes between.
    """
    refused = template.refused
    groups: list[list[MessageRow]] = []
    before = "start"
    for message, place in rows:
        kind = _kind(message)
        if before == "start" and (before, kind) in refused:
            groups.append([(_NO_QUESTION, NONE)])
            before = "user"
        if kind == "tool" and (before, kind) in refused:  # of no call that is known
            message, kind = _result_as_user(message, template), "user"
        assert groups or before == "start", (before, kind)
        if (before, kind) not in refused:
            groups.append([(message, place)])
        elif groups[-1][0][0]["role"] == message["role"]:
            groups[-1].append((message, place))
        else:
            groups.append([(_NO_ANSWER if kind == "user" else _NO_QUESTION, NONE)])
            groups.append([(message, place)])
        if kind != "system" or len(groups) > 1:  # what is behind the system message begins
            before = kind
    if before == "start" and adds_header and ("start", "end") in refused:
        groups.append([(_NO_QUESTION, NONE)])
    return [
        group[0] if len(group) == 1 else (_joined([message for message, _ in group]), NONE)
        for group in groups
    ]


def _with_parts(message: dict[str, Any], template: TemplateCapabilities) -> dict[str, Any]:
    """Return the message with parts for content where the template takes them, else one text."""
    if _kind(message) not in template.part_kinds:
        return {**message, "content": text_of(message)}
    thinking = message.get("reasoning_content")
    needs_parts = thinking or not (message.get("content") or message.get("tool_calls"))
    if template.thinks_in_parts and message["role"] == "assistant" and needs_parts:
        return {
            **message,
            "content": [
                *([{"type": "thinking", "thinking": thinking}] if thinking else []),
                *parts_of(message),
            ],
        }
    return message


def _kind(message: dict[str, Any]) -> str:
    return "calls" if message.get("tool_calls") else str(message["role"])


def _joined(group: Messages) -> dict[str, Any]:
    """Return messages of one role as one, a blank line between what each says."""
    whole = {**group[0]}
    for name, texts in (
        ("content", [text_of(message) for message in group]),
        ("reasoning_content", [message.get("reasoning_content") or "" for message in group]),
    ):
        whole[name] = "\n\n".join(filter(None, texts))
    whole["tool_calls"] = [call for message in group for call in message.get("tool_calls") or ()]
    return whole


# ---------------------------------------------------------------- deferred tools


def with_loaded_tools(
    messages: list[dict[str, Any]], deferred: list[Any], loaded: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the messages with each referenced tool's definition behind its reference.

    A client that loads a tool in mid-conversation lists it from then on. Rendered at the head, it
    would change the prompt before the first message; where its reference stands, it is appended.

    `loaded` names the tools that the session loaded. Those still listed whose reference is gone,
    as after a compaction, stand behind the first user message. Messages are not modified.
    """
    if not deferred:
        return messages
    known = {tool["function"]["name"]: tool for tool in deferred}
    shown: set[str] = set()
    placed = []
    for message in messages:
        names = [name for name in message.get("tool_references") or () if name in known]
        shown.update(names)
        placed.append(_with_tools(message, names, known))
    missing = [name for name in loaded if name in known and name not in shown]
    for at, message in enumerate(placed):
        if missing and message["role"] == "user":
            placed[at] = _with_tools(message, missing, known)
            break
    assert len(placed) == len(messages), (len(placed), len(messages))
    return placed


def _with_tools(
    message: dict[str, Any], names: list[str], known: Mapping[str, Any]
) -> dict[str, Any]:
    if not names:
        return message
    lines = [json.dumps(known[name], ensure_ascii=False) for name in names]
    block = "\n".join(["These tools are available from now on:", "<tools>", *lines, "</tools>"])
    content = message.get("content") or ""
    if isinstance(content, list):
        return {**message, "content": [*content, text_part(f"\n{block}")]}
    return {**message, "content": f"{content}\n{block}" if content else block}


# ---------------------------------------------------------------- images


def without_images(prompt: Prompt, model: str) -> list[dict[str, Any]]:
    """Return the messages of `prompt` for a model that reads text only.

    An image in a tool's result becomes a notice: no client can take a result back.

    Raises:
        RequestError: another message shows one.
    """
    shown_messages = []
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, list):
            shown = [part["image"] for part in content if part["type"] == "image"]
            if shown and message["role"] != "tool":
                place = prompt.places.get(shown[0], "messages")
                remedy = "" if has_vision() else f"{VISION_REMEDY} and "
                raise RequestError(
                    f"{place} is an image, and {model} reads text only. Remove the image, or "
                    f"{remedy}serve a vision model (MODEL_PATH).",
                    code="unsupported_content",
                    param="messages",
                )
            message = {
                **message,
                "content": [part if part["type"] == "text" else _NO_IMAGE for part in content],
            }
        shown_messages.append(message)
    return shown_messages


# ---------------------------------------------------------------- tools as text


_EXAMPLE: Final = {"name": "function_name", "arguments": {"argument_name": "value"}}
_PROMPTS: Final[dict[ToolForm, str]] = {
    "manual": """\
# Tools

You may call functions to help with the user's request. Each line in <tools></tools> is one:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object{place}:
{call}
To call several, write several such blocks. Write nothing behind the last one and wait: each \
result comes back in {result}.""",
    "tool_code": """\
You have access to functions. Each line here is one, with its parameters as a JSON schema:
{tools}

If you decide to call a function, write the call in Python, wrapped in ```tool_code```. Give every \
argument its name, and use literal values only:
```tool_code
function_name(argument_name="value", other_name=3)
```
To call several, write several such blocks. Write nothing behind the last one and wait: each \
result comes back in ```tool_output```.""",
}
_RESULTS: Final[dict[ToolForm, tuple[str, str]]] = {
    "manual": ("<tool_response>\n", "\n</tool_response>"),
    "tool_code": ("```tool_output\n", "\n```"),
}


def markup(form: ToolForm, own: OwnForm | None) -> str:
    """Return all that is written in these forms around names, arguments and results."""
    texts = [] if form == "native" else [tool_prompt((), form, own), *_RESULTS[form]]
    return "\n".join(texts if own is None else [*texts, own.calls([_EXAMPLE]), *(own.result or ())])


def tool_prompt(tools: Sequence[Any], form: ToolForm, own: OwnForm | None = None) -> str:
    """Return the text that shows the model its tools; `form` is not "native"."""
    assert form != "native"
    functions = [tool["function"] for tool in tools]
    if own and own.tools:
        return own.tools(functions)
    shown = tools if form == "manual" else functions
    call = own.calls([_EXAMPLE]) if own else call_text(_EXAMPLE, form)
    return _PROMPTS[form].format(
        tools="\n".join(map(written_numbers.dumps, shown)),
        place=" in <tool_call></tool_call>" if call.startswith("<tool_call>") else "",
        call=call,
        result=result_text("", form, own).replace("\n", ""),
    )


def call_text(function: dict[str, Any], form: ToolForm) -> str:
    """Return a call as the model is asked to write it; `function` has its name and arguments.

    In JSON also where the template shows tools, but no calls.
    """
    name, arguments = function["name"], function["arguments"]
    if form == "tool_code":
        return f"```tool_code\n{python_text(name, arguments)}\n```"
    call = written_numbers.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def result_text(content: str, form: ToolForm, own: OwnForm | None = None) -> str:
    """Return the result of a call in the form that the tool prompt announces."""
    usual = _RESULTS["tool_code" if form == "tool_code" else "manual"]
    start, end = own.result if own and own.result else usual
    return f"{start}{content}{end}"
