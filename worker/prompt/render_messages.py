"""Renders messages to text through the model's own chat template. Does not touch MLX.

A conversation is first adapted to the template, so that no agent's message is refused. The change
of a message depends only on this message and earlier messages. So a growing conversation is changed
in the same way at each request, and the prompt only grows at the end. The given messages are not
modified.

Tools, calls and results that the template cannot show become text. Besides the model's own form,
there are two forms. "manual" is JSON in <tool_call> tags, as Hermes and Qwen write calls.
"tool_code" is a Python call in a fenced block, as Gemma 2 and 3 were trained. hearth.worker.stream
reads these forms in the answers.
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
from hearth.worker.prompt.awaited_work import ClientLeft
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
# A message, and the message's index in the request, or NONE.
NumberedMessage = tuple[dict[str, Any], int]

NONE: Final = -1  # index of a message that was added, joined or split
_NO_SYSTEM: Final = {"role": "system", "content": ""}
_NO_QUESTION: Final = {"role": "user", "content": ""}
_NO_IMAGE: Final = text_part("[image omitted: this model reads text only]")
# Stands in for a missing answer if the template demands an answer before the next question.
_NO_ANSWER: Final = {"role": "assistant", "content": "Done."}
_NO_WISH: Final = ThinkingWish()
# Arguments of the renderer itself, with which a client could bring its own template.
NOT_TEMPLATE_VARIABLES: Final = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. Immutable."""

    text: str
    runs: list[list[int]]  # runs of the model's own messages; see `adapt_messages`


class Renderer:
    """Renders messages for one model. The prompt threads share it.

    `template_failures` counts prompts that the template refused; any exception of a template counts
    as a fault of the request. `capabilities` are those of the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        default_thinking: bool | None,
        preserve_thinking: bool,
        own_form: Callable[[ToolForm], OwnForm | None] = lambda form: None,
    ) -> None:
        """Probe the template of `tokenizer`.

        `default_thinking` holds for requests that do not mention thinking; None = the template
        decides. `own_form` maps the form in which prompts show tools to the model's own form of
        calls.
        """
        self._template = Template(tokenizer)
        self.has_template = self._template.exists  # else messages are a transcript
        known = template_capabilities(self._template)
        shows_all = known.shows_calls and known.tool_form == "native"
        own = None if shows_all else own_form(known.tool_form)
        if own is None and known.tool_form != "native":  # calls get Hearth's own form
            known = replace(known, shows_calls=False, shows_results=False)
        self.capabilities = replace(known, own=own)
        # The text that Hearth writes around tools; "" if the template writes all such text.
        self.markup = markup(known.tool_form, own)
        # The tags at which the template recognises thinking at the beginning of an answer.
        self.lifted_tags = self._template.think_tags if known.lifts_thinking else None
        self.thinking = thinking_switches(self._template)
        self._default_thinking = default_thinking
        # Templates with a variable `preserve_thinking` keep old thinking even in turns without
        # recorded tokens. Other templates ignore this variable.
        self._preserve_thinking = preserve_thinking
        self.template_failures = 0

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        options: dict[str, Any],
        adds_header: bool = True,
        continues: bool = False,
        thinking: ThinkingWish = _NO_WISH,
    ) -> Rendered:
        """Return the messages as text, with the generation prompt if `adds_header`.

        If the answer `continues` the last message, the text ends with that message's content.

        Raises:
            RequestError: the template refuses the messages, or the client has left.
        """
        if not_variables := sorted(options.keys() & NOT_TEMPLATE_VARIABLES):
            raise RequestError(
                f"chat_template_kwargs has {', '.join(not_variables)}, which a template cannot be "
                "given. Remove it.",
                param="chat_template_kwargs",
            )
        messages, tools, runs = adapt_messages(messages, tools, self.capabilities, adds_header)
        variables = self._variables(options, thinking)
        try:
            if continues:
                text = self._template.text_to_continue(messages, tools, variables)
            else:
                text = self._template.text(messages, tools, variables, adds_header)
        except ClientLeft:
            raise
        except Exception as error:  # a template is a program and may raise any exception
            self.template_failures += 1
            log.info("template refused count=%d %s", self.template_failures, type(error).__name__)
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return Rendered(text, runs)

    def _variables(self, options: dict[str, Any], wish: ThinkingWish) -> dict[str, Any]:
        """Return the template's variables for a request's options and wish about thinking."""
        if wish.on is None:
            wish = replace(wish, on=self._default_thinking)
        preserving = {"preserve_thinking": self._preserve_thinking}
        variables = preserving | self.thinking.variables(wish) | options
        known_names = self.capabilities.variables
        return {
            name: variables[name]
            for name in variables
            if known_names is None or name in known_names
        }


# ---------------------------------------------------------------- a conversation


def adapt_messages(
    messages: Messages, tools: list[Any], template: TemplateCapabilities, adds_header: bool
) -> tuple[Messages, list[Any], list[list[int]]]:
    """Return the messages and tools in the form that the template takes, and the runs.

    A run lists the indices (or NONE) of consecutive messages of the model.
    """
    numbered = [(message, at) for at, message in enumerate(messages)]
    if template.tool_form != "native":
        numbered, tools = _with_tool_prompt(numbered, tools, template), []
    elif template.completes_tools:
        tools = [_completed_tool(tool, template.completes_tools) for tool in tools]
    if template.needs_system and tools and (not messages or messages[0]["role"] != "system"):
        numbered = [(_NO_SYSTEM, NONE), *numbered]
    if template.shows_ids or template.shortens_ids:
        numbered = list(_with_ids(numbered, template))
    if template.splits_calls:
        numbered = list(_one_call_each(numbered))
    fitting = (
        (_adapted_message(item[0], at, template), item[1]) for at, item in enumerate(numbered)
    )
    ordered = _in_order(fitting, template, adds_header)
    groups = itertools.groupby(ordered, lambda item: item[0]["role"] == "assistant")
    runs = [[index for _, index in group] for is_own, group in groups if is_own]
    return [_with_parts(message, template) for message, _ in ordered], tools, runs


def short_call_id(call_id: str) -> str:
    """Return nine letters and digits for `call_id`: the model's own id if that has this form."""
    written = written_call_id(call_id)
    if len(written) == 9 and written.isascii() and written.isalnum():
        return written
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


