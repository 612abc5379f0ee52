"""Renders messages to text through the model's own chat template. Touches no MLX."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import ThinkingWish
from hearth.worker.prompt.adapt_messages import adapted
from hearth.worker.prompt.awaited_work import NobodyWaits
from hearth.worker.prompt.chat_template import Template
from hearth.worker.prompt.template_capabilities import template_capabilities
from hearth.worker.prompt.thinking_switches import thinking_switches
from hearth.worker.prompt.tools_as_text import OwnForm, ToolForm, markup

log = logging.getLogger(__name__)

_NO_WISH = ThinkingWish()
# Arguments of the renderer itself: a client that could set them could bring its own template.
NOT_TEMPLATE_VARIABLES = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. Immutable."""

    text: str
    runs: list[list[int]]  # those of AdaptedMessages


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
        shown = adapted(messages, tools, self.capabilities, adds_header)
        variables = self._variables(options, thinking)
        try:
            if continues:
                text = self._template.text_to_continue(shown.messages, shown.tools, variables)
            else:
                text = self._template.text(shown.messages, shown.tools, variables, adds_header)
        except NobodyWaits:
            raise
        except Exception as error:  # a template is a program; it raises whatever it likes
            self.template_failures += 1
            log.info("template refused count=%d %s", self.template_failures, type(error).__name__)
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return Rendered(text, shown.runs)

    def _variables(self, options: dict[str, Any], wish: ThinkingWish) -> dict[str, Any]:
        """Return the template's variables for a request's options and its wish about thinking."""
        if wish.on is None:
            wish = replace(wish, on=self._default_thinking)
        kept = {"preserve_thinking": self._preserve_thinking}
        given = kept | self.thinking.variables(wish) | options
        known = self.capabilities.variables
        if known is None:
            return given
        return {name: value for name, value in given.items() if name in known}
