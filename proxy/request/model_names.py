"""Finds the model that a name in a request stands for, and lists the served names."""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, TypeVar

from hearth.shared.dropped_settings import FORMER_MODEL
from hearth.shared.errors import RequestError, StartError
from hearth.shared.machine import bytes_for_models
from hearth.shared.models.model_path import SMOLLM2, builtin_model, first_model_words
from hearth.shared.settings import Settings, public_name
from hearth.shared.wire_messages import ModelFacts

log = logging.getLogger(__name__)

V = TypeVar("V")

LATEST: Final = ":latest"  # tag that Ollama adds to a name without a tag
NAMES_SHOWN_MAX: Final = 40  # names in one error text


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a worker can be started with."""

    name: str  # public name
    path: str = ""  # directory or hub id; "" = the model of MODEL_PATH

    @property
    def environ(self) -> dict[str, str]:
        """Return environment variables that the model's worker gets besides the server's own."""
        if not self.path:
            return {}
        # The server's draft model and adapters fit only the default model.
        return {
            "MODEL_PATH": self.path,
            "PROXY_MODEL_ID": self.name,
            "DRAFT_MODEL": "",
            "ADAPTERS": "",
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests may use: public name, path, last part of the path."""
        last = Path(os.path.expanduser(self.path.removeprefix("builtin:"))).name
        return tuple(dict.fromkeys(name for name in (self.name, self.path, last) if name))


def models_of(settings: Settings) -> tuple[ServedModel, ...]:
    """Return every model of this server, the default one first.

    Raises:
        StartError: an entry of MODELS has no path, the name of another model, or a name that
            cannot stand in a header.
    """
    models = {settings.model_name: ServedModel(settings.model_name)}
    paths = {settings.model_name: settings.model_path}
    for entry in settings.models:
        # A path, a hub id, or name=path; the path may contain "=".
        name, is_named, path = (part.strip() for part in entry.partition("="))
        model = ServedModel(name, path)
        if not is_named or "/" in name or name.startswith((".", "~")):
            model = ServedModel(public_name(entry), entry)
        elif not (name and path):
            raise StartError(
                f"MODELS has {entry!r}; allowed is a directory or hub id, or name=directory or "
                "hub id."
            )
        if paths.setdefault(model.name, model.path) != model.path:
            raise StartError(
                f"MODELS has {entry!r}, and {model.name!r} is the name of "
                f"{paths[model.name]!r} already. Give it another, as in other-name={model.path}."
            )
        models.setdefault(model.name, model)
    for name in models:
        if not (name.isascii() and name.isprintable()):
            raise StartError(
                f"The model's public name {name!r} is not plain ASCII. Set PROXY_MODEL_ID to a "
                "name that is (in MODELS: name=path); MODEL_ALIASES may hold the other."
            )
    return tuple(models.values())


def sources_of(settings: Settings) -> list[str]:
    """Return each directory or hub id that this server loads, adapters included."""
    models = [settings.model_path, settings.draft_model]
    models += [settings.embedding_model, settings.rerank_model]
    models += [model.path for model in models_of(settings)]
    return [*filter(None, models), *(path for _, path in settings.adapters)]


def adapters_of(settings: Settings, others: Iterable[ServedModel]) -> tuple[str, ...]:
    """Return the names of the default model's adapters.

    Raises:
        StartError: an adapter has the name of a model.
    """
    names = [name for name, _ in settings.adapters]
    taken = {settings.model_name, *settings.model_aliases, *(model.name for model in others)}
    for name in names:
        if name in taken:
            raise StartError(
                f"ADAPTERS has {name!r}, which is the name of a model already. Give the adapter "
                "another."
            )
    return tuple(names)


def loose_name(name: str) -> str:
    """Return `name` in lower case and without Ollama's `:latest`."""
    return name.casefold().removesuffix(LATEST) or name


def _first_meanings(pairs: Iterable[tuple[str, V]]) -> dict[str, V]:
    """Return (name, meaning) pairs as a dict; the first pair of a name counts."""
    firsts: dict[str, V] = {}
    for name, meaning in pairs:
        firsts.setdefault(name, meaning)
    return firsts


def loose_names(known: Mapping[str, V]) -> dict[str, V]:
    """Return `known` by loose names; the first of equal loose names counts."""
    return _first_meanings((loose_name(name), meaning) for name, meaning in known.items())


# Kept for a moment: whether the warning was logged, nothing of a request
@functools.cache  # the warning is logged once
def _warn_former(former: str, public: str) -> None:
    log.warning("the model %r, which requests name, is gone: %r answers them", former, public)


