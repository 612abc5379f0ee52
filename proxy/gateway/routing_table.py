"""Resolves a model's name in a LiteLLM config to its group, deployments and fallbacks.

LiteLLM's Router resolves names alike; a test compares both. This module does not import LiteLLM, so
local requests are answered while LiteLLM still loads. Two differences are intended. A bare name
never matches a pattern of a provider (`claude-x` does not match `anthropic/*`), as the prompt would
leave the machine although the name does not say so. And a star matches no URL, since LiteLLM would
send the key of `huggingface/*` to the host in `huggingface/https://...`. LiteLLM's Router
chooses among the deployments of a group, by its weights, cooldowns and budgets.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from hearth.proxy.gateway.config_file import ConfigFile, leaves, secrets_of, variable_of
from hearth.proxy.request.encoder_names import EncoderKind, encoders_of
from hearth.proxy.request.model_names import (
    ListedGroup,
    ModelNames,
    ServedModel,
    loose_name,
    loose_names,
)
from hearth.shared.settings import Settings

Cause = Literal["error", "context_window", "content_policy"]

DEFAULT: Final = "default_fallbacks"
LISTS: Final[dict[Cause, str]] = {
    "error": "fallbacks",
    "context_window": "context_window_fallbacks",
    "content_policy": "content_policy_fallbacks",
}
_SHAPE: Final = "Write it as in `- gpt-4o: [claude, small]`."
STEPS_MAX: Final = 5  # LiteLLM's default for max_fallbacks


class FallbackLists:
    """Returns the names to try after a group failed. Immutable."""

    def __init__(self, config: ConfigFile, is_known: Callable[[str], bool]) -> None:
        """`is_known` says whether a fallback's name exists.

        Raises:
            StartError: a list has another shape, or parameters beside names.
        """
        self._config = config
        self._is_known = is_known
        self._names_by_cause = {cause: self._read(name) for cause, name in LISTS.items()}
        if default := self._names(DEFAULT, self._setting(DEFAULT)):
            self._names_by_cause["error"]["*"] = default
        self.has_any = any(self._names_by_cause["error"].values())
        steps = self._setting("max_fallbacks")
        self.steps_max = steps if isinstance(steps, int) else STEPS_MAX

    def after(self, names: tuple[str, ...], cause: Cause) -> tuple[str, ...]:
        """Return the fallbacks of the group that has `names`; the first is its full name.

        If the list for `cause` names none, the list `fallbacks` applies.
        """
        for listed_cause in (cause, "error"):
            by_name = self._names_by_cause[listed_cause]
            found = next((by_name[name] for name in (*names, "*") if name in by_name), ())
            if tried := tuple(name for name in found if name != names[0]):
                return tried
        return ()

    def _setting(self, name: str) -> Any:
        """Return the value of router_settings, or else of litellm_settings, as LiteLLM does."""
        router, settings = map(self._config.section, ("router_settings", "litellm_settings"))
        return router.get(name) or settings.get(name)

    def _read(self, name: str) -> dict[str, tuple[str, ...]]:
        """Return the names to try, by the name that failed."""
        fallbacks: dict[str, tuple[str, ...]] = {}
        for entry in self._config.list_of(name, self._setting(name)):
            if not isinstance(entry, dict) or len(entry) != 1:
                self._config.refuse(name, "has an entry that is no single `model_name`", _SHAPE)
            ((failed, names),) = entry.items()
            if failed == "*" or failed not in fallbacks:  # keep the last "*", else the first one
                fallbacks[str(failed)] = self._names(f"{name} of {failed!r}", names)
        return fallbacks

    def _names(self, where: str, value: Any) -> tuple[str, ...]:
        names = []
        for entry in self._config.list_of(where, value):
            beside = set(entry) - {"model"} if isinstance(entry, dict) else ()
            if beside:
                self._config.refuse(
                    where,
                    f"has parameters of its own ({', '.join(sorted(map(str, beside)))})",
                    "Make an entry of model_list that has them, and name that.",
                )
            name = entry.get("model") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or not name:
                self._config.refuse(where, "has an entry that is no name", _SHAPE)
            if self._is_known(name):
                names.append(name)
            else:
                self._config.warn(where, f"names {name!r}, which no model is; it is passed over")
        return tuple(names)


PROVIDER: Final = "hearth"  # the provider in litellm_params.model of local models
_MODES: Final[dict[EncoderKind, str]] = {"embeddings": "embedding", "rerank": "rerank"}
_UNASKED: Final = {"disable_background_health_check": True}  # the check would not reach a worker
HEADER_CHARS: Final = re.compile(r"[^\x20-\x7e]")
# Text that a star may match. LiteLLM makes URLs of it, and splits a list into several models.
_MODEL_NAME: Final = re.compile(r"(?!.*://)(?!(?:.*/)?\.\.?(?:/|$))[A-Za-z0-9_.:@/+~\[\]-]+")
_OTHER_CHECKS: Final = ("custom_auth", "enable_jwt_auth", "enable_oauth2_auth")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model of one provider that can answer a group's requests."""

    id: str  # LiteLLM's model_info.id
    group: str  # the model name for LiteLLM's app
    model: str  # litellm_params.model, such as openai/gpt-4o
    local: str = ""  # public name of the local model; "" = not local
    provider: str = ""  # custom_llm_provider, if the model's name has no provider in it


