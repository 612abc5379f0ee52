"""Lists the fields of a client's body that may pass to a cloud model, with rules for their values.

They are the fields of the official APIs, without those that LiteLLM itself acts upon. Such a field
may decide where a request goes and with which key (`api_base`, `headers`), what is billed and
logged (`metadata`, tags, callbacks), or which files, stores, MCP servers and prompt templates of
the user's account are read. A field that is not listed does not pass, so unknown fields of a newer
LiteLLM are shut out.
A name with "!" is required. A field with a rule passes as the rule's result.

A rule is called with the value, its path in the body, the role of its message, and a list to which
it appends the kinds that it drops. It returns the value, a copy without what must not pass, or None
to drop the field. If a required field is dropped, its record is dropped too.

A session may begin on a local model and go on in the cloud. The local server signs its thinking and
names its items in forms that no provider knows; thinking and items of these forms are dropped.
Encrypted reasoning, signed thinking and ids made by a provider pass unchanged. Ids of the local
server's tool calls stay, since they join results to calls, and any provider accepts them.

Some providers fetch the URLs of images and files themselves; for others LiteLLM does so from this
machine, whose network a client must not reach. This module judges a URL by its form only. LiteLLM
checks the resolved address when it fetches; the setting `user_url_validation` must not turn that
check off.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.messages.errors import THREAD_UNSUPPORTED
from hearth.proxy.images.prompt_images import URL_CHARS_MAX, is_public
from hearth.shared.errors import RequestError
from hearth.shared.our_ids import is_our_item_id, is_our_response_id, is_our_signature

Record = dict[str, Any]
Rule = Callable[..., Any]

NESTED_MAX: Final = 5  # levels of lists, such as an image in a document in a result in a message
_DATED: Final = re.compile(r"_\d{4}(_?\d\d){2}$")  # the date in a hosted tool's type


def as_it_is(value: Any, *_: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """The rule for a record: the fields `names` pass, some of them by a rule of `rules`.

    A record without a field of `needed` is refused. A record is dropped if `unless(record, role)`
    is true or if a needed field was dropped.
    """

    names: frozenset[str]
    rules: Mapping[str, Rule]
    needed: tuple[str, ...]
    unless: Rule | None

    def __call__(self, value: Any, param: str, role: Any, left_out: list[str]) -> Record | None:
        record = value if type(value) is dict else fields.json_object(value, param)
        if self.unless is not None and self.unless(record, role):
            return None
        names = self.names
        kept = {name: inner for name, inner in record.items() if name in names}
        if not self.rules:
            return kept
        role = kept.get("role", role)
        for name, rule in self.rules.items():
            if name not in kept or (inner := kept[name]) is None:
                continue
            kept[name] = rule(inner, f"{param}.{name}" if param else name, role, left_out)
            if kept[name] is None:
                del kept[name]
                if name in self.needed and param:
                    return None
        for name in self.needed:
            if kept.get(name) is None:
                where = f"{param}.{name}" if param else name
                fields.refuse(where, None, "a value, which the API requires")
        return kept


@dataclass(frozen=True, slots=True)
class Kinds:
    """The rule for a record whose `type` decides which fields may pass.

    A record of an unknown kind is dropped, but refused in a user's or a tool's message or if
    `is_strict`, since the question would change without the record.
    """

    of: Mapping[str, Fields]
    untyped: str = ""
    is_strict: bool = False

    def __call__(self, value: Any, param: str, role: Any, left_out: list[str]) -> Record | None:
        record = value if type(value) is dict else fields.json_object(value, param)
        kind = record.get("type") or ("message" if "role" in record else self.untyped)
        if type(kind) is str:
            found = self.of.get(kind) or self.of.get(_DATED.sub("", kind))
            if found is not None:
                return found(record, param, role, left_out)
        if self.is_strict or role in ("user", "tool"):
            fields.refuse(f"{param}.type", kind, "for a cloud model " + ", ".join(self.of))
        left_out.append(str(kind))
        return None


@dataclass(frozen=True, slots=True)
class Records:
    """The rule for a list of records. An emptied list is dropped, unless it `may_be_empty`."""

    part: Fields | Kinds
    may_be_empty: bool = False

    def __call__(
        self, value: Any, param: str, role: Any, left_out: list[str]
    ) -> list[Record] | None:
        if param.count("[") > NESTED_MAX:
            fields.refuse(param, value, f"lists nested up to {NESTED_MAX} deep")
        found, judge = [], self.part.__call__
        for index, item in enumerate(fields.json_list(value, param)):
            if (kept := judge(item, f"{param}[{index}]", role, left_out)) is not None:
                found.append(kept)
        return found if found or not value or self.may_be_empty else None


@dataclass(frozen=True, slots=True)
class TextOr:
    """The rule for a field: `text` judges a text, and `rule` any other value."""

    rule: Rule
    text: Rule = as_it_is

    def __call__(self, value: Any, param: str, role: Any, left_out: list[str]) -> Any:
        judge = self.text if type(value) is str else self.rule
        return judge(value, param, role, left_out)


# A host without user:password@, then printable ASCII without a backslash.
_URL: Final = re.compile(
    r"https://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::443)?(?:[/?#][!-\[\]-~]*)?", re.I | re.A
)
_HOST: Final = re.compile(r"(?:[a-z0-9_-]{1,63}\.)+[a-z][a-z0-9-]{1,62}\.?")
# Last labels of names that may resolve to a machine of the local network.
_LOCAL_ENDS: Final = frozenset(
    (
        *("localhost", "localdomain", "local", "internal", "intranet", "lan", "home", "corp"),
        *("private", "arpa", "test", "onion"),
    )
)


def check_url(value: Any, param: str, *_: Any) -> str:
    """Return `value` if it is a `data:` URL or an https URL of a public host.

    Raises:
        RequestError: 400; it is another URL.
    """
    if type(value) is str and (value[:5].lower() == "data:" or is_public_url(value)):
        return value
    raise RequestError(
        f"{param} is neither a data: URL nor an https:// URL of a public host, and no other is "
        "sent to a cloud model. Send what it shows as a data: URL.",
        code="unsupported_content",
        param=param,
    )


def check_data(value: Any, param: str, *_: Any) -> str:
    """Return `value` if it is bare base64 or passes `check_url`. Raises: RequestError."""
    is_bare = type(value) is str and ":" not in value[:64]
    return value if is_bare else check_url(value, param)


def is_public_url(url: str) -> bool:
    """Return whether `url` is https and its host looks public; the name is not resolved."""
    found = _URL.fullmatch(url) if len(url) <= URL_CHARS_MAX else None
    host = found[1].lower() if found is not None else ""
    is_named = _HOST.fullmatch(host) and host.rstrip(".").rpartition(".")[2] not in _LOCAL_ENDS
    return bool(is_named) or is_public(host.strip("[]"))


def is_unsealed(seal: str, record: Record, _: Any) -> bool:
    """Return whether thinking lacks a provider's signature in the field `seal`.

    Unsigned thinking may come from another client's model.
    """
    return not record.get(seal) or is_our_signature(record[seal])


def is_our_reasoning(item: Record, _: Any) -> bool:
    """Return whether a reasoning item of Responses is the local server's, or is empty."""
    sealed, item_id = item.get("encrypted_content"), item.get("id")
    return is_our_signature(sealed) or is_our_item_id(item_id) or not (sealed or item_id)


