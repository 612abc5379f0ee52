"""Holds one request in our own types, from its parsing to the module that answers it.

A body is parsed once and submitted.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from hearth.shared.wire_messages import Constraints, Prompt, Sampling

CrossedDialect = Literal["chat", "completions", "messages", "responses"]  # LiteLLM has them too
Dialect = Literal[CrossedDialect, "ollama_chat", "ollama_generate"]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client's request in our own types; a value, which nobody changes.

    `body` is what the client sent, for answers that echo it.
    """

    dialect: Dialect
    model: str  # as the client named it
    prompt: Prompt
    sampling: Sampling
    stream: bool
    body: dict[str, Any]
    include_usage: bool = False  # streamed chat only
    left_out: tuple[str, ...] = ()  # types of tools and content that this server has no use for
    constraints: Constraints = field(default_factory=Constraints)
    choices: int = 1  # answers wanted to the same prompt
    more_prompts: tuple[Prompt, ...] = ()  # raw ones, each answered like `prompt`
    target: str = ""  # public name of the model that is to answer; "" = there is one only
    adapter: str = ""  # that it is to have; "" = none
    use_kv_cache: bool = True  # else nothing kept is read, and nothing of it is kept
    prefill_only: bool = False  # the prompt is read and nothing is answered
    pin: bool = False  # what is kept of the prompt stays until it is unpinned
    prediction: str = ""  # the client's guess of the answer's text; no part of the prompt
    is_repeat: bool = False  # a further choice: its prompt counts for the first

    @property
    def served_as(self) -> str:
        """Return the name of what answers: its adapter's, or its model's; "" = there is one."""
        return self.adapter or self.target

    @property
    def is_stored(self) -> bool:
        """Return whether its response is kept for later requests; by default, as the cache is."""
        store = self.body.get("store")
        return store is not False and (self.use_kv_cache or store is True)

    def submissions(self) -> "list[ParsedRequest]":
        """Return the request of each choice: all of the first prompt, then of the next.

        Each choice has a seed of its own, so that they differ and can be asked for again.
        """
        assert self.choices >= 1, self.choices
        seed = self.sampling.seed
        seeds = [None if seed is None else (seed + index) % 2**64 for index in range(self.choices)]
        return [
            dataclasses.replace(
                self,
                prompt=prompt,
                sampling=dataclasses.replace(self.sampling, seed=own) if index else self.sampling,
                is_repeat=index > 0,
            )
            for prompt in (self.prompt, *self.more_prompts)
            for index, own in enumerate(seeds)
        ]
