"""Generates constrained answers with random fixtures, and with random tokens without a model."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np

from hearth.shared.wire_messages import Constraints, Sampling
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.engine.decode.sampler import (
    SamplingDefaults,
    SamplingParams,
    make_sampling_params,
)
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.schedule.request_state import Request
from hearth.worker.setup.prompt_and_session_setup import end_ids_of
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures import checkpoint_files
from scripts.harness.model_families import Family
from scripts.harness.socketless_worker import Answer, Machine, loaded

QUESTION = "omega"
CLOSERS = ('"', "}", "]", "<", "\n", ")", "'", "|")


def end_ids(tokenizer: Any) -> frozenset[int]:
    return end_ids_of(tokenizer, {"eos_token_id": list(tokenizer.eos_token_ids)})


def constrainer_for(family: Family, tokenizer: Any = None, reader: Any = None) -> GrammarCompiler:
    """Return a constrainer for a family, or for another tokenizer that thinks as it does."""
    tokenizer = tokenizer or family.tokenizer
    reader = reader or family.reader
    return GrammarCompiler(
        tokenizer,
        checkpoint_files.VOCAB_SIZE,
        end_ids(tokenizer),
        Vocabulary(tokenizer).token_bytes,
        reader.grammar,
        reader.think_marks,
        reader.is_thinking_open,
    )


def tool(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name, "description": f"Does {name}."}
    return {
        "type": "function",
        "function": function if schema is None else function | {"parameters": schema},
    }


# ---------------------------------------------------------------- without a model


@dataclass
class Walk:
    """One answer, driven token by token through its guide."""

    guide: TokenMask
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)

    def allowed(self) -> set[int]:
        """Return the tokens that may come next."""
        logits = self.guide.process(
            mx.array(self.tokens, dtype=mx.int32), mx.zeros((1, checkpoint_files.VOCAB_SIZE))
        )
        assert not self.guide.failure, self.guide.failure
        return {int(n) for n in np.flatnonzero(np.array(logits[0]) == 0)}

    def takes(self, tokens: list[int]) -> bool:
        """Tell whether the tokens, and then the end of the turn, are an answer."""
        for token in tokens:
            if token not in self.allowed():
                return False
            self.tokens.append(token)
        return bool(self.ends & self.allowed())

    def roll(self, dice: random.Random, closers: frozenset[int], tokens_max: int) -> bool:
        """Draw an answer; return whether it ended. Closing tokens are likelier than others."""
        while len(self.tokens) < tokens_max:
            allowed = self.allowed()
            if self.ends & allowed:
                return True
            closing = closers & allowed
            self.tokens.append(
                dice.choice(sorted(closing if closing and dice.random() < 0.5 else allowed))
            )
        return False


def closers(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a string, a list, an object or a tag."""
    return frozenset(n for n in range(len(tokenizer)) if tokenizer.decode([n]).startswith(CLOSERS))


def walk(
    constrainer: GrammarCompiler,
    constraints: Constraints,
    tools: list[Any],
    opening: str = "",
) -> Walk:
    """Return an answer that has not begun."""
    guide = constrainer.token_mask(constraints, tools, opening, prompt_tokens=0)
    assert guide is not None
    return Walk(guide, constrainer.end_ids)


# ---------------------------------------------------------------- with a model


@dataclass
class Asked:
    """One request and what it was asked with."""

    answer: Answer
    opening: str
    guide: TokenMask | None
    tokenizer: Any

    @property
    def text(self) -> str:
        """What was written, marks included."""
        return str(self.tokenizer.decode(self.answer.request.sampled))

    @property
    def reason(self) -> str:
        return self.answer.reason


