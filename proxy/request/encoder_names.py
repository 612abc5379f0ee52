"""Finds whether a name in a request stands for EMBEDDING_MODEL or RERANK_MODEL."""

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from hearth.proxy.request.model_names import ModelNames, ServedModel
from hearth.shared.errors import RequestError, StartError
from hearth.shared.models.model_path import builtin_model
from hearth.shared.settings import Settings

EncoderKind = Literal["embeddings", "rerank"]

KINDS: Final[tuple[EncoderKind, ...]] = get_args(EncoderKind)
SETTINGS: Final[dict[EncoderKind, str]] = {
    "embeddings": "EMBEDDING_MODEL",
    "rerank": "RERANK_MODEL",
}
# Names in programs written for OpenAI or Cohere, accepted in addition to CATCH_ALL_MODELS.
USUAL_NAMES: Final[dict[EncoderKind, str]] = {
    "embeddings": "text-embedding-*",
    "rerank": "rerank-*",
}


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """The names of one model that embeds or ranks."""

    kind: EncoderKind
    path: str  # value of the setting
    names: ModelNames

    @property
    def public(self) -> str:
        return self.names.public

    def is_own(self, name: str) -> bool:
        """Return whether `name` is one of the model's own names, not only a match of a pattern."""
        return bool(self.names.find_exact(name) or self.names.find_loose(name))

    def check(self, name: Any) -> str:
        """Return `name`, or the model's own name if the request has none.

        Raises:
            RequestError: `name` is not a string (400), or not a name of this model (404).
        """
        name = self.names.name_or_default(name)
        if self.names.find(name) is None:
            raise RequestError(
                f"The model {name!r:.200} is not served at /v1/{self.kind}, which "
                f"{SETTINGS[self.kind]} answers: {self.public!r}. Name that, or leave model out; "
                "CATCH_ALL_MODELS may have a pattern of further names.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return name


def encoders_of(settings: Settings) -> dict[EncoderKind, EncoderNames]:
    """Return the names of the configured encoder models.

    Raises:
        StartError: a name cannot stand in a header, or is the name of a text model.
    """
    paths = {
        "embeddings": (settings.embedding_model, settings.embedding_name),
        "rerank": (settings.rerank_model, settings.rerank_name),
    }
    text_models = ModelNames.of(settings)
    encoders = {}
    for kind in KINDS:
        path, name = paths[kind]
        if not path:
            continue
        if not (name.isascii() and name.isprintable()):
            raise StartError(
                f"{SETTINGS[kind]} is {path!r}, whose name {name!r} is not plain ASCII. Rename "
                "the directory."
            )
        if name in text_models.listed:
            raise StartError(
                f"{SETTINGS[kind]} is {path!r}, and {name!r} is the name of a model that answers "
                "with text. Give that one another, as PROXY_MODEL_ID does."
            )
        patterns = (*settings.catch_all_models, USUAL_NAMES[kind])
        builtin = builtin_model(path)
        builtin_names = (
            () if builtin is None else (builtin.source, builtin.hub_id.rpartition("/")[2])
        )
        names = ModelNames(name, (*ServedModel(name, path).names[1:], *builtin_names), patterns)
        encoders[kind] = EncoderNames(kind, path, names)
    return encoders
