"""Messages to token ids, through the model's own chat template.

Owner: the prompt thread, which alone uses the tokenizer after start. Touches no MLX.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from shared.errors import PromptTooLong, RequestError
from shared.wire import Prompt
from worker.prompt.cuts import TurnMarks

log = logging.getLogger(__name__)

# Arguments of the renderer itself: a client that could set them could bring its own template.
NOT_TEMPLATE_VARIABLES = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)
CHARACTERS_PER_TOKEN_MAX = 16  # text longer than this per token of context is refused unread


class Renderer:
    """Renders and tokenises prompts for one model.

    template_failures counts prompts that the template refused; what a template raises is about
    the request that it was given.
    """

    def __init__(self, tokenizer: Any, context_tokens: int, default_thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._default_thinking = default_thinking
        self.template_failures = 0

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids that the model is fed, generation prompt included.

        Raises:
            RequestError: the template refuses these messages, or they exceed the context.
        """
        text = self.text(prompt)
        characters_max = self._context_tokens * CHARACTERS_PER_TOKEN_MAX
        if len(text) > characters_max:
            raise RequestError(
                f"The prompt is {len(text):,} characters and this server's context is "
                f"{self._context_tokens:,} tokens (at most {characters_max:,} characters). "
                "Send less text.",
                code="context_length_exceeded",
                param="messages",
            )
        # A template writes its own beginning-of-text token; without one the tokenizer must.
        add_special = not self._tokenizer.has_chat_template
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special)
        if len(ids) >= self._context_tokens:
            raise PromptTooLong(tokens=len(ids), tokens_max=self._context_tokens - 1)
        if not ids:
            raise RequestError("The messages render to nothing. Send some text.", param="messages")
        return ids

    def text(self, prompt: Prompt) -> str:
        """Return the rendered prompt. Raises RequestError when the template refuses it."""
        messages = [_flat(message) for message in prompt.messages]
        if not self._tokenizer.has_chat_template:
            return _plain(messages)
        options = {"enable_thinking": self._default_thinking, **prompt.template_kwargs}
        if not_variables := sorted(options.keys() & NOT_TEMPLATE_VARIABLES):
            raise RequestError(
                f"chat_template_kwargs has {', '.join(not_variables)}, which a template cannot be "
                "given. Remove it.",
                param="chat_template_kwargs",
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages,
                tools=prompt.tools or None,
                add_generation_prompt=True,
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


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its content as one string: templates add strings."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return {**message, "content": content or ""}


def _plain(messages: list[dict[str, Any]]) -> str:
    """Return a transcript for models without a chat template."""
    lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(lines) + "assistant:"


def turn_marks(tokenizer: Any) -> TurnMarks:
    """Return how the tokenizer's template marks messages, found by rendering probes."""
    prompts = sorted(
        {p for thinking in (True, False) for p in _generation_prompt(tokenizer, thinking)}
    )
    special = _control_ids(tokenizer)
    ends = {*tokenizer.eos_token_ids, *_template_ends(tokenizer)}
    header_ids = {prompt[0] for prompt in prompts if prompt[0] in special}
    for role in ("system", "user", "assistant", "tool"):
        between = [token for token in _between(tokenizer, role) if token in special]
        if not header_ids.intersection(between):
            header_ids.update([token for token in between if token not in ends][:1])
    usable = [prompt for prompt in prompts if prompt[0] in header_ids]
    others = [_header(tokenizer, role, header_ids) for role in ("system", "user", "tool")]
    written = _header(tokenizer, "assistant", header_ids)
    return TurnMarks(frozenset(header_ids), _assistant_headers(usable, written, others))


def _assistant_headers(
    prompts: list[tuple[int, ...]], written: tuple[int, ...], others: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return what the model's own turns begin with, however they go on.

    Generation prompts with and without thinking, and the header of a turn in the history, share
    their first tokens: that one header stands for all, unless other messages begin so too.
    """
    known = [header for header in (*prompts, written) if header]
    shared = known[0] if known else ()
    for header in known:
        length = 0
        while length < min(len(shared), len(header)) and shared[length] == header[length]:
            length += 1
        shared = shared[:length]
    if shared and not any(other[: len(shared)] == shared for other in others):
        return (shared,)
    return tuple(prompts)


def _header(tokenizer: Any, role: str, header_ids: set[int]) -> tuple[int, ...]:
    """Return what the template writes in front of a `role` message's content."""
    between = list(_between(tokenizer, role))
    starts = [at for at, token in enumerate(between) if token in header_ids]
    return tuple(between[starts[-1] :]) if starts else ()


def end_of_turn_ids(tokenizer: Any, generation_config: dict[str, Any]) -> frozenset[int]:
    """Return every token that ends a turn: of the model, its generation config, its template."""
    configured = generation_config.get("eos_token_id")
    configured = configured if isinstance(configured, list) else [configured]
    ids = [*tokenizer.eos_token_ids, *configured, *_template_ends(tokenizer)]
    return frozenset(token for token in ids if isinstance(token, int))


def _template_ends(tokenizer: Any) -> list[int]:
    """Return the token that the template puts behind the answer that ends a conversation.

    Not what it puts between two messages: harmony ends a message of a turn, its reasoning for
    one, with <|end|>, and only the whole turn with <|return|>.
    """
    messages = [{"role": "user", "content": _FIRST}, {"role": "assistant", "content": _SECOND}]
    text = _probe(tokenizer, messages, add_generation_prompt=False)
    _, found, tail = text.partition(_SECOND)
    special = _control_ids(tokenizer)
    tail_ids = tokenizer.encode(tail, add_special_tokens=False) if found else []
    return [token for token in tail_ids if token in special][:1]


def _control_ids(tokenizer: Any) -> set[int]:
    """Return the tokens that no merge makes: what a template's marks are.

    `all_special_ids` alone has only those with a name of their own, such as eos_token.
    """
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


_FIRST, _SECOND = "alpha", "omega"  # words that no template writes by itself


def _generation_prompt(tokenizer: Any, thinking: bool) -> list[tuple[int, ...]]:
    """Return what the template puts in front of an answer, if it puts anything there."""
    closed = _after_question(tokenizer, thinking, False)
    opened = _after_question(tokenizer, thinking, True)
    if opened == closed:  # as Mistral's: the question's own end is what an answer follows
        special = _control_ids(tokenizer)
        between = _between(tokenizer, "assistant")
        starts = [at for at, token in enumerate(between) if token in special]
        return [tuple(between[starts[0] :])] if starts else []
    common = 0
    while common < min(len(closed), len(opened)) and closed[common] == opened[common]:
        common += 1
    return [tuple(opened[common:])] if common < len(opened) else []


def _after_question(tokenizer: Any, thinking: bool, add_generation_prompt: bool) -> list[int]:
    text = _probe(
        tokenizer,
        [{"role": "user", "content": _FIRST}],
        add_generation_prompt=add_generation_prompt,
        enable_thinking=thinking,
    )
    _, found, tail = text.partition(_FIRST)
    ids: list[int] = tokenizer.encode(tail, add_special_tokens=False) if found else []
    return ids


def _between(tokenizer: Any, role: str) -> Sequence[int]:
    """Return the tokens between the contents of a user's message and of a `role` message."""
    messages = [{"role": "user", "content": _FIRST}, {"role": role, "content": _SECOND}]
    text = _probe(tokenizer, messages, add_generation_prompt=False)
    _, _, rest = text.partition(_FIRST)
    inner, found, _ = rest.partition(_SECOND)
    between: list[int] = tokenizer.encode(inner, add_special_tokens=False) if found else []
    return between


def _probe(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return the rendered probe; "" where the template does not allow such a conversation."""
    if not tokenizer.has_chat_template:
        return ""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # e.g. "roles must alternate": then this probe says nothing
        log.debug("template probe refused: %s", error)
        return ""
    return text