class RoutingTable:
    """Resolves the model names of one config. Immutable after `read_table`."""

    def __init__(self, config: ConfigFile, settings: Settings, environ: Mapping[str, str]) -> None:
        """Raises: StartError: an entry is unusable."""
        self.config = config
        named = (variable_of(value) for _, value in leaves(config.values))
        self.variables = frozenset(filter(None, named))  # variables that the config refers to
        given = {name: text for name in self.variables if (text := config.given.get(name))}
        self.environ = {**given, **environ}  # the environment for LiteLLM
        self.secrets = secrets_of(config, self.environ)
        self._locals = local_names(settings)
        self.entries = _entries(config, settings)
        self.all_deployments = tuple(map(self._deployment, self.entries))
        self._groups: dict[str, tuple[Deployment, ...]] = {}
        self._stars: dict[str, tuple[Deployment, ...]] = {}
        for entry in self.all_deployments:
            groups = self._stars if "*" in entry.group else self._groups
            groups[entry.group] = (*groups.get(entry.group, ()), entry)
        self._patterns = _patterns(self._stars)
        self._aliases, shown = self._read_aliases()
        self._loose = loose_names({name: name for name in (*self._groups, *self._aliases)})
        general = config.section("general_settings")
        master = self.environ.get("LITELLM_MASTER_KEY")
        # As in LiteLLM, a key in the config goes before the variable.
        self.has_master_key = bool(config.resolved(general.get("master_key", master)))
        self.checks_keys = self.has_master_key or any(map(general.get, _OTHER_CHECKS))
        self.fallback_lists = FallbackLists(config, self._is_known)
        # The names in the list of models, each with its owner.
        self.listed = {name: self._listed_group(name) for name in (*self._groups, *shown)}

    def group_of(self, name: str) -> str | None:
        """Return the group of `name` in the config alone: exact names, then patterns."""
        return self.exact_group(name) or self.pattern_group(name)

    def exact_group(self, name: str) -> str | None:
        """Return the group of `name`, an alias or a model_name without stars."""
        group = self._aliases.get(name, name)
        is_group = group in self._groups or (name in self._aliases and self._filled(group))
        return group if is_group else None

    def loose_group(self, name: str) -> str | None:
        """Return the `exact_group` of `name`, compared without case and without `:latest`."""
        meant = self._loose.get(loose_name(name))
        return None if meant is None else self.exact_group(meant)

    def pattern_group(self, name: str) -> str | None:
        """Return `name` as a group of its own, if a model_name with stars matches it."""
        return name if name not in self._aliases and self._filled(name) else None

    def deployments(self, group: str) -> tuple[Deployment, ...]:
        """Return the deployments of a `group` that one of the three methods above returned."""
        return self._groups.get(group) or self._filled(group)

    def deployment(self, group: str, deployment_id: str) -> Deployment | None:
        found = (entry for entry in self.deployments(group) if entry.id == deployment_id)
        return next(found, None)

    def fallbacks(self, group: str, cause: Cause) -> tuple[str, ...]:
        """Return the names to try after `group` failed for `cause`, in order.

        They are names that a request could have, local ones and aliases included.
        """
        provider, _, rest = group.partition("/")
        is_provider = any(row.model.startswith(f"{provider}/") for row in self.deployments(group))
        return self.fallback_lists.after((group, rest) if rest and is_provider else (group,), cause)

    def served_by(self, deployment: Deployment) -> str:
        """Return `<provider>/<model>` of a deployment as text for a header."""
        name, provider = deployment.model, deployment.provider
        if deployment.local:
            name = f"{PROVIDER}/{deployment.local}"
        elif provider and not name.startswith(f"{provider}/"):
            name = f"{provider}/{name}"
        return self.secrets.redacted(HEADER_CHARS.sub("?", name))

    def _listed_group(self, name: str) -> ListedGroup:
        rows = self.deployments(self._aliases.get(name, name))
        local = next((row.local for row in rows if row.local), None)
        owner = PROVIDER if local is not None else self.served_by(rows[0]).partition("/")[0]
        return ListedGroup(owner, local)

    def _is_known(self, name: str) -> bool:
        return name in self._locals or self.group_of(name) is not None

    def _filled(self, name: str) -> tuple[Deployment, ...]:
        """Return the deployments of the first pattern that matches `name`.

        The stars of their models are filled with the parts of `name` that matched.
        """
        found = ((regex.match(name), group) for regex, group in self._patterns)
        match, group = next(((match, group) for match, group in found if match), (None, ""))
        if match is None or not _MODEL_NAME.fullmatch(name):
            return ()
        deployments = []
        for entry in self._stars[group]:
            model = _filled(entry.model, match)
            local = entry.local or self._local(model)
            if local or not model.startswith(f"{PROVIDER}/"):  # otherwise no such model exists
                deployments.append(replace(entry, group=name, model=model, local=local))
        return tuple(deployments)

    def _local(self, model: str) -> str:
        """Return the public name of the local model in litellm_params.model; "" = not local."""
        is_ours = model.startswith(f"{PROVIDER}/")
        return self._locals.get(model.removeprefix(f"{PROVIDER}/"), "") if is_ours else ""

    def _deployment(self, entry: dict[str, Any]) -> Deployment:
        """Return the entry's deployment. Raises: StartError: its model is unset or not served."""
        parameters, group = entry["litellm_params"], entry["model_name"]
        model = self.config.resolved(parameters["model"])
        where = f"model_list entry {group!r}"
        if not model:
            self.config.refuse(
                where,
                f"has litellm_params.model {parameters['model']!r}, which is not set",
                "Set that variable, or name the model.",
            )
        local = self._local(model)
        is_pattern = "*" in model and "*" in group
        if model.startswith(f"{PROVIDER}/") and not local and not is_pattern:
            served = ", ".join(f"{PROVIDER}/{name}" for name in self._locals)
            self.config.refuse(
                where,
                f"has litellm_params.model {model!r}, and no such local model is served",
                f"Served: {served}. Add it to MODELS, or correct the name.",
            )
        provider = str(parameters.get("custom_llm_provider") or "")
        return Deployment(str(entry["model_info"]["id"]), group, model, local, provider)

    def _read_aliases(self) -> tuple[dict[str, str], list[str]]:
        """Return the group of each alias, and the aliases that are listed."""
        value = self.config.section("router_settings").get("model_group_alias")
        aliases, shown = {}, []
        for alias, meant in self.config.mapping("router_settings.model_group_alias", value).items():
            entry = meant if isinstance(meant, dict) else {"model": meant}
            group = str(entry.get("model"))
            aliases[str(alias)] = group
            if self.deployments(group) and not entry.get("hidden"):
                shown.append(str(alias))
        return aliases, shown