def is_blank(block: Record, role: Any) -> bool:
    """Return whether a block of a turn is blank text, which Anthropic refuses."""
    text = block.get("text")
    return role == "assistant" and type(text) is str and not text.strip()


def says_nothing(message: Record, _: Any) -> bool:
    """Return whether a message is a turn without content, which can be dropped."""
    return message.get("role") == "assistant" and not message.get("content")


def foreign_id(value: Any, *_: Any) -> Any:
    """Return the id of an item or a response; None for an id that the local server made."""
    return None if is_our_item_id(value) or is_our_response_id(value) else value


def _fields(*names: str, unless: Rule | None = None, **rules: Rule) -> Fields:
    listed = " ".join(names).split()
    needed = tuple(name[:-1] for name in listed if name.endswith("!"))
    return Fields(frozenset(name.rstrip("!") for name in listed), rules, needed, unless)


def _text_only(value: Any, *_: Any) -> str | None:
    return value if type(value) is str else None


def _auto(*_: Any) -> Record:
    """Return a new container without files, in place of one in the user's account."""
    return {"type": "auto"}


def _no_files(_: Any, param: str, *__: Any) -> NoReturn:
    raise RequestError(
        f"{param} names an uploaded file, and this server passes none on. Send the file itself, in "
        "base64.",
        code="unsupported_content",
        param=param,
    )


def _refused(remedy: str, code: str = "unsupported_parameter") -> Rule:
    """Return a rule that refuses any value but false: to drop it would change the request."""

    def refuse(value: Any, param: str, *_: Any) -> None:
        if value is not False:
            text = f"{param} is not supported; {remedy}."
            raise RequestError(text, code=code, param=param)

    return refuse