def _lookup(name: str, known: Mapping[str, str]) -> str | None:
    """Return the meaning of `name`, or else of the longest known name at its end after a "/"."""
    if name not in known:
        ends = (known_name for known_name in known if name.endswith(f"/{known_name}"))
        name = max(ends, key=len, default=name)
    return known.get(name)


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """The model or provider behind a name in the list of models."""

    owner: str  # "hearth", or the provider
    local: str | None  # `target` of the local model; None = not local
    model_fields: Mapping[str, Any] = field(default_factory=dict)  # for models without text answers

    def facts(self, facts_of: Callable[[str], ModelFacts | None]) -> ModelFacts | None:
        return None if self.local is None else facts_of(self.local)


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that this server answers to.

    `public` is the default model's name; `aliases` and `patterns` stand for that model too.
    """

    public: str
    aliases: tuple[str, ...]
    patterns: tuple[str, ...]
    others: tuple[ServedModel, ...] = ()
    adapters: tuple[str, ...] = ()  # names of the default model's adapters
    former_name: str = ""  # former default model's name, accepted but not listed
    description: str = ""  # description of the default model in the list
    since: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, settings: Settings) -> "ModelNames":
        """Return the names that `settings` give.

        Raises:
            StartError: an entry of MODELS or ADAPTERS is invalid, or a name cannot be served.
        """
        _, *others = models_of(settings)
        is_first = builtin_model(settings.model_path) is SMOLLM2
        return cls(
            settings.model_name,
            settings.model_aliases,
            settings.catch_all_models,
            tuple(others),
            adapters_of(settings, others),
            FORMER_MODEL if is_first else "",
            first_model_words(bytes_for_models()) if is_first else "",
        )

    @property
    def models(self) -> list[str]:
        """Return the public names of all models, without aliases and adapters."""
        return [self.public, *(model.name for model in self.others)]

    @property
    def listed(self) -> list[str]:
        others = (model.name for model in self.others)
        return list(dict.fromkeys((self.public, *self.aliases, *self.adapters, *others)))

    def find(self, name: str) -> str | None:
        """Return the public name of the model or adapter that `name` stands for; None if unknown.

        Names are tried in this order: public names; aliases; paths and their last parts; all of
        these without case and `:latest`; the former model's name; patterns. The last two stand for
        the default model. A name may begin with a provider and "/".
        """
        return self.find_exact(name) or self.find_loose(name) or self.find_pattern(name)

    def find_exact(self, name: str) -> str | None:
        return _lookup(name, self.known())

    def find_loose(self, name: str) -> str | None:
        loose = loose_name(name)
        found = _lookup(loose, loose_names(self.known()))
        if found is None and self.former_name and loose.rpartition("/")[2] == self.former_name:
            _warn_former(self.former_name, self.public)
            return self.public
        return found

    def find_pattern(self, name: str) -> str | None:
        loose = loose_name(name)
        fits = (fnmatchcase(name, p) or fnmatchcase(loose, loose_name(p)) for p in self.patterns)
        return self.public if any(fits) else None

    def known(self) -> dict[str, str]:
        """Return the public name of each exact name."""
        public = ((name, name) for name in (*self.models, *self.adapters))
        aliases = ((name, self.public) for name in self.aliases)
        paths = ((name, model.name) for model in self.others for name in model.names)
        return _first_meanings((*public, *aliases, *paths))

    def target(self, name: str) -> str:
        """Return the model or adapter of a `name` that `check` returned; "" = the only model."""
        return (self.find(name) or self.public) if self.others or self.adapters else ""

    def adapter_of(self, target: str) -> str:
        """Return `target`, which comes from `self.target`, if it is an adapter; else ""."""
        return target if target in self.adapters else ""

    def model_of(self, target: str) -> str:
        """Return the model of `target`, which may be an adapter; "" = the only model."""
        if not self.others:
            return ""
        return self.public if target in self.adapters else target

    def name_or_default(self, name: Any) -> str:
        """Return `name`, or the default model's name if the request has none.

        Raises:
            RequestError: `name` is not a string.
        """
        if name is None or name == "":
            return self.public
        if not isinstance(name, str):
            raise RequestError(
                f"model is {name!r:.60}; name one as a text, for example {self.public!r}, or leave "
                "it out.",
                code="invalid_model",
                param="model",
            )
        return name

    def check(self, name: Any, more: Iterable[str] = ()) -> str:
        """Return `name`, or the default model's name, after a check that it is served.

        Raises:
            RequestError: `name` is not a string (400), or is not served (404; the error text also
                lists `more`).
        """
        name = self.name_or_default(name)
        if self.find(name) is None:
            raise self.unknown_name_error(name, more)
        return name

    def group(self, name: str, groups: Mapping[str, ListedGroup]) -> tuple[str, ListedGroup]:
        """Return the listed name for `name` and its group; `groups` win over local names.

        Raises:
            RequestError: `name` is not served.
        """
        if name not in groups and self.find_exact(name) is None:
            listed = loose_names(
                {listed_name: listed_name for listed_name in (*groups, *self.listed)}
            )
            name = listed.get(loose_name(name), name)
        if name in groups:
            return name, groups[name]
        target = self.target(self.check(name, groups))
        return self.adapter_of(target) or name, ListedGroup("hearth", target)

    def unknown_name_error(self, name: str, more: Iterable[str] = ()) -> RequestError:
        """Return the error for an unknown name; `more` are the names of a LiteLLM config."""
        names = list(dict.fromkeys((*self.listed, *more, *self.patterns)))
        served = ", ".join(names[:NAMES_SHOWN_MAX])
        if len(names) > NAMES_SHOWN_MAX:
            served += f" and {len(names) - NAMES_SHOWN_MAX} more, which GET /v1/models lists"
        return RequestError(
            f"The model {name!r:.200} is not served here. Served: {served}. To have it "
            "answered by the default model add it to MODEL_ALIASES, or set CATCH_ALL_MODELS=*.",
            status=404,
            code="model_not_found",
            param="model",
        )

    def listing(
        self,
        facts_of: Callable[[str], ModelFacts | None],
        more: Mapping[str, ListedGroup],
        *,
        is_anthropic: bool,
    ) -> dict[str, Any]:
        """Return the body of /v1/models, in Anthropic's or OpenAI's form.

        `facts_of` gives the known facts of a `target`; `more` has the names of a LiteLLM config.
        """
        own_groups = {name: ListedGroup("hearth", self.target(name)) for name in self.listed}
        # Models without text answers come last, as programs pick the first model for text.
        groups = sorted({**own_groups, **more}.items(), key=lambda item: bool(item[1].model_fields))
        entries = [
            self.model_entry(name, group.facts(facts_of), is_anthropic=is_anthropic, group=group)
            for name, group in groups
            if not (is_anthropic and group.model_fields)
        ]
        if not is_anthropic:
            return {"object": "list", "data": entries}
        first, last = entries[0]["id"], entries[-1]["id"]
        return {"data": entries, "has_more": False, "first_id": first, "last_id": last}

    def model_entry(
        self,
        name: str,
        facts: ModelFacts | None,
        *,
        is_anthropic: bool = False,
        group: ListedGroup | None = None,
    ) -> dict[str, Any]:
        """Return the entry of one name in the list of models.

        `facts` is None before a worker has loaded the model. A `group` adds its own fields.
        """
        if is_anthropic:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.since))
            entry: dict[str, Any] = {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": stamp,
                "lifecycle": "active",
            }
            tokens = facts.context_tokens if facts is not None else None
            return entry | {"max_input_tokens": tokens, "max_tokens": tokens}
        entry = {"id": name, "object": "model", "created": self.since, "owned_by": "hearth"}
        if group is not None:
            entry |= {"owned_by": group.owner, **group.model_fields}
        if name in self.adapters:  # a field of vLLM
            entry["parent"] = self.public
        if self.description and self.find_exact(name) == self.public:  # a field of OpenRouter
            entry["description"] = self.description
        if facts is None:
            return entry
        return entry | {
            "context_length": facts.context_tokens,
            "max_model_len": facts.context_tokens,
            "architecture": {
                "input_modalities": ["text", "image"] if facts.takes_images else ["text"],
                "output_modalities": ["text"],
            },
            "thinking": {
                "default": facts.thinking.default,
                "switch": facts.thinking.has_switch,
                "levels": facts.thinking.levels,
            },
            "meta": {
                "n_ctx_train": facts.model_tokens,
                "n_ctx": facts.context_tokens,
                "n_ctx_by": facts.context_by,
                "n_vocab": facts.vocab_size,
                "n_params": facts.parameter_count,
                "size": facts.weight_bytes,
                "architecture": facts.architecture,
                "cache_layout": facts.cache_layout,
                "backend": facts.backend,
                "computed_in": facts.computed_in,
            },
        }
