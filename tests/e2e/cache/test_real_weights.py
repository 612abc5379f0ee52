"""A server over real weights, led through conversations: each of its answers is a cold one.

They go on, are edited, forked, asked again, asked three at once, and left amid an answer; twice a
worker is killed amid one, and once the server is started anew over its files. Answers are greedy.
What the server says that it read is read here without a cache, and each token must then be the
likeliest, so that a cold answer is the same. One that is less likely by under TIE_MAX is a tie.
HEARTH_EXAMPLES=200 asks for so many answers.
"""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import mlx.core as mx
import numpy as np
import pytest

from hearth.commands.stream_client import prompt_ids, send
from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.stream.detokenise import Vocabulary
from scripts.faults.load import KEYS, PATHS, Body, body_of
from scripts.faults.own_server import READY_S_MAX, OwnServer
from scripts.harness.warm.token_margins import COUNTED
from tests.helpers.models.real_weights import real_weights

ANSWERS: Final = int(os.environ.get("HEARTH_EXAMPLES", 12))
TIE_MAX: Final = 1e-3  # of a log probability: what float32 rounds in thirty layers is far less
TOKENS_MAX: Final = 16
MESSAGES_MAX: Final = 9  # of a conversation: the prompts stay short
CHATS_MAX: Final = 6
ANSWER_S_MAX: Final = 600.0
KEY: Final = {"authorization": f"Bearer {KEYS[0]}"}
STEPS: Final = ("on", "on", "on", "edit", "fork", "again", "leave", "three", "new")
WORDS: Final = ("river", "winter", "bread", "Paris", "engine", "garden", "1945", "doctor")
QUESTIONS: Final = (
    "What is the difference between a {} and a {}?",
    "Write a short story about a {}, a {} and a {}.",
    "Why does the {} need a {}? Explain it to a {} in three sentences, please.",
    "List five facts about {}, each with a number, and say which of them you doubt.",
)
BEFALL: Final = {0.25: "kill", 0.5: "restart", 0.75: "kill"}  # after that share of the answers


@dataclass(slots=True)
class Chat:
    """A conversation that ends with a question, and what was answered to that."""

    session: str
    messages: list[Body]
    said: str = ""