# ---------------------------------------------------------------- Messages

_THOUGHT: Final = _fields("type thinking signature", unless=partial(is_unsealed, "signature"))
_REDACTED: Final = _fields("type data", unless=partial(is_unsealed, "data"))
_RESULT: Final = _fields("type tool_use_id content cache_control caller is_error")
MESSAGES_BLOCKS: Final[dict[str, Fields]] = {}  # filled below, since blocks may hold blocks
_BLOCKS: Final = Records(Kinds(MESSAGES_BLOCKS))
_SOURCE: Final = Kinds(
    {
        "base64": _fields("type media_type data"),
        "text": _fields("type media_type data"),
        "content": _fields("type content!", content=TextOr(_BLOCKS)),
        "url": _fields("type url!", url=check_url),
        "file": _fields("type file_id!", file_id=_no_files),
    },
    is_strict=True,
)
_MESSAGES_TOOL: Final = _fields(
    "type name description input_schema cache_control strict defer_loading allowed_callers "
    "eager_input_streaming input_examples max_characters max_uses allowed_domains blocked_domains "
    "user_location max_content_tokens citations use_cache response_inclusion display_width_px "
    "display_height_px display_number enable_zoom"
)
# The tools that Anthropic defines, without the dates in their types. MCP's tools are missing, and
# `advisor`, which names another model with its address and key.
MESSAGES_TOOLS: Final = Kinds(
    {
        kind: _MESSAGES_TOOL
        for kind in (
            *("custom", "bash", "text_editor", "memory", "computer", "computer_toolset"),
            *("web_search", "web_fetch", "code_execution"),
            *("tool_search_tool_regex", "tool_search_tool_bm25"),
        )
    },
    untyped="custom",
)
_TOOL_CHANGE: Final = Kinds(
    {
        "tool_reference": _fields("type name"),
        "tool_definition": _fields("type definition!", definition=MESSAGES_TOOLS),
    }
)
MESSAGES_BLOCKS.update(
    {
        "text": _fields("type text cache_control citations", unless=is_blank),
        "image": _fields("type source! cache_control transformations", source=_SOURCE),
        "document": _fields("type source! title context citations cache_control", source=_SOURCE),
        "search_result": _fields(
            "type source title content citations cache_control", content=TextOr(_BLOCKS)
        ),
        "thinking": _THOUGHT,
        "redacted_thinking": _REDACTED,
        "tool_use": _fields("type id name input cache_control caller toolset_name"),
        "tool_result": _fields(*_RESULT.names, "toolset_name", content=TextOr(_BLOCKS)),
        "tool_reference": _fields("type tool_name cache_control"),
        "server_tool_use": _fields("type id name input cache_control caller"),
        "web_search_tool_result": _RESULT,
        "web_fetch_tool_result": _RESULT,
        "code_execution_tool_result": _RESULT,
        "bash_code_execution_tool_result": _RESULT,
        "text_editor_code_execution_tool_result": _RESULT,
        "tool_search_tool_result": _RESULT,
        "compaction": _fields(
            "type content encrypted_content signature cache_control tool_changes"
        ),
        "tool_addition": _fields("type tool! cache_control", tool=_TOOL_CHANGE),
        "tool_removal": _fields("type tool! cache_control", tool=_TOOL_CHANGE),
    }
)
_MESSAGES_MESSAGE: Final = _fields(
    "role content! clear_at output_config",
    unless=says_nothing,
    content=TextOr(_BLOCKS),
)

# ---------------------------------------------------------------- chat

_AUDIO: Final[Mapping[str, Rule]] = {"input_audio": _fields("data! format", data=check_data)}
_CHAT_PARTS: Final = Kinds(
    {
        "text": _fields("type text cache_control prompt_cache_breakpoint"),
        "refusal": _fields("type refusal"),
        "image_url": _fields(
            "type image_url! cache_control prompt_cache_breakpoint",
            image_url=TextOr(_fields("url! detail", url=check_url), check_url),
        ),
        "input_audio": _fields("type input_audio! prompt_cache_breakpoint", **_AUDIO),
        "file": _fields(
            "type file! cache_control prompt_cache_breakpoint",
            file=_fields("file_data! filename file_id", file_data=check_data, file_id=_no_files),
        ),
        "thinking": _THOUGHT,
        "redacted_thinking": _REDACTED,
    },
    untyped="text",
)
_FUNCTION: Final = _fields("name description parameters strict defer_loading cache_control")
_CHAT_TOOLS: Final = Kinds(
    {
        "function": _fields(
            "type function! cache_control defer_loading allowed_callers", function=_FUNCTION
        ),
        "custom": _fields("type custom"),
    },
    untyped="function",
)
# LiteLLM's own fields for a provider's opaque blocks, which a client sends back.
_PROVIDER_BLOCKS: Final = _fields(
    "thought_signature thought_signatures compaction_blocks web_search_results tool_results",
    compaction_blocks=_BLOCKS,
    web_search_results=_BLOCKS,
    tool_results=_BLOCKS,
)