# ---------------------------------------------------------------- tools


def _with_tool_prompt(
    numbered: list[NumberedMessage], tools: list[Any], template: TemplateCapabilities
) -> list[NumberedMessage]:
    """Return the messages with the tools appended to the system message."""
    if not tools:
        return numbered
    prompt = tool_prompt(tools, template.tool_form, template.own)
    if not numbered or numbered[0][0]["role"] != "system":
        return [({"role": "system", "content": prompt}, NONE), *numbered]
    (first, index), *others = numbered
    text = text_of(first)
    content = f"{text}\n\n{prompt}" if text else prompt
    return [({**first, "content": content}, index), *others]


def _completed_tool(tool: dict[str, Any], required: frozenset[str]) -> dict[str, Any]:
    """Return the tool with the fields in `required`, also inside the tool's properties."""
    function = tool["function"]
    parameters = {**(function.get("parameters") or {})}
    if ("schema" if parameters else "parameters") in required:
        parameters = parameters | {"type": "object", "properties": {}} | parameters  # keeps order
    if "properties" in required and isinstance(parameters.get("properties"), dict):
        parameters["properties"] = {
            name: _completed_property(schema) for name, schema in parameters["properties"].items()
        }
    complete = {"description": function.get("description") or "", "parameters": parameters}
    added = {name: complete[name] for name in complete if name in required or function.get(name)}
    return {**tool, "function": function | added}


def _completed_property(schema: Any) -> Any:
    """Return a property's JSON schema with the fields that a template may read."""
    if not isinstance(schema, dict):
        return schema
    complete = {"description": "", **schema}
    if complete.get("type") == "object":
        complete["additionalProperties"] = _completed_property(
            complete.get("additionalProperties", {})
        )
    return complete


