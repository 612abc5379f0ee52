"""Renders messages to text with a model's chat template, for prompts and for probes.

Does not touch MLX.
"""

import logging
import secrets
from collections.abc import Sequence
from typing import Any, Final

import jinja2

from hearth.shared.errors import StartError
from hearth.worker.prompt import bounded_templates  # noqa: F401  before any template is compiled

log = logging.getLogger(__name__)

_PROBE: Final = "probe0x"
_PROBED: Final = [{"role": "user", "content": _PROBE}]
_TOOL: Final = {
    "type": "function",
    "function": {"name": "probe1x", "description": "", "parameters": {"type": "object"}},
}
SYSTEM_LINE: Final = "the last line of the system message"  # used as a variable's name
_UNDEFINED: Final = jinja2.Undefined(name="enable_thinking")


class Template:
    """The chat template of one tokenizer, or a plain transcript if the tokenizer has none.

    Immutable: any thread may use a template, once the model is loaded.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take mlx-lm's TokenizerWrapper."""
        self._tokenizer = tokenizer
        self.exists = bool(tokenizer.has_chat_template)
        self._takes_parts = self._takes_xml_tools = self.takes_any_variable = False
        self.counts_tools = False  # whether the template refuses None for tools, and wants a list
        self.counts_tools = not self.probed(_PROBED)
        if _PROBE not in self.probed(_PROBED):
            # Some vision models' templates show content only as parts, and not as a string.
            self._takes_parts = True
            self._takes_parts = _PROBE in self.probed(_PROBED)
        # A template that is a Python function refuses variables that it does not know.
        self.takes_any_variable = bool(self.probed(_PROBED, probevariable=True))
        if "probe1x" not in self.probed(_PROBED, [_TOOL]):  # SmolLM3's variables differ
            self._takes_xml_tools = "probe1x" in self.probed(_PROBED, xml_tools=[_TOOL["function"]])

    @property
    def think_tags(self) -> tuple[str, str]:
        """The texts around thinking, "" if the tokenizer has no such tags."""
        return self._tokenizer.think_start or "", self._tokenizer.think_end or ""

    def text(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any],
        variables: dict[str, Any],
        adds_header: bool = True,
    ) -> str:
        """Return the rendered messages, with the generation prompt if `adds_header`.

        A template is a program and may raise any exception.
        """
        flat = [_flat(message) for message in messages]
        if not self.exists:
            lines = [f"{message['role']}: {message['content']}\n" for message in flat]
            return "".join(lines) + ("assistant:" if adds_header else "")
        variables = dict(variables)
        if line := variables.pop(SYSTEM_LINE, None):
            system = flat.pop(0) if flat and flat[0]["role"] == "system" else None
            content = f"{text_of(system)}\n{line}" if system is not None else line
            flat = [{**(system or {"role": "system"}), "content": content}, *flat]
        if self._takes_parts:
            flat = [{**message, "content": parts_of(message)} for message in flat]
        if self.takes_any_variable:  # else mlx-lm sets this, against the makers' default
            variables = {"enable_thinking": _UNDEFINED, **variables}
        if self._takes_xml_tools and tools:  # bare functions, as in the makers' model card
            variables = {"xml_tools": [tool["function"] for tool in tools], **variables}
        rendered: str = self._tokenizer.apply_chat_template(
            flat,
            tools=list(tools) or ([] if self.counts_tools else None),
            add_generation_prompt=adds_header,
            tokenize=False,
            **variables,
        )
        return rendered

    def text_to_continue(
        self, messages: list[dict[str, Any]], tools: Sequence[Any], variables: dict[str, Any]
    ) -> str:
        """Return the rendered messages up to the end of the last message's content.

        The result equals that of `continue_final_message` in transformers: if the template trims
        the content, the blanks at the end are left out. A template that is a function works too.

        Raises:
            ValueError: the template does not show the content exactly once. The template may also
                raise any other exception.
        """
        *other_parts, last = parts_of(messages[-1])
        content, end = last["text"], secrets.token_hex(16)
        part = text_part(f"{content}{end} ")
        marked = {**messages[-1], "content": [*other_parts, part] if other_parts else part["text"]}
        text = self.text([*messages[:-1], marked], tools, variables, adds_header=False)
        before, _, behind = text.partition(end)
        if text.count(end) != 1 or content.strip() not in before:
            raise ValueError("it does not show the last one once, as it is: it cannot be continued")
        return before if behind.startswith(" ") else before.rstrip()

    def probed(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] = (),
        adds_header: bool = True,
        **variables: Any,
    ) -> str:
        """Return the rendered probe, or "" if the template refuses such a conversation.

        Raises:
            StartError: the template does not end.
        """
        try:
            return self.text(messages, tools, variables, adds_header)
        except StartError:
            raise
        except Exception as error:  # such as "roles must alternate"
            log.debug("template probe refused: %s", error)
            return ""


def text_part(text: str) -> dict[str, str]:
    """Return `text` as a part of a message's content."""
    return {"type": "text", "text": text}


def parts_of(message: dict[str, Any]) -> list[dict[str, str]]:
    """Return the content as parts: texts, and images that have no mark yet."""
    content = message.get("content")
    return content if isinstance(content, list) else [text_part(content or "")]


def text_of(message: dict[str, Any]) -> str:
    """Return the content as one string, which all templates take, with each text on a new line."""
    return "\n".join(part["text"] for part in parts_of(message) if part["type"] == "text")


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message in the form that templates read.

    Templates differ in the fields that they read. So a call has its name and arguments beside
    `function` too, and thinking has three names. Empty fields are left out, because templates test
    for a field's presence.
    """
    flat = {**message, "content": message.get("content") or ""}
    if reasoning := message.get("reasoning_content"):
        flat |= {"thinking": reasoning, "reasoning": reasoning}
    if calls := message.get("tool_calls"):
        flat["tool_calls"] = [{**call, **call["function"]} for call in calls]
    else:
        flat.pop("tool_calls", None)
    return flat