def _provider_fields(value: Any, param: str, role: Any, left_out: list[str]) -> Record | None:
    """Return the allowed part of LiteLLM's own field; None if empty: OpenAI refuses the name."""
    kept = _PROVIDER_BLOCKS(value, param, role, left_out) or {}
    return kept if any(inner is not None for inner in kept.values()) else None


_CHAT_CALL: Final = _fields(
    "id type index function custom provider_specific_fields",
    function=_fields("name arguments"),
    provider_specific_fields=_provider_fields,
)
_SEALED_REASONING: Final = _fields(
    "type id summary content encrypted_content status",
    unless=partial(is_unsealed, "encrypted_content"),
)
_CHAT_MESSAGE: Final = _fields(
    "role content name tool_calls tool_call_id refusal audio function_call cache_control",
    "reasoning_content thinking_blocks reasoning_items provider_specific_fields",
    content=TextOr(Records(_CHAT_PARTS)),
    tool_calls=Records(_CHAT_CALL),
    audio=_fields("id"),
    thinking_blocks=Records(Kinds({"thinking": _THOUGHT, "redacted_thinking": _REDACTED})),
    reasoning_items=Records(Kinds({"reasoning": _SEALED_REASONING})),
    provider_specific_fields=_provider_fields,
)

# Fields of vLLM and SGLang for continuing a message. They change what the answer is, and pass to
# such servers alone, since others refuse them.
CONTINUING: Final = ("continue_final_message", "add_generation_prompt")
CONTINUERS: Final = frozenset({"openai", "hosted_vllm", "litellm_proxy"})

# ---------------------------------------------------------------- Responses

_FILE_RULES: Final[Mapping[str, Rule]] = {
    "image_url": check_url,
    "file_url": check_url,
    "file_data": check_data,
    "file_id": _no_files,
}
_PARTS: Final = {
    "input_text": _fields("type text prompt_cache_breakpoint"),
    "output_text": _fields("type text annotations logprobs"),
    "text": _fields("type text"),
    "refusal": _fields("type refusal"),
    "input_image": _fields("type image_url file_id detail prompt_cache_breakpoint", **_FILE_RULES),
    "input_file": _fields(
        "type file_data file_url file_id filename detail prompt_cache_breakpoint", **_FILE_RULES
    ),
    "input_audio": _fields("type input_audio!", **_AUDIO),
    "computer_screenshot": _fields("type image_url file_id detail", **_FILE_RULES),
}
_SHOWN: Final = Kinds(_PARTS, is_strict=True)
_RESPONSES_TOOLS: Final[dict[str, Fields]] = {}  # filled below, since a namespace holds tools
_TOOLS: Final = Records(Kinds(_RESPONSES_TOOLS))
_RESPONSES_TOOLS.update(
    {
        "function": _fields(
            "type name description parameters strict defer_loading allowed_callers output_schema"
        ),
        "custom": _fields("type name description format defer_loading allowed_callers"),
        "namespace": _fields("type name description tools!", tools=_TOOLS),
        "tool_search": _fields("type description execution parameters"),
        "web_search": _fields("type filters search_context_size user_location"),
        "web_search_preview": _fields(
            "type search_content_types search_context_size user_location"
        ),
        "computer": _fields("type"),
        "computer_use_preview": _fields("type display_height display_width environment"),
        "code_interpreter": _fields("type container! allowed_callers", container=_auto),
        "image_generation": _fields(  # without `model`
            "type action background input_fidelity moderation output_compression output_format "
            "partial_images quality size"
        ),
        "local_shell": _fields("type"),
        "apply_patch": _fields("type allowed_callers"),
        "programmatic_tool_calling": _fields("type"),
    }
)


def _item(*names: str, unless: Rule | None = None, **rules: Rule) -> Fields:
    return _fields("type", *names, unless=unless, id=foreign_id, **rules)


