"""Gives the answers that drafting is measured on, in tokens of a real tokenizer.

Texts are tokenised by cl100k, which LiteLLM brings, with ChatML's marks and those of a call as
tokens of their own: so do Qwen's tokenizers, whose vocabulary began as cl100k's.
"""

import functools
import json
import random
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from hearth.proxy.request.content_pieces import text_of
from hearth.shared.settings_from_env import PROJECT_DIR
from hearth.worker.stream.answer_parts import ToolCall
from scripts.bench.drafts_replay import TokenAnswer
from scripts.harness import recorded_answers
from scripts.harness.captured_sessions import Exchange, load
from scripts.harness.recorded_answers import RecordedAnswer, RecordedSession, call_text

BEGIN: Final = "<|im_start|>"
END: Final = "<|im_end|>"
MARKS: Final = ("<|endoftext|>", BEGIN, END, "<tool_call>", "</tool_call>")
CL100K_FILE: Final = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"  # as LiteLLM names it
CL100K_WORDS: Final = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"""
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
TEMPLATES_DIR: Final = PROJECT_DIR / "scripts" / "harness" / "templates"
WORDS_OF: Final = re.compile(r" [A-Za-z]+")
PROSE_TOKENS: Final = 400
PROSE_ANSWERS: Final = 50


@functools.cache
def tokenizer() -> Tokenizer:
    """Return cl100k with the marks; made in 2 s."""
    found = find_spec("litellm")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent / "litellm_core_utils" / "tokenizers"
    file = str(folder / CL100K_FILE)
    converter = TikTokenConverter(file, CL100K_WORDS, extra_special_tokens=list(MARKS))
    made: Tokenizer = converter.converted()
    return made


@functools.cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return it with Qwen3's chat template, as a model's folder would bring it."""
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END)
    made.chat_template = (TEMPLATES_DIR / "qwen3.jinja").read_text()
    return made


@functools.lru_cache(maxsize=20_000)
def encode(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text).ids)


# ---------------------------------------------------------------- recorded answers


def token_answers(session: RecordedSession) -> Iterator[TokenAnswer]:
    """Yield a session's answers, each behind its whole conversation in ChatML."""
    begin, end = encode(BEGIN), encode(END + "\n")
    for answer in session.answers:
        prompt: list[int] = []
        for piece in answer.prompt:
            prompt += begin
            prompt += (token for text in piece for token in encode(text))
            prompt += end
        yield _token_answer([*prompt, *begin], answer)


def _token_answer(prompt: Sequence[int], answer: RecordedAnswer) -> TokenAnswer:
    tokens: list[int] = []
    kinds: list[str] = []
    for part in answer.parts:
        ids = encode(part.text)
        tokens += ids
        kinds += [part.kind] * len(ids)
    return TokenAnswer(prompt, [*tokens, *encode(END)], [*kinds, answer.parts[-1].kind])


# ---------------------------------------------------------------- calls of captured agents


def captured_calls(path: Path) -> Iterator[TokenAnswer]:
    """Yield the calls of a captured session, each once: what else was said there is a script's.

    Calls that the session made before, to the letter, are only in the prompts.
    """
    seen: set[str] = set()
    for exchange in load(path):
        calls = [_written(call, exchange.prompt.tools) for call in exchange.parts.calls]
        fresh = [call for call in calls if call not in seen]
        seen.update(calls)
        if fresh:
            yield _call_answer(exchange, "\n".join(fresh))


def _call_answer(exchange: Exchange, text: str) -> TokenAnswer:
    prompt: list[int] = []
    for piece in _rendered(exchange.prompt.messages, exchange.prompt.tools).split(END):
        prompt += (*encode(piece), *encode(END))
    tokens = (*encode(text), *encode(END))
    tools = tuple(exchange.prompt.tools)
    return TokenAnswer(prompt[:-1], tokens, ["call"] * len(tokens), tools)


def _rendered(messages: list[Any], tools: list[Any]) -> str:
    texts = [{**each, "content": text_of(each["content"])} for each in messages]
    text = chat_tokenizer().apply_chat_template(
        texts, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str)
    return text


def _written(call: ToolCall, tools: Sequence[Any]) -> str:
    """Return a call with its arguments in the schema's order, as models mostly write them."""
    schemas = (each["function"].get("parameters") for each in tools if _name(each) == call.name)
    order = list((next(schemas, None) or {}).get("properties") or {})
    arguments = json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments
    names = sorted(arguments, key=lambda name: order.index(name) if name in order else len(order))
    return call_text(call.name, {name: arguments[name] for name in names})


def _name(tool: dict[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


# ---------------------------------------------------------------- nothing to accept


def fresh_prose(seed: int = 1) -> Iterator[TokenAnswer]:
    """Yield answers of words drawn at random: nothing follows from anything before."""
    draws = random.Random(seed)
    words = [word for word in WORDS_OF.findall(_all_prose()) if len(encode(word)) == 1]
    for _ in range(PROSE_ANSWERS):
        prompt = [token for word in draws.choices(words, k=PROSE_TOKENS) for token in encode(word)]
        tokens = [token for word in draws.choices(words, k=PROSE_TOKENS) for token in encode(word)]
        yield TokenAnswer(prompt, tokens, ["prose"] * len(tokens))


def random_tokens(seed: int = 1) -> Iterator[TokenAnswer]:
    """Yield answers of tokens drawn evenly from a few: they repeat without any rule."""
    draws = random.Random(seed)
    few = draws.sample(range(100_000), 24)
    for _ in range(PROSE_ANSWERS):
        prompt = draws.choices(few, k=2_000)
        yield TokenAnswer(prompt, draws.choices(few, k=PROSE_TOKENS), ["random"] * PROSE_TOKENS)


def _all_prose() -> str:
    sessions = (session for sessions in recorded_answers.load().values() for session in sessions)
    answers = (answer for session in sessions for answer in session.answers)
    parts = (part for answer in answers for part in answer.parts)
    return " ".join(part.text for part in parts if part.kind in ("prose", "thought"))
