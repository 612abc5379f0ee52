"""Says what LiteLLM is given: the user's config with what is ours in it, and its environment.

Fallbacks are ours and taken out, so that LiteLLM never falls back itself. Nothing in it listens,
prints, or looks for what is new.
"""

from typing import Any, Final

from hearth.proxy.gateway.config.fallback_lists import LISTS
from hearth.proxy.gateway.config.routing_table import PROVIDER, RoutingTable

HOOKS: Final = "hearth.proxy.gateway.litellm_hooks"

# Each of these is fetched from the network at import unless told otherwise. A user who wants it
# sets the variable to False.
OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
}
SET: Final = {
    "LITELLM_RUST": "False",  # its clients there follow redirects
    "LITELLM_MODE": "PRODUCTION",  # else it loads .env files by itself
    "LITELLM_LOG": "ERROR",
    "LITELLM_DONT_SHOW_FEEDBACK_BOX": "true",
    "LITELLM_TELEMETRY": "False",
    "NO_DOCS": "True",
    "NO_REDOC": "True",
    "DISABLE_ADMIN_UI": "True",
}
# They name another config, or change the paths that we call.
UNSET: Final = (
    *("CONFIG_FILE_PATH", "WORKER_CONFIG", "LITELLM_CONFIG_BUCKET_", "STORE_MODEL_IN_DB"),
    *("SERVER_ROOT_PATH", "DOCS_URL", "REDOC_URL", "PROMETHEUS_MULTIPROC_DIR", "NUM_WORKERS"),
)


def environment(table: RoutingTable) -> dict[str, str]:
    """Return this process's environment as LiteLLM needs it."""
    kept = {name: text for name, text in table.environ.items() if not name.startswith(UNSET)}
    return OFFLINE | kept | SET


def merged_config(table: RoutingTable, token: str) -> dict[str, Any]:
    """Return the config as LiteLLM is given it; `token` opens its app to us."""
    values = {**table.config.values, "model_list": table.entries}
    settings = _without_fallbacks(table.config.section("litellm_settings"))
    settings.setdefault("drop_params", True)
    settings.setdefault("expose_router_debug_in_errors", False)
    settings.setdefault("disable_hf_tokenizer_download", True)  # a count reaches no hub
    settings |= {
        "telemetry": False,
        # A ping before the first event would begin the reply, and nothing could fall back then.
        "sse_keepalive_ping_interval_seconds": 0,
        "anthropic_sse_ping_interval_seconds": 0,
        "callbacks": [*_as_list(settings.get("callbacks")), f"{HOOKS}.routing_hook"],
        "custom_provider_map": [
            *_as_list(settings.get("custom_provider_map")),
            {"provider": PROVIDER, "custom_handler": f"{HOOKS}.local_model"},
        ],
    }
    values["litellm_settings"] = settings
    values["router_settings"] = _router(table)
    values["general_settings"] = _general(table, token)
    return values


def _router(table: RoutingTable) -> dict[str, Any]:
    settings = _without_fallbacks(table.config.section("router_settings"))
    if table.has_fallbacks and not settings.get("retry_policy"):
        # It would sleep for a provider's Retry-After, up to a minute before each of its tries.
        settings["retry_policy"] = {"RateLimitErrorRetries": 0}
    return settings


def _general(table: RoutingTable, token: str) -> dict[str, Any]:
    general = dict(table.config.section("general_settings"))
    general |= {
        "cancel_on_disconnect": True,
        "store_model_in_db": False,  # the table would not know them
        # Whose a stored response is, we know by its owner. LiteLLM's own way encrypts the ids of
        # responses with PyNaCl, which is not installed: every Responses answer would be a 500.
        "disable_responses_id_security": True,
    }
    if not table.has_master_key:  # LiteLLM refuses to start without one
        general["master_key"] = token
    if not table.checks_keys:
        general["custom_auth"] = f"{HOOKS}.authorise"
    return general


def _without_fallbacks(section: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in LISTS}


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