def _one_call_each(numbered: list[NumberedMessage]) -> Iterator[NumberedMessage]:
    """Yield the messages with one call each; text beside several calls stays with the first call.

    The results of a call follow that call. Results of unknown calls follow the last call.
    """
    waiting = [*reversed(numbered)]
    while waiting:
        message, index = waiting.pop()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message, index
            continue
        base, results = message, defaultdict[Any, list[NumberedMessage]](list)
        while waiting and waiting[-1][0]["role"] == "tool":
            results[waiting[-1][0].get("tool_call_id")].append(waiting.pop())
        for call in calls:
            yield {**base, "tool_calls": [call]}, NONE
            base = {"role": "assistant", "content": ""}
            yield from results.pop(call.get("id"), ())
        yield from itertools.chain(*results.values())


def _with_ids(
    numbered: list[NumberedMessage], template: TemplateCapabilities
) -> Iterator[NumberedMessage]:
    """Yield the messages with call ids that the template takes, in calls and results.

    The model's own ids stay. Otherwise Mistral's template demands nine letters and digits. Kimi's
    template demands the function's name and the call's number in the conversation, or in the
    message if the template numbers calls itself.
    """
    numbers = itertools.count()
    ids: dict[str, str] = {}  # shown ids of the calls so far
    for message, index in numbered:
        calls = []
        numbers = itertools.count() if template.numbers_by_message else numbers
        for call in message.get("tool_calls") or ():
            given, name = call.get("id") or "", call["function"]["name"]
            ids[given] = _shown_id(given, template, name, next(numbers))
            calls.append({**call, "id": ids[given]})
        given = message.get("tool_call_id") or ""
        new_id = ids.get(given, given and _shown_id(given, template))
        changed = {"tool_calls": calls} if calls else {"tool_call_id": new_id} if new_id else {}
        yield {**message, **changed}, index


def _shown_id(call_id: str, template: TemplateCapabilities, name: str = "", number: int = 0) -> str:
    """Return the id shown for a call of `name`, or for a result whose call is unknown."""
    if template.names_by_id and name:
        return numbered_call_id(call_id, name, number)
    return short_call_id(call_id) if template.shortens_ids else written_call_id(call_id)


# ---------------------------------------------------------------- one message


