"""Says what a model's name means in a LiteLLM config: its group, deployments and fallbacks.

LiteLLM's Router means the same by the same names; a test compares both. This needs no LiteLLM, so
local requests are answered while LiteLLM still imports. Two differences are meant. A bare name
never matches a pattern of a provider (`claude-x` is not `anthropic/*`), since a prompt would leave
the machine that its name does not send away. And what fills a star names a model and no place:
LiteLLM sends the key of `huggingface/*` to wherever a `huggingface/https://...` points. LiteLLM's
own order of weights, cooldowns and budgets among a group's deployments is not told here: its Router
chooses.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from hearth.proxy.gateway.config import config_secrets
from hearth.proxy.gateway.config.config_file import ConfigFile, readable_by_others
from hearth.proxy.gateway.config.fallback_lists import Cause, FallbackLists
from hearth.proxy.request.encoder_names import EncoderKind, encoders_of
from hearth.proxy.request.model_names import (
    ListedGroup,
    ServedModel,
    loose_name,
    loose_names,
    models_of,
)
from hearth.shared.dropped_settings import FORMER_MODEL
from hearth.shared.models.builtin_models import SMOLLM2, builtin_model
from hearth.shared.settings_from_env import Settings

__all__ = ["Cause", "Deployment", "RoutingTable", "read_table"]

PROVIDER: Final = "hearth"  # of local models, as litellm_params.model names them
_MODES: Final[dict[EncoderKind, str]] = {"embeddings": "embedding", "rerank": "rerank"}
_UNASKED: Final = {"disable_background_health_check": True}  # it would ask LiteLLM, not a worker
HEADER_CHARS: Final = re.compile(r"[^\x20-\x7e]")
# What a client may fill a star with: LiteLLM makes URLs of it, and several models of a list.
_MODEL_NAME: Final = re.compile(r"(?!.*://)(?!(?:.*/)?\.\.?(?:/|$))[A-Za-z0-9_.:@/+~\[\]-]+")
_OTHER_CHECKS: Final = ("custom_auth", "enable_jwt_auth", "enable_oauth2_auth")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One place where a group's requests may be answered."""

    id: str  # LiteLLM's model_info.id
    group: str  # the name that a request to LiteLLM's app has to have
    model: str  # litellm_params.model, such as openai/gpt-4o
    local: str = ""  # public name of the local model that it is; "" = not local
    provider: str = ""  # custom_llm_provider, where the model's name has no provider in it


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A model_name with stars in it, and where it leads."""

    name: str
    regex: re.Pattern[str]
    deployments: tuple[Deployment, ...]

    def filled(self, name: str) -> tuple[Deployment, ...]:
        """Return the deployments for `name`: its own part stands for the stars of models."""
        match = self.regex.match(name)
        if match is None or not _MODEL_NAME.fullmatch(name):
            return ()
        return tuple(
            Deployment(row.id, name, _filled(row.model, match), row.local, row.provider)
            for row in self.deployments
        )


class RoutingTable:
    """What the names of one config mean. A value that nobody changes after `read_table`."""

    def __init__(self, config: ConfigFile, settings: Settings, environ: Mapping[str, str]) -> None:
        """Raises: StartError: an entry cannot be what its user meant."""
        self.config = config
        self.variables = config_secrets.variables_of(config)  # that the config refers to
        given = {name: text for name in self.variables if (text := config.given.get(name))}
        self.environ = {**given, **environ}  # what LiteLLM is to see
        self.secrets = config_secrets.secrets_of(config, self.environ)
        self._locals = local_names(settings)
        self.entries = self._entries(settings)
        self._groups: dict[str, tuple[Deployment, ...]] = {}
        stars: dict[str, tuple[Deployment, ...]] = {}
        for row in map(self._deployment, self.entries):
            groups = stars if "*" in row.group else self._groups
            groups[row.group] = (*groups.get(row.group, ()), row)
        self._patterns = _ordered(stars)
        self._pattern_names = tuple(stars)
        self._aliases, hidden = self._read_aliases()
        self._loose = loose_names({name: name for name in (*self._groups, *self._aliases)})
        self.has_master_key = self._has_master_key()
        others = map(config.section("general_settings").get, _OTHER_CHECKS)
        self.checks_keys = self.has_master_key or any(others)
        self._fallbacks = FallbackLists(config, self._is_known, self._may_fail)
        shown = (name for name in self._aliases if name not in hidden)
        self._names = [*self._groups, *filter(self.exact_group, shown)]

    @property
    def fallbacks_max(self) -> int:
        """How many fallbacks one request may take."""
        return self._fallbacks.steps_max

    @property
    def has_fallbacks(self) -> bool:
        return self._fallbacks.has_any

    def redacted(self, text: str) -> str:
        """Return `text` without the secrets of the config."""
        return self.secrets.redacted(text)

    def group_of(self, name: str) -> str | None:
        """Return the group that `name` means in the config alone: exact names, then patterns."""
        return self.exact_group(name) or self.pattern_group(name)

    def exact_group(self, name: str) -> str | None:
        """Return the group that `name` means as an alias or as a model_name without stars."""
        group = self._aliases.get(name, name)
        is_group = group in self._groups or (name in self._aliases and self._filled(group))
        return group if is_group else None

    def loose_group(self, name: str) -> str | None:
        """Return what `exact_group` does for `name` without case and without `:latest`."""
        meant = self._loose.get(loose_name(name))
        return None if meant is None else self.exact_group(meant)

    def pattern_group(self, name: str) -> str | None:
        """Return `name` where a model_name with stars takes it; it is a group of its own then."""
        return name if name not in self._aliases and self._filled(name) else None

    def deployments(self, group: str) -> tuple[Deployment, ...]:
        """Return the deployments of a `group` that one of the three methods above returned."""
        return self._groups.get(group) or self._filled(group)

    @property
    def listed(self) -> dict[str, ListedGroup]:
        """The names that the list of models has, and who answers to each."""
        return {name: self._listed_group(name) for name in self._names}

    def _listed_group(self, name: str) -> ListedGroup:
        rows = self.deployments(self._aliases.get(name, name))
        local = next((row.local for row in rows if row.local), None)
        owner = PROVIDER if local is not None else self.served_by(rows[0]).partition("/")[0]
        return ListedGroup(owner, local)

    @property
    def all_deployments(self) -> tuple[Deployment, ...]:
        """Every deployment of the list, those with stars in their names as they stand there."""
        groups = (*self._groups.values(), *(row.deployments for row in self._patterns))
        return tuple(row for rows in groups for row in rows)

    def deployment(self, group: str, deployment_id: str) -> Deployment | None:
        found = (row for row in self.deployments(group) if row.id == deployment_id)
        return next(found, None)

    def fallbacks(self, group: str, cause: Cause) -> tuple[str, ...]:
        """Return the names to try after `group` failed for `cause`, in order.

        They are names as a request may have them: local ones and aliases too.
        """
        provider, _, rest = group.partition("/")
        is_provider = any(row.model.startswith(f"{provider}/") for row in self.deployments(group))
        return self._fallbacks.after((group, rest) if rest and is_provider else (group,), cause)

    def served_by(self, deployment: Deployment) -> str:
        """Return `<provider>/<model>` of a deployment, fit for a header."""
        if deployment.local:
            told = f"{PROVIDER}/{deployment.local}"
        elif deployment.provider and not deployment.model.startswith(f"{deployment.provider}/"):
            told = f"{deployment.provider}/{deployment.model}"
        else:
            told = deployment.model
        return self.redacted(HEADER_CHARS.sub("?", told))

    def _is_known(self, name: str) -> bool:
        return name in self._locals or self.group_of(name) is not None

    def _may_fail(self, name: str) -> bool:
        """Tell whether `fallbacks` looks for `name`: a group, or one without its provider."""
        rests = (group.partition("/")[2] for group in (*self._groups, *self._pattern_names))
        return self._is_known(name) or any(rest in (name, "*") for rest in rests)

    def _filled(self, name: str) -> tuple[Deployment, ...]:
        """Return what the first pattern that takes `name` leads to."""
        for pattern in self._patterns:
            if rows := pattern.filled(name):
                return tuple(row for row in map(self._with_local, rows) if row is not None)
        return ()

    def _with_local(self, row: Deployment) -> Deployment | None:
        """Return `row` with the local model that it is; None where there is no such model."""
        if row.local or not row.model.startswith(f"{PROVIDER}/"):
            return row
        local = self._locals.get(row.model.removeprefix(f"{PROVIDER}/"), "")
        return Deployment(row.id, row.group, row.model, local) if local else None

    def _entries(self, settings: Settings) -> list[dict[str, Any]]:
        """Return the model_list with an id in each entry, and one for each local model at its end.

        Raises:
            StartError: an entry has no name or no model.
        """
        entries: list[dict[str, Any]] = []
        for index, row in enumerate(self.config.models):
            name, parameters = row.get("model_name"), row.get("litellm_params")
            if not isinstance(name, str) or not name:
                self._refuse(index, "has no model_name", "Add the name that clients send.")
            if not isinstance(parameters, dict) or not isinstance(parameters.get("model"), str):
                self._refuse(
                    index, f"({name}) has no litellm_params.model", "Add one, as openai/gpt-4o."
                )
            about = row.get("model_info") or {}
            if not isinstance(about, dict):
                self._refuse(index, f"({name}) has a model_info that is no mapping", "Correct it.")
            about = {"id": _stable_id(name, parameters, index)} | about
            if parameters["model"].startswith(f"{PROVIDER}/"):
                about = _UNASKED | about
            entries.append({**row, "model_info": about})
        named = {row["model_name"] for row in entries}
        adapters = (ServedModel(name) for name, _ in settings.adapters)
        for model in (*models_of(settings), *adapters):
            if model.name not in named:
                entries.append(_local_entry(model.name, "chat"))
        for kind, encoder in encoders_of(settings).items():
            if encoder.public not in named:
                entries.append(_local_entry(encoder.public, _MODES[kind]))
        return entries

    def _deployment(self, entry: dict[str, Any]) -> Deployment:
        """Raises: StartError: its model is a local one that is not served here, or not set."""
        parameters, group = entry["litellm_params"], entry["model_name"]
        model = self.config.resolved(parameters["model"])
        where = f"model_list entry {group!r}"
        if not model:
            self.config.refuse(
                where,
                f"has litellm_params.model {parameters['model']!r}, which is not set",
                "Set that variable, or name the model.",
            )
        local = ""
        if model.startswith(f"{PROVIDER}/") and not ("*" in model and "*" in group):
            local = self._locals.get(model.removeprefix(f"{PROVIDER}/"), "")
            if not local:
                served = ", ".join(f"{PROVIDER}/{name}" for name in dict.fromkeys(self._locals))
                self.config.refuse(
                    where,
                    f"has litellm_params.model {model!r}, and no such local model is served",
                    f"Served: {served}. Add it to MODELS, or correct the name.",
                )
        provider = parameters.get("custom_llm_provider") or ""
        return Deployment(str(entry["model_info"]["id"]), group, model, local, str(provider))

    def _read_aliases(self) -> tuple[dict[str, str], set[str]]:
        """Return the group that each alias means, and those that are not listed."""
        rows = self.config.section("router_settings").get("model_group_alias") or {}
        if not isinstance(rows, dict):
            self.config.refuse(
                "router_settings.model_group_alias", "is no mapping", "Write `alias: model_name`."
            )
        aliases, hidden = {}, set()
        for alias, meant in rows.items():
            group = meant.get("model") if isinstance(meant, dict) else meant
            if isinstance(meant, dict) and meant.get("hidden"):
                hidden.add(alias)
            if not isinstance(group, str) or not (group in self._groups or self._filled(group)):
                self.config.warn(
                    f"model_group_alias {alias!r}", f"means {group!r}, which no model_name is"
                )
                hidden.add(alias)
            aliases[str(alias)] = str(group)
        return aliases, hidden

    def _has_master_key(self) -> bool:
        general = self.config.section("general_settings")
        if "master_key" in general:  # LiteLLM does not look further then
            return bool(self.config.resolved(general["master_key"]))
        return bool(self.environ.get("LITELLM_MASTER_KEY"))

    def _refuse(self, index: int, what: str, remedy: str) -> NoReturn:
        self.config.refuse(f"model_list entry {index + 1}", what, remedy)


def read_table(
    path: Path, settings: Settings, environ: Mapping[str, str], in_file: Mapping[str, str]
) -> RoutingTable:
    """Return the table of the config at `path`.

    `in_file` are the variables of the .env file, which the config may refer to as os.environ/NAME.

    Raises:
        StartError: the config cannot be used, or does not go with the settings.
    """
    config = ConfigFile(path, {**in_file, **environ})
    table = RoutingTable(config, settings, environ)
    if not config.models:
        config.warn("model_list", "is not there or empty, so local models alone are served")
    for name in sorted(table.variables - config.given.keys()):
        config.warn(f"os.environ/{name}", "is set neither in the environment nor in .env")
    if table.checks_keys and settings.api_keys:
        config.refuse(
            "it",
            "has LiteLLM check keys (general_settings.master_key or custom_auth, or the variable "
            "LITELLM_MASTER_KEY), and PROXY_API_KEY or PROXY_API_KEYS is set too",
            "Remove one of both, so that it is clear which keys count.",
        )
    if not settings.is_loopback and not settings.api_keys and not table.checks_keys:
        config.refuse(
            "general_settings",
            f"has no master_key, PROXY_API_KEY is empty, and others can reach PROXY_HOST "
            f"({settings.proxy_host})",
            "Set one of both keys, or PROXY_HOST=127.0.0.1.",
        )
    providers = config.section("litellm_settings").get("custom_provider_map") or []
    if any(isinstance(row, dict) and row.get("provider") == PROVIDER for row in providers):
        config.refuse(
            "litellm_settings.custom_provider_map",
            f"has the provider {PROVIDER!r}, which local models have",
            "Give yours another name.",
        )
    if config_secrets.holds_literal_secret(config) and readable_by_others(path):
        config.warn("it", "holds keys and other users can read it; chmod 600 keeps them yours")
    return table


def local_names(settings: Settings) -> dict[str, str]:
    """Return the public name of the local model that each name stands for, patterns left out.

    Their order is that of `ModelNames`: public names, adapters, aliases, then paths.
    """
    default, *others = models_of(settings)
    models = (ServedModel(default.name, settings.model_path), *others)
    found = {model.name: model.name for model in models}
    found |= {name: name for name, _ in settings.adapters}
    for alias in settings.model_aliases:
        found.setdefault(alias, default.name)
    for model in models:
        for name in model.names:
            found.setdefault(name, model.name)
    for encoder in encoders_of(settings).values():
        for name in (encoder.public, *encoder.names.aliases):
            found.setdefault(name, encoder.public)
    if builtin_model(settings.model_path) is SMOLLM2:
        found.setdefault(FORMER_MODEL, default.name)
    return found


def _local_entry(name: str, mode: str) -> dict[str, Any]:
    return {
        "model_name": name,
        "litellm_params": {"model": f"{PROVIDER}/{name}"},
        "model_info": {"id": f"{PROVIDER}-{name}", "mode": mode, **_UNASKED},
    }


def _stable_id(name: str, parameters: dict[str, Any], index: int) -> str:
    """Return an id that is the same at each start, and another for each entry."""
    text = json.dumps([index, name, parameters["model"], str(parameters.get("api_base"))])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _ordered(stars: dict[str, tuple[Deployment, ...]]) -> tuple[_Pattern, ...]:
    """Return the patterns in the order in which LiteLLM tries them: the longer regex first."""
    rows = [(re.escape(name).replace(r"\*", "(.*)"), name) for name in stars]
    rows.sort(key=lambda row: (len(row[0]), _complexity(row[0])), reverse=True)
    return tuple(_Pattern(name, re.compile(regex), stars[name]) for regex, name in rows)


def _complexity(regex: str) -> int:
    return sum(regex.count(char) for char in r"*+?\^$|()")


def _filled(model: str, match: re.Match[str]) -> str:
    """Return `model` with its stars filled by what `match` found, as LiteLLM fills them."""
    if "*" not in model:
        return model
    if len(match.groups()) > model.count("*"):
        return match.string
    for part in match.groups():
        model = model.replace("*", part, 1)
    return model