class GuidedMachine(Machine):
    """A fixture behind a family's tokenizer and template, whose answers are constrained."""

    def __init__(self, family: Family, fixture: str = "qwen3", **more: Any) -> None:
        tokenizer = family.tokenizer
        super().__init__(
            *(loaded(fixture, tiny=True), turn_marks(tokenizer), Vocabulary(tokenizer)),
            end_ids=end_ids(tokenizer),
            **more,
        )
        self.family = family
        self.constrainer = constrainer_for(family)

    def choose(self, request: Request) -> SamplingParams:
        return make_sampling_params(
            *(request.sampling, SamplingDefaults(), checkpoint_files.VOCAB_SIZE),
            *(request.prompt_tokens, request.guide),
        )

    def put(
        self,
        constraints: Constraints,
        tools: list[Any] | None = None,
        sampling: Sampling | None = None,
        tokens_max: int = 300,
        **options: Any,
    ) -> Asked:
        """Hand a question in; raises RequestError where it cannot be constrained so."""
        text = self.family.render([{"role": "user", "content": QUESTION}], tools, **options)
        opening = text.rpartition(QUESTION)[2]
        ids = self.family.tokenizer.encode(text, add_special_tokens=False)
        guide = self.constrainer.token_mask(constraints, tools or [], opening, len(ids))
        answer = self.submit(
            *(ids, tokens_max),
            sampling=sampling or Sampling(temperature=1.0, seed=0),
            guide=guide,
        )
        return Asked(answer, opening, guide, self.family.tokenizer)

    def ask_one(self, *constraints: Any, **more: Any) -> Asked:
        """Return one question, answered."""
        asked = self.put(*constraints, **more)
        self.run()
        return asked


# ---------------------------------------------------------------- random schemas

Schema = dict[str, Any]
NAMES: Final = ("name", "count", "is_on", "tags", "ünï", "a b", "x/y", 'q"')


class Schemas:
    """Draws JSON schemas whose answers can end within a few hundred tokens."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def one(self) -> Schema:
        """Return an object's schema; one in twenty asks for what cannot be enforced."""
        schema = self._object(depth=0)
        if self._dice.random() < 0.3:
            schema["$defs"] = {"Shared": self._scalar()}
            schema["properties"]["shared"] = {"$ref": "#/$defs/Shared"}
            schema["required"].append("shared")
        if self._dice.random() < 0.05:
            name = self._dice.choice(list(schema["properties"]) or ["x"])
            schema["properties"][name] = {"not": {"type": "string"}}
        return schema

    def _object(self, depth: int) -> Schema:
        names = self._dice.sample(NAMES, self._dice.randint(0 if depth else 1, 4))
        return {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": [name for name in names if self._dice.random() < 0.7],
            "additionalProperties": False,
        }

    def _any(self, depth: int) -> Schema:
        kinds: list[Callable[[], Schema]] = [self._scalar] * 5
        if depth < 3:
            kinds += [
                lambda: self._array(depth),
                lambda: self._object(depth),
                lambda: {"anyOf": [self._any(depth + 1), {"type": "null"}]},
            ]
        return self._dice.choice(kinds)()

    def _array(self, depth: int) -> Schema:
        return {
            "type": "array",
            "items": self._any(depth + 1),
            "maxItems": self._dice.randint(1, 3),
            **({"minItems": 1} if self._dice.random() < 0.3 else {}),
        }

    def _scalar(self) -> Schema:
        dice = self._dice
        if dice.random() < 0.02:  # digits that a random model may never stop writing
            return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        low = dice.randint(-50, 50)
        return dice.choice(
            [
                {"type": "string", "maxLength": dice.randint(0, 12)},
                {"type": "string", "minLength": 2, "maxLength": 9},
                {"type": "string", "pattern": "^[a-c]{1,4}$"},
                {"type": "string", "format": dice.choice(["date", "uuid", "ipv4"])},
                {"type": "string"},
                {"enum": ["red", "gr\u00fcn", 'b"l\\ue', 7, None, True]},
                {"const": "exactly this"},
                {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 500)},
                {"type": "number", "minimum": -3, "maximum": 9, "multipleOf": 0.25},
                {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 3},
                {"type": ["boolean", "null"]},
                {"type": "boolean"},
            ]
        )
