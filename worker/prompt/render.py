"""Messages to text, through the model's own chat template.

Owner: the prompt thread, which alone uses the tokenizer after start. Touches no MLX.
"""

import hashlib
import inspect
import logging
from typing import Any

from transformers import PreTrainedTokenizerBase

from shared.errors import RequestError
from worker.prompt.marks import probed

log = logging.getLogger(__name__)

# Arguments of the renderer itself: a client that could set them could bring its own template.
NOT_TEMPLATE_VARIABLES = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


class Renderer:
    """Renders messages for one model.

    template_failures counts prompts that the template refused; what a template raises is about
    the request that it was given.
    """

    def __init__(self, tokenizer: Any, default_thinking: bool, preserve_thinking: bool) -> None:
        self._tokenizer = tokenizer
        # Templates that know `preserve_thinking` keep the thinking of turns whose tokens are not
        # known too; to others it is one variable more.
        self._options = {
            "enable_thinking": default_thinking,
            "preserve_thinking": preserve_thinking,
        }
        self.template_failures = 0
        self._places_system = self._takes_late_system()
        long_id, short_id = "call_0123456789abcdef", short_call_id("")
        self._shortens_ids = not self._accepts(long_id) and self._accepts(short_id)
        given = short_id if self._shortens_ids else long_id
        self._takes_text = self._accepts(given, arguments="so") or not self._accepts(given)
        self._folds_thinking = self._accepts(given, content="so") and not self._accepts(
            given, content="so", reasoning_content="why"
        )

    def _takes_late_system(self) -> bool:
        """Whether a system message in mid-conversation is rendered, and where it stands."""
        said = (("user", "q"), ("assistant", "alpha"), ("system", "omega"), ("user", "sigma"))
        messages = [{"role": role, "content": content} for role, content in said]
        text = probed(self._tokenizer, messages, add_generation_prompt=True)
        places = [text.find(content) for content in ("alpha", "omega", "sigma")]
        return -1 not in places and places == sorted(places)

    def _accepts(self, call_id: str, arguments: Any = None, **said: str) -> bool:
        """Whether the template takes a tool call with this id, said beside it what is said."""
        function = {"name": "f", "arguments": arguments or {}}
        call = {"id": call_id, "type": "function", "function": function}
        question = {"role": "user", "content": "q"}
        turn = {"role": "assistant", "content": "", **said, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call_id, "content": "r"}
        messages = [question, _flat(turn), result]
        return bool(probed(self._tokenizer, messages, add_generation_prompt=True))

    def text(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        options: dict[str, Any],
        adds_header: bool = True,
    ) -> str:
        """Return the rendered messages, with the generation prompt where `adds_header`.

        Raises:
            RequestError: the template refuses them.
        """
        messages = [_flat(self._suited(message, at)) for at, message in enumerate(messages)]
        if not self._tokenizer.has_chat_template:
            return _plain(messages, adds_header)
        options = self._options | options
        if not_variables := sorted(options.keys() & NOT_TEMPLATE_VARIABLES):
            raise RequestError(
                f"chat_template_kwargs has {', '.join(not_variables)}, which a template cannot be "
                "given. Remove it.",
                param="chat_template_kwargs",
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=adds_header,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template is a program; it raises whatever it likes
            self.template_failures += 1
            log.info("template refused count=%d %s", self.template_failures, type(error).__name__)
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return rendered

    def _suited(self, message: dict[str, Any], at: int) -> dict[str, Any]:
        """Return message `at` as this template takes it.

        A system message behind the first stays where it is, as a user's where the template knows
        no other: moved to the front, it would change the prompt from its first token on.
        Mistral's demands call ids of nine letters and digits; harmony's refuses words and thinking
        beside one call, and writes either as thinking.
        """
        if at and message["role"] == "system" and not self._places_system:
            return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        if self._shortens_ids and (given := message.get("tool_call_id")):
            message = {**message, "tool_call_id": short_call_id(given)}
        if not (calls := message.get("tool_calls")):
            return message
        if not self._takes_text:  # a broken call of long ago must not end the conversation
            calls = [_with_object(call) for call in calls]
            message = {**message, "tool_calls": calls}
        if self._shortens_ids:
            ids = (short_call_id(call.get("id") or "") for call in calls)
            message = {
                **message,
                "tool_calls": [{**call, "id": i} for call, i in zip(calls, ids, strict=True)],
            }
        content, reasoning = message.get("content"), message.get("reasoning_content")
        if self._folds_thinking and content and reasoning:
            message = {**message, "content": "", "reasoning_content": f"{reasoning}\n{content}"}
        return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with arguments that are an object: text that is none as its `input`."""
    function = call["function"]
    if isinstance(function["arguments"], dict):
        return call
    return {**call, "function": {**function, "arguments": {"input": function["arguments"]}}}


def short_call_id(call_id: str) -> str:
    """Return nine letters and digits that stand for `call_id`; itself where it is that."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its content as one string, which templates add to others.

    A call has its name and arguments beside `function` too, and thinking goes by three names:
    templates read any of them.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    flat = {**message, "content": content or ""}
    if reasoning := message.get("reasoning_content"):
        flat |= {"thinking": reasoning, "reasoning": reasoning}
    if calls := message.get("tool_calls"):
        flat["tool_calls"] = [{**call, **call["function"]} for call in calls]
    return flat


def _plain(messages: list[dict[str, Any]], adds_header: bool) -> str:
    """Return a transcript for models without a chat template."""
    lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(lines) + ("assistant:" if adds_header else "")
