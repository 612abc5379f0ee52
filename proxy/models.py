"""Which model names this server answers to."""

import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from shared.config import Settings
from shared.errors import RequestError, StartError
from shared.wire import ModelFacts


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The public name, its aliases, and patterns that stand for it too."""

    public: str
    aliases: tuple[str, ...]
    patterns: tuple[str, ...]
    since: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, settings: Settings) -> "ModelNames":
        """Return the names that `settings` give.

        Raises:
            StartError: the public name has characters that LiteLLM's headers cannot carry.
        """
        name = settings.model_name
        if not (name.isascii() and name.isprintable()):
            raise StartError(
                f"The model's public name {name!r} is not plain ASCII. Set PROXY_MODEL_ID to a "
                "name that is; MODEL_ALIASES may hold the other."
            )
        return cls(settings.model_name, settings.model_aliases, settings.catch_all_models)

    @property
    def listed(self) -> list[str]:
        return list(dict.fromkeys((self.public, *self.aliases)))

    def knows(self, name: str) -> bool:
        return name in self.listed or any(fnmatchcase(name, row) for row in self.patterns)

    def check(self, name: Any) -> str:
        """Return `name` where this server answers to it.

        Raises:
            RequestError: it is missing (400), or not served here (404).
        """
        if not isinstance(name, str) or not name:
            raise RequestError(
                f'model is {name!r:.60}; name one, for example "{self.public}".',
                code="missing_model",
                param="model",
            )
        if not self.knows(name):
            served = ", ".join((*self.listed, *self.patterns))
            raise RequestError(
                f"The model {name!r:.200} is not served here. Served: {served}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return name

    def rows(self, facts: ModelFacts | None) -> list[dict[str, Any]]:
        """Return the entries of /v1/models, in a shape that OpenAI's and Anthropic's SDKs read."""
        return [self.row(name, facts) for name in self.listed]

    def row(self, name: str, facts: ModelFacts | None) -> dict[str, Any]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.since))
        row: dict[str, Any] = {
            "id": name,
            "object": "model",
            "type": "model",
            "created": self.since,
            "created_at": stamp,
            "owned_by": "hearth",
            "display_name": name,
        }
        if facts is None:
            return row
        return row | {
            "context_length": facts.context_tokens,
            "max_model_len": facts.context_tokens,
            "meta": {
                "n_ctx_train": facts.context_tokens,
                "n_vocab": facts.vocab_size,
                "n_params": facts.parameter_count,
                "size": facts.weight_bytes,
                "architecture": facts.architecture,
                "cache_layout": facts.cache_layout,
                "backend": facts.backend,
            },
        }