def read_table(
    path: Path, settings: Settings, environ: Mapping[str, str], in_file: Mapping[str, str]
) -> RoutingTable:
    """Return the table of the config at `path`.

    `in_file` has the variables of the .env file, which the config may name as os.environ/NAME.

    Raises:
        StartError: the config is unusable, or contradicts the settings.
    """
    config = ConfigFile(path, {**in_file, **environ})
    table = RoutingTable(config, settings, environ)
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
    return table


def local_names(settings: Settings) -> dict[str, str]:
    """Return the public name of the local model for each of its names, without patterns.

    The order is that of `ModelNames`, followed by the default model's path and the encoders.
    """
    names = ModelNames.of(settings)
    found = names.known()
    for name in ServedModel(names.public, settings.model_path).names:
        found.setdefault(name, names.public)
    for encoder in encoders_of(settings).values():
        for name in (encoder.public, *encoder.names.aliases):
            found.setdefault(name, encoder.public)
    if names.former_name:
        found.setdefault(names.former_name, names.public)
    return found


def _entries(config: ConfigFile, settings: Settings) -> list[dict[str, Any]]:
    """Return the model_list with an id in each entry, followed by an entry for each local model.

    Raises:
        StartError: an entry has no name or no model.
    """
    entries: list[dict[str, Any]] = []
    for index, model in enumerate(config.models):
        where = f"model_list entry {index + 1}"
        name, parameters = model.get("model_name"), model.get("litellm_params")
        if not isinstance(name, str) or not name:
            config.refuse(where, "has no model_name", "Add the name that clients send.")
        if not isinstance(parameters, dict) or not isinstance(parameters.get("model"), str):
            config.refuse(
                where, f"({name}) has no litellm_params.model", "Add one, as openai/gpt-4o."
            )
        info = config.mapping(f"{where} ({name}): model_info", model.get("model_info"))
        is_local = parameters["model"].startswith(f"{PROVIDER}/")
        info = (_UNASKED if is_local else {}) | info
        # The id is the same at each start, and differs between entries.
        text = json.dumps([index, name, parameters["model"], str(parameters.get("api_base"))])
        made = {"id": hashlib.sha256(text.encode()).hexdigest()[:32]}
        entries.append({**model, "model_info": made | info})
    named = {entry["model_name"] for entry in entries}
    names = ModelNames.of(settings)
    modes = dict.fromkeys((*names.models, *names.adapters), "chat")
    for kind, encoder in encoders_of(settings).items():
        modes.setdefault(encoder.public, _MODES[kind])
    for name, mode in modes.items():
        if name not in named:
            info = {"id": f"{PROVIDER}-{name}", "mode": mode, **_UNASKED}
            parameters = {"model": f"{PROVIDER}/{name}"}
            entry = {"model_name": name, "litellm_params": parameters, "model_info": info}
            entries.append(entry)
    return entries


def _patterns(names: Iterable[str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the patterns in the order in which LiteLLM tries them: the longer regex first."""
    pairs = [(re.escape(name).replace(r"\*", "(.*)"), name) for name in names]
    pairs.sort(key=lambda pair: (len(pair[0]), sum(map(pair[0].count, r"*+?\^$|()"))), reverse=True)
    return tuple((re.compile(regex), name) for regex, name in pairs)


def _filled(model: str, match: re.Match[str]) -> str:
    """Return `model` with its stars filled by the groups of `match`, as LiteLLM fills them."""
    if 0 < model.count("*") < len(match.groups()):
        return match.string
    for part in match.groups():
        model = model.replace("*", part, 1)
    return model
