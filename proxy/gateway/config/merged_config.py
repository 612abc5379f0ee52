"""Says what LiteLLM is given: the user's config with what is ours in it, and its environment.

Fallbacks are ours and taken out, so that LiteLLM never falls back itself. Nothing in it listens,
prints, or looks for what is new.
"""

from typing import Any, Final

from hearth.proxy.gateway.config.routing_table import DEFAULT, LISTS, PROVIDER, RoutingTable

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
# They name another config, change the paths that we call, or are the keys of our own clients.
UNSET: Final = (
    *("CONFIG_FILE_PATH", "WORKER_CONFIG", "LITELLM_CONFIG_BUCKET_", "STORE_MODEL_IN_DB"),
    *("SERVER_ROOT_PATH", "DOCS_URL", "REDOC_URL", "PROMETHEUS_MULTIPROC_DIR", "NUM_WORKERS"),
    "PROXY_API_KEY",
)

_OURS: Final = (*LISTS.values(), DEFAULT)
_SUGGESTED: Final = {
    "drop_params": True,
    "expose_router_debug_in_errors": False,
    "disable_hf_tokenizer_download": True,  # a count reaches no hub
}
_NEEDED: Final = {
    "telemetry": False,
    # A ping before the first event would begin the reply, and nothing could fall back then.
    "sse_keepalive_ping_interval_seconds": 0,
    "anthropic_sse_ping_interval_seconds": 0,
}
_NEEDED_GENERAL: Final = {
    "cancel_on_disconnect": True,
    "store_model_in_db": False,  # the table would not know them
    # Whose a stored response is, we know by its owner. LiteLLM's own way encrypts the ids of
    # responses with PyNaCl, which is not installed: every Responses answer would be a 500.
    "disable_responses_id_security": True,
}


def environment(table: RoutingTable) -> dict[str, str]:
    """Return this process's environment as LiteLLM needs it."""
    kept = {name: text for name, text in table.environ.items() if not name.startswith(UNSET)}
    return OFFLINE | kept | SET


def merged_config(table: RoutingTable, token: str) -> dict[str, Any]:
    """Return the config as LiteLLM is given it; `token` opens its app to us."""
    general, settings, router = (
        {name: value for name, value in table.config.section(each).items() if name not in _OURS}
        for each in ("general_settings", "litellm_settings", "router_settings")
    )
    settings = _SUGGESTED | settings | _NEEDED
    settings["callbacks"] = [*_as_list(settings.get("callbacks")), f"{HOOKS}.routing_hook"]
    ours = {"provider": PROVIDER, "custom_handler": f"{HOOKS}.local_model"}
    settings["custom_provider_map"] = [*_as_list(settings.get("custom_provider_map")), ours]
    if table.has_fallbacks and not router.get("retry_policy"):
        # It would sleep for a provider's Retry-After, up to a minute before each of its tries.
        router["retry_policy"] = {"RateLimitErrorRetries": 0}
    general |= _NEEDED_GENERAL
    if not table.has_master_key:  # LiteLLM refuses to start without one
        general["master_key"] = token
    if not table.checks_keys:
        general["custom_auth"] = f"{HOOKS}.authorise"
    return {
        **table.config.values,
        "model_list": table.entries,
        "general_settings": general,
        "litellm_settings": settings,
        "router_settings": router,
    }


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]
