"""Holds one parsed request, from the parser to the module that answers it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from hearth.shared.wire_messages import Constraints, Prompt, Sampling

LiteLLMDialect = Literal["chat", "completions", "messages", "responses"]  # dialects of LiteLLM, too
Dialect = Literal[LiteLLMDialect, "ollama_chat", "ollama_generate"]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client's request, with its options as typed fields.

    `body` is the client's JSON, for answers that repeat its fields.
    """

    dialect: Dialect
    model: str  # name that the client gave
    prompt: Prompt
    sampling: Sampling
    stream: bool
    body: dict[str, Any]
    include_usage: bool = False  # for streamed chat only
    left_out: tuple[str, ...] = ()  # types of tools and content that this server has no use for
    constraints: Constraints = field(default_factory=Constraints)
    choices: int = 1  # answers wanted for each prompt
    more_prompts: tuple[Prompt, ...] = ()  # further raw prompts, each answered like `prompt`
    target: str = ""  # public name of the model that answers; "" = the only model
    adapter: str = ""  # LoRA adapter that the model uses; "" = none
    use_kv_cache: bool = True  # False = no kept KV is read, and none is kept
    prefill_only: bool = False  # the prompt is prefilled, without an answer
    pin: bool = False  # the prompt's kept KV stays until it is unpinned
    prediction: str = ""  # the client's guess of the answer's text; no part of the prompt
    is_repeat: bool = False  # a further choice, whose prompt is not counted again

    @property
    def served_as(self) -> str:
        """Return the name of the adapter or else the model that answers; "" = the only model."""
        return self.adapter or self.target

    @property
    def is_stored(self) -> bool:
        """Return whether the response is kept, by default only if the cache is used."""
        store = self.body.get("store")
        return store is not False and (self.use_kv_cache or store is True)

    def submissions(self) -> "list[ParsedRequest]":
        """Return one request for each choice, all choices of the first prompt first.

        Each choice has its own seed, so that the choices differ and can be repeated.
        """
        assert self.choices >= 1, self.choices
        seed = self.sampling.seed
        seeds = [None if seed is None else (seed + index) % 2**64 for index in range(self.choices)]
        return [
            dataclasses.replace(
                self,
                prompt=prompt,
                sampling=dataclasses.replace(self.sampling, seed=own_seed)
                if index
                else self.sampling,
                is_repeat=index > 0,
            )
            for prompt in (self.prompt, *self.more_prompts)
            for index, own_seed in enumerate(seeds)
        ]