_CALL: Final = "id call_id status caller name namespace"
RESPONSES_ITEMS: Final = {
    "message": _item("id role content! status phase", content=TextOr(Records(Kinds(_PARTS)))),
    "reasoning": _item("id summary content encrypted_content status", unless=is_our_reasoning),
    "function_call": _item(_CALL, "arguments"),
    "function_call_output": _item(_CALL, "output", output=TextOr(Records(_SHOWN))),
    "custom_tool_call": _item(_CALL, "input"),
    "custom_tool_call_output": _item(_CALL, "output", output=TextOr(Records(_SHOWN))),
    "tool_search_call": _item(_CALL, "arguments execution"),
    "tool_search_output": _item(
        _CALL, "tools execution", tools=Records(Kinds(_RESPONSES_TOOLS), may_be_empty=True)
    ),
    "additional_tools": _item("id role tools!", tools=_TOOLS),
    "computer_call": _item(_CALL, "action actions pending_safety_checks"),
    "computer_call_output": _item(_CALL, "output! acknowledged_safety_checks", output=_SHOWN),
    "web_search_call": _item("id status action"),
    "image_generation_call": _item("id status result"),
    "code_interpreter_call": _item("id status code container_id outputs"),
    "local_shell_call": _item(_CALL, "action"),
    "local_shell_call_output": _item(_CALL, "output"),
    "shell_call": _item(_CALL, "action environment"),
    "shell_call_output": _item(_CALL, "output max_output_length"),
    "apply_patch_call": _item(_CALL, "operation"),
    "apply_patch_call_output": _item(_CALL, "output"),
    "compaction": _item("id encrypted_content"),
    "compaction_trigger": _item(),
    "item_reference": _item("id"),
    "program": _item("id call_id code fingerprint"),
    "program_output": _item("id call_id result status"),
}

# ---------------------------------------------------------------- bodies

_OPENAI_SHARED: Final = (
    "model stream stream_options temperature top_p top_logprobs tools tool_choice store user "
    "parallel_tool_calls prompt_cache_key prompt_cache_retention prompt_cache_options "
    "safety_identifier service_tier"
)
_MESSAGES_COUNTED: Final = (
    "model messages! system tools tool_choice thinking cache_control context_management "
    "output_config output_format speed thread"
)
_MESSAGES_RULES: Final[Mapping[str, Rule]] = {
    "messages": Records(_MESSAGES_MESSAGE),
    "system": TextOr(_BLOCKS),
    "tools": Records(MESSAGES_TOOLS),
    "metadata": _fields("user_id", user_id=_text_only),
    "thread": _refused("send the whole conversation in messages", THREAD_UNSUPPORTED),
}
_RESPONSES_COUNTED: Final = (
    "model input instructions tools tool_choice reasoning text truncation parallel_tool_calls "
    "previous_response_id conversation prompt background"
)
_RESPONSES_RULES: Final[Mapping[str, Rule]] = {
    "input": TextOr(Records(Kinds(RESPONSES_ITEMS, untyped="item_reference"))),
    "tools": _TOOLS,
    "previous_response_id": foreign_id,
    "conversation": _refused("send the whole conversation in input"),
    "prompt": _refused("send the prompt's text itself"),
    "background": _refused("leave it out, or send false"),
}
_USERS: Final[Mapping[str, Rule]] = {"user": _text_only, "safety_identifier": _text_only}
BODY: Final[Mapping[str, Fields]] = {
    "chat": _fields(
        _OPENAI_SHARED,
        "messages! audio frequency_penalty function_call functions logit_bias logprobs max_tokens "
        "max_completion_tokens modalities n prediction presence_penalty reasoning_effort seed stop "
        "response_format verbosity web_search_options",
        messages=Records(_CHAT_MESSAGE),
        tools=Records(_CHAT_TOOLS),
        functions=Records(_FUNCTION),
        **_USERS,
    ),
    "completions": _fields(
        "model prompt stream stream_options temperature top_p best_of echo frequency_penalty "
        "logit_bias logprobs max_tokens n presence_penalty seed stop suffix user",
        **_USERS,
    ),
    "messages": _fields(
        _MESSAGES_COUNTED,
        "stream max_tokens metadata stop_sequences temperature top_p top_k service_tier "
        "inference_geo",
        **_MESSAGES_RULES,
    ),
    "messages_count": _fields(_MESSAGES_COUNTED, **_MESSAGES_RULES),
    "responses": _fields(
        _OPENAI_SHARED,
        _RESPONSES_COUNTED,
        "include max_output_tokens max_tool_calls context_management",
        **_RESPONSES_RULES,
        **_USERS,
    ),
    "responses_count": _fields(_RESPONSES_COUNTED, **_RESPONSES_RULES),
    "embeddings": _fields("model input dimensions encoding_format user", **_USERS),
}