def _adapted_message(
    message: dict[str, Any], at: int, template: TemplateCapabilities
) -> dict[str, Any]:
    """Return message `at` in a form that the template takes.

    A later system message stays in place, as a user's message if the template demands that. At the
    front, the message would change the prompt from the first token on.
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
    """Return a tool's result as a user's message."""
    return {
        "role": "user",
        "content": result_text(text_of(result), template.tool_form, template.own),
    }


def _adapted_calls(message: dict[str, Any], template: TemplateCapabilities) -> dict[str, Any]:
    """Return a message with calls in a form that the template takes.

    Harmony's template refuses a call with both words and thinking, and writes both as thinking.
    """
    calls, content = message["tool_calls"], text_of(message)
    if not template.shows_calls:
        functions = [_with_object(call)["function"] for call in calls]
        usual = [call_text(function, template.tool_form) for function in functions]
        texts = [template.own.calls(functions)] if template.own else usual
        message_fields = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**message_fields, "content": "\n".join([content, *texts] if content else texts)}
    # An old broken call must not end the conversation.
    fitted = _with_object if template.takes_objects else _with_text
    calls = [fitted(call, template.takes_text) for call in calls]
    message = {**message, "tool_calls": calls}
    reasoning = message.get("reasoning_content")
    if template.folds_thinking and content and reasoning:
        message |= {"content": "", "reasoning_content": f"{reasoning}\n{content}"}
    return message


def _with_object(call: dict[str, Any], keeps_text: bool = False) -> dict[str, Any]:
    """Return the call with arguments that are an object.

    Arguments that are other text become an object's `input`, or stay text if `keeps_text`. Numbers
    keep the digits of the text. An escaped half of a surrogate pair cannot be parsed; text that
    contains one is treated as other text.
    """
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str) and "\\ud" not in arguments.lower():
        arguments = object_or_text(arguments, written_numbers.loads)
    if isinstance(arguments, str) and not keeps_text:
        arguments = {"input": arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def _with_text(call: dict[str, Any], keeps_text: bool) -> dict[str, Any]:
    """Return the call with arguments as JSON text; other text stays only if `keeps_text`."""
    arguments_text = call["function"]["arguments"]
    if isinstance(arguments_text, str) and (
        keeps_text or isinstance(object_or_text(arguments_text), dict)
    ):
        return call
    function = _with_object(call)["function"]
    arguments = written_numbers.dumps(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


# ---------------------------------------------------------------- the order of messages


def _in_order(
    numbered: Iterable[NumberedMessage], template: TemplateCapabilities, adds_header: bool
) -> list[NumberedMessage]:
    """Return the messages in an order that the template takes.

    If a message may not follow its neighbour, both are joined if they have the same role; otherwise
    a message is added between them.
    """
    refused = template.refused
    groups: list[list[NumberedMessage]] = []
    before = "start"
    for message, index in numbered:
        kind = _kind(message)
        if before == "start" and (before, kind) in refused:
            groups.append([(_NO_QUESTION, NONE)])
            before = "user"
        if kind == "tool" and (before, kind) in refused:  # the result's call is unknown
            message, kind = _result_as_user(message, template), "user"
        assert groups or before == "start", (before, kind)
        if (before, kind) not in refused:
            groups.append([(message, index)])
        elif groups[-1][0][0]["role"] == message["role"]:
            groups[-1].append((message, index))
        else:
            groups.append([(_NO_ANSWER if kind == "user" else _NO_QUESTION, NONE)])
            groups.append([(message, index)])
        if kind != "system" or len(groups) > 1:  # the message after the system message comes first
            before = kind
    if before == "start" and adds_header and ("start", "end") in refused:
        groups.append([(_NO_QUESTION, NONE)])
    return [
        group[0] if len(group) == 1 else (_joined([message for message, _ in group]), NONE)
        for group in groups
    ]


def _with_parts(message: dict[str, Any], template: TemplateCapabilities) -> dict[str, Any]:
    """Return the message with content as parts if the template takes parts, else as one text."""
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
    """Join messages of one role, with a blank line between the texts."""
    joined_message = {**group[0]}
    for name, texts in (
        ("content", [text_of(message) for message in group]),
        ("reasoning_content", [message.get("reasoning_content") or "" for message in group]),
    ):
        joined_message[name] = "\n\n".join(filter(None, texts))
    joined_message["tool_calls"] = [
        call for message in group for call in message.get("tool_calls") or ()
    ]
    return joined_message


# ---------------------------------------------------------------- deferred tools


def with_loaded_tools(
    messages: list[dict[str, Any]], deferred: list[Any], loaded: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the messages with each referenced tool's definition after its reference.

    A client lists a tool as soon as the tool is loaded. At the head of the prompt a new definition
    would change all later tokens; at the reference, the definition is only appended.

    `loaded` names the tools that the session loaded. If such a tool is still listed but the
    reference is gone, as after a compaction, the definition comes after the first user message. The
    given messages are not modified.
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

    An image in a tool's result becomes a notice, since no client can take a result back.

    Raises:
        RequestError: another message shows an image.
    """
    shown_messages = []
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, list):
            shown = [part["image"] for part in content if part["type"] == "image"]
            if shown and message["role"] != "tool":
                image_place = prompt.places.get(shown[0], "messages")
                remedy = "" if has_vision() else f"{VISION_REMEDY} and "
                raise RequestError(
                    f"{image_place} is an image, and {model} reads text only. Remove the image, or "
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
    """Return all text that the two forms write around names, arguments and results."""
    texts = [] if form == "native" else [tool_prompt((), form, own), *_RESULTS[form]]
    return "\n".join(texts if own is None else [*texts, own.calls([_EXAMPLE]), *(own.result or ())])


def tool_prompt(tools: Sequence[Any], form: ToolForm, own: OwnForm | None = None) -> str:
    """Return the text that shows tools to the model; `form` is not "native"."""
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
    """Return a call in the form that the model is told to write; `function` has name and arguments.

    If a template shows tools but no calls, calls are JSON too.
    """
    name, arguments = function["name"], function["arguments"]
    if form == "tool_code":
        return f"```tool_code\n{python_text(name, arguments)}\n```"
    call = written_numbers.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def result_text(content: str, form: ToolForm, own: OwnForm | None = None) -> str:
    """Return a call's result in the form that the tool prompt announces."""
    usual = _RESULTS["tool_code" if form == "tool_code" else "manual"]
    start, end = own.result if own and own.result else usual
    return f"{start}{content}{end}"