@dataclass(slots=True)
class Talks:
    """One run. Owner: the event loop."""

    server: OwnServer
    cold: LoadedModel
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    chats: list[Chat] = field(default_factory=list)
    off_max: float = 0.0  # of a log probability, warm from cold
    _ids: dict[bytes, int] = field(init=False)  # of tokens by their bytes

    def __post_init__(self) -> None:
        vocabulary, tokenizer = Vocabulary(self.cold.tokenizer), self.cold.tokenizer
        self.chats = [Chat("s0", [{"role": "user", "content": self._question()}])]
        self._ids = {vocabulary.token_bytes(n): n for n in range(tokenizer.vocab_size)}

    async def play(self, answers: int) -> None:
        """Start the server, and take steps until so many answers were held to cold ones."""
        await self.server.started()
        befall = {share * answers: what for share, what in BEFALL.items()}
        deck: list[str] = []
        timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
        async with aiohttp.ClientSession(self.server.url, timeout=timeout) as http:
            while self.counts["answers"] < answers:
                due = next((at for at in befall if at <= self.counts["answers"]), None)
                deck = deck or self.rng.sample(STEPS, len(STEPS))
                what = deck.pop() if due is None else befall.pop(due)
                self.counts[what] += 1
                await self._step(http, what)
                print(dict(self.counts), f"farthest {self.off_max:.1e}", flush=True)

    async def _step(self, http: aiohttp.ClientSession, what: str) -> None:
        chats = [self._changed(what), *(self._changed("on") for _ in range(2 * (what == "three")))]
        if what in ("leave", "kill"):
            task = asyncio.create_task(self._ask(http, chats[0], is_struck=True))
            await asyncio.sleep(2 * self.rng.random())
            if what == "leave":
                task.cancel()
            else:
                await self._kill()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert not isinstance(error, Exception), error
        elif what == "restart":
            self.server.stop()
            self.server.start()
        if not await self.server.until_ready(READY_S_MAX):
            pytest.fail(f"{what}: the server is not ready\n{self.server.log_tail()}")
        await asyncio.gather(*(self._ask(http, chat) for chat in chats))
        self.chats = [*self.chats, *chats][-CHATS_MAX:]

    async def _kill(self) -> None:
        """Kill the worker, and wait until another is started: till then the server seems ready."""
        killed = self.server.look()[1]
        killed.kill()
        async with asyncio.timeout(READY_S_MAX):
            while self.server.look()[1:] in ([], [killed]):
                await asyncio.sleep(0.05)

    def _changed(self, what: str) -> Chat:
        """Return what a client sends next of one of its conversations."""
        was, question = self.rng.choice(self.chats), {"role": "user", "content": self._question()}
        messages, session = [*was.messages], was.session
        if what == "new" or len(messages) >= MESSAGES_MAX:
            return Chat(f"s{self.rng.random()}", [question])
        if what == "edit":
            at = self.rng.randrange(len(messages))
            words = messages[at]["content"].split() or ["No."]
            words[self.rng.randrange(len(words))] = self.rng.choice(question["content"].split())
            messages[at] = messages[at] | {"content": " ".join(words)}
        elif what == "fork":
            users = [at for at, message in enumerate(messages) if message["role"] == "user"]
            messages[self.rng.choice(users) :] = [question]
            session += self.rng.choice(("", "f"))
        elif what != "again":
            messages += [{"role": "assistant", "content": was.said}, question]
        return Chat(session, messages, was.said)

    async def _ask(self, http: aiohttp.ClientSession, chat: Chat, is_struck: bool = False) -> None:
        """Have a conversation answered, and hold the answer to a cold one."""
        rows: list[Body] = []
        reasons: list[str] = []

        def take(data: str, now_s: float) -> None:
            for choice in json.loads(data).get("choices", ()) if data != "[DONE]" else ():
                rows.extend((choice.get("logprobs") or {}).get("content") or ())
                reasons.extend(filter(None, [choice.get("finish_reason")]))

        body = body_of("chat", "", TOKENS_MAX) | {"messages": chat.messages, "stream": True}
        body |= {"logprobs": True, "session_id": chat.session}
        body["stream_options"] = {"include_usage": True}
        outcome = await send(http, PATHS["chat"], "chat", body, KEY, on_event=take)
        ids = await prompt_ids(http, outcome.request_id, KEY)
        if ids is None or outcome.tokens is None:
            assert is_struck, outcome.error
            return
        chat.said = "".join(outcome.reading.text)
        self.counts.update(answers=1, prompt=len(ids), cached=outcome.tokens.cached)
        self._hold(ids, rows, reasons == ["stop"])

    def _hold(self, ids: list[int], rows: Sequence[Body], is_at_end: bool) -> None:
        """Read a prompt and its answer without a cache, and compare each token of that."""
        said = [self._ids[bytes(row["bytes"])] for row in rows]
        logits = self.cold.model(mx.array([ids + said]))[0, len(ids) - 1 :].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        for place, (token, row) in enumerate(zip(said, rows, strict=True)):
            margin = float(logprobs[place].max() - logprobs[place, token])
            off = abs(float(logprobs[place, token]) - row["logprob"])
            self.off_max = max(self.off_max, off)
            told = f"{row['token']!r} at {place}: {margin:.1e} less likely, {off:.1e} off"
            assert max(margin, off) < TIE_MAX, told
            if margin:
                COUNTED.ties.append(told)
        if is_at_end:
            assert int(logprobs[-1].argmax()) in self.cold.tokenizer.eos_token_ids
        COUNTED.answers += 1
        COUNTED.tokens += len(said)

    def _question(self) -> str:
        return self.rng.choice(QUESTIONS).format(*(self.rng.choice(WORDS) for _ in range(3)))


@pytest.mark.weights
def test_answers_with_real_weights_are_cold_ones_whatever_befalls() -> None:
    model = {"MODEL_PATH": str(real_weights("smollm2"))}
    server = OwnServer({**model, "PROXY_API_KEY": KEYS[0], "LOG_PROMPTS": "true"})
    talks = Talks(server, load_model(load_settings(model, None)), random.Random(1))
    try:
        asyncio.run(talks.play(ANSWERS))
    finally:
        server.close()
    assert talks.counts["cached"] > talks.counts["prompt"] / 2, talks.counts
