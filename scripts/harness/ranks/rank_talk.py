"""Leads one talk of fifteen requests with a server, so that two servers' answers can be compared.

Four turns, five forks of the first prompt, a return to the talk, four at once and, last, the talk
once more with a cold cache. Greedy, without streams.
"""

import hashlib
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

WAIT_S_MAX: Final = 120.0
TURNS: Final = 4
FORKS: Final = 5
AT_ONCE: Final = 4
RULES: Final = 120
REQUESTS: Final = TURNS + FORKS + 1 + AT_ONCE + 1

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class TalkRow:
    """What one request was answered."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    text: str  # thinking | content

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


def ask(url: str, messages: Sequence[Message], name: str = "", **fields: Any) -> TalkRow:
    """Return what a chat completion is answered.

    Raises:
        OSError: the server refused it, failed, or is not there.
    """
    body = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers=head
    )
    with urllib.request.urlopen(request, timeout=WAIT_S_MAX) as answer:
        told = json.load(answer)
    usage, said = told["usage"], told["choices"][0]["message"]
    return TalkRow(
        name,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        f"{said.get('reasoning_content') or ''}|{said.get('content') or ''}",
    )


def system_message(rules: int = RULES) -> Message:
    text = " ".join(f"Rule {i}: value {i * 37 % 101} belongs to item {i}." for i in range(rules))
    return {"role": "system", "content": f"You are a careful agent. {text}"}


def user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def errand(number: int, words: int) -> str:
    """Return words that no other number gives: random weights barely notice a changed digit."""
    told = ("open", "close", "read", "write", "move", "count", "sort", "find", "drop", "keep")
    return " ".join(told[(number * 3 + word * (number + 1)) % len(told)] for word in range(words))


def led_talk(url: str, rules: int = RULES) -> list[TalkRow]:
    """Lead the whole talk; return its rows, the cold twin of the return last.

    `rules` is how many sentences the system prompt has, of some 17 tokens each.
    """
    system = system_message(rules)
    talk = [system, user_message("Read the first file.")]
    rows = []
    for turn in range(TURNS):
        rows.append(ask(url, talk, f"turn {turn}"))
        said = rows[-1].text.partition("|")[2] or "ok"
        result = " ".join(f"line {line}" for line in range(60))
        talk += [{"role": "assistant", "content": said}, user_message(f"Result {turn}: {result}")]
    for fork in range(FORKS):
        task = user_message(f"Sub task {fork}: {errand(fork, 30)}")
        rows.append(ask(url, [system, task], f"fork {fork}"))
    rows.append(ask(url, talk, "return"))
    rows += at_once(url, system)
    rows.append(ask(url, talk, "cold twin", use_kv_cache=False))
    assert len(rows) == REQUESTS
    return rows


def at_once(url: str, system: Message) -> list[TalkRow]:
    """Ask four at the same time, which a worker decodes in one batch."""

    def one(number: int) -> TalkRow:
        text = f"Parallel {number}: {errand(FORKS + number, 20 + 5 * number)}"
        talk = [system, user_message(text)]
        return ask(url, talk, f"parallel {number}", max_tokens=40)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(AT_ONCE)))


def talk_differences(lone: Sequence[TalkRow], ranked: Sequence[TalkRow]) -> list[str]:
    """Return in words what two talks differ by; nothing where they are equal."""
    found = []
    for one, other in zip(lone, ranked, strict=True):
        if one.text != other.text:
            found.append(f"{one.name}: answers differ")
        if (one.prompt_tokens, one.cached_tokens) != (other.prompt_tokens, other.cached_tokens):
            found.append(
                f"{one.name}: {one.cached_tokens} of {one.prompt_tokens} tokens were cached, "
                f"{other.cached_tokens} of {other.prompt_tokens} on ranks"
            )
    return found


def is_twin_equal(rows: Sequence[TalkRow]) -> bool:
    """Tell whether the cold twin was answered as the return to the talk was, from the cache."""
    by_name = {row.name: row for row in rows}
    return by_name["return"].text == by_name["cold twin"].text
