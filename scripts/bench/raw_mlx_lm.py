"""Runs raw mlx-lm as a process that reads one JSON command a line and answers with one JSON line.

`servers.Raw` starts it and names the commands; each function `answer_*` here is one of them.
"""

import json
import random
import sys
import time
from typing import Any

import mlx_lm
from mlx_lm.generate import BatchGenerator

Row = dict[str, Any]


class Driver:
    """Answers commands about one model. Owner: the main thread, which also loads it."""

    def __init__(self, model_path: str) -> None:
        self._model, self._tokenizer = mlx_lm.load(model_path)

    def answer_hello(self) -> Row:
        """Say that the model is loaded."""
        return {}

    def answer_prompt(self, tokens: int, decode_tokens: int, seed: str) -> Row:
        """Give a question whose prompt has `tokens` tokens and that decodes to the full count."""
        attempt = 0
        while True:
            messages = self._question(tokens, random.Random(f"{seed} {attempt}"))
            generated = self.answer_stream(messages, decode_tokens)["completion_tokens"]
            if generated == decode_tokens:
                return {"messages": messages}
            attempt += 1

    def answer_stream(self, messages: list[Row], max_tokens: int, prefill_step: int = 2048) -> Row:
        """Time one `stream_generate`, from the messages on. 2,048 is mlx-lm's own default."""
        start = time.perf_counter()
        prompt, first, count = self._render(messages), None, 0
        for response in mlx_lm.stream_generate(
            self._model,
            self._tokenizer,
            prompt,
            max_tokens=max_tokens,
            prefill_step_size=prefill_step,
        ):
            count = response.generation_tokens
            if first is None and (response.text or response.finish_reason):
                first = time.perf_counter()
        assert first is not None, "stream_generate yielded nothing"
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "ttft_s": first - start,
            "decode_s": time.perf_counter() - first,
        }

    def answer_together(self, conversations: list[list[Row]], max_tokens: int) -> Row:
        """Time one batch, from the messages on."""
        start, count = time.perf_counter(), 0
        generator = BatchGenerator(
            self._model, stop_tokens=[[token] for token in self._tokenizer.eos_token_ids]
        )
        prompts = [self._render(messages) for messages in conversations]
        generator.insert(prompts, [max_tokens] * len(prompts))
        while responses := generator.next_generated():
            count += len(responses)
        generator.close()
        return {"completion_tokens": count, "wall_s": time.perf_counter() - start}

    def _render(self, messages: list[Row]) -> list[int]:
        prompt: list[int] = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True
        )
        return prompt

    def _question(self, tokens: int, rng: random.Random) -> list[Row]:
        words: list[str] = []

        def messages() -> list[Row]:
            return [{"role": "user", "content": " ".join(words)}]

        while (missing := tokens - len(self._render(messages()))) > 0:
            words += [_word(rng) for _ in range(missing // 4 + 1)]
        while len(self._render(messages())) > tokens:
            words.pop()
        while len(self._render(messages())) < tokens:
            words.append("a")
        return messages()


def _word(rng: random.Random) -> str:
    syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
    return "".join(syllables)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever prints must not break the protocol
    driver = Driver(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(driver, "answer_" + command.pop("op"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
