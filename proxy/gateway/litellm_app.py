"""Loads LiteLLM's proxy app, quiet, lean and offline. Every private name of it is used here.

LiteLLM reads its environment at import and imports for seconds, so it is imported inside `load`,
after the environment is ready and off the event loop. The version is pinned; `load` asserts that
each private name still exists.
"""

import contextlib
import gc
import importlib
import io
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hearth.proxy.gateway.litellm_warm_up import warm_up
from hearth.proxy.http.http_exchange import App
from hearth.proxy.request.model_names import models_of
from hearth.shared.settings_from_env import Settings

CONFIG_NAME: Final = "litellm.yaml"

# Variables of other LiteLLM installations that would add a database, a cache, telemetry or keys.
_FOREIGN: Final = (
    "LITELLM_",
    "DATABASE_",
    "DIRECT_URL",
    "REDIS_",
    "CONFIG_FILE_PATH",
    "WORKER_CONFIG",
    "STORE_MODEL_IN_DB",
    "USE_PRISMA_MIGRATE",
    "PROMETHEUS_MULTIPROC_DIR",
    "LANGFUSE_",
    "OTEL_",
    "SERVER_ROOT_PATH",
    "DOCS_",
    "UI_",
)
_ENVIRONMENT: Final = {
    # Each of these is fetched from the network at import unless told otherwise.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
    "LITELLM_MODE": "PRODUCTION",  # else it loads .env files by itself
    "LITELLM_LOG": "ERROR",
    "LITELLM_DONT_SHOW_FEEDBACK_BOX": "true",
    "LITELLM_TELEMETRY": "False",
    "NO_DOCS": "True",
    "NO_REDOC": "True",
    "DISABLE_ADMIN_UI": "True",
}
_REQUEST_S_MAX: Final = 86_400  # a long prefill is not a failure
_LOGGERS: Final = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` as LiteLLM may see it."""
    kept = {name: text for name, text in environ.items() if not name.startswith(_FOREIGN)}
    return kept | _ENVIRONMENT


def config(settings: Settings, token: str) -> dict[str, Any]:
    """Return LiteLLM's configuration: a deployment a model, no retries (the pool's), no fallbacks.

    A fallback would replay text that was already streamed.
    """
    return {
        "model_list": [
            {
                "model_name": model.name,
                "litellm_params": {
                    "model": "hearth/local",
                    "api_base": "pool://local",
                    "max_retries": 0,
                },
                "model_info": {"mode": "chat"},
            }
            for model in models_of(settings)
        ],
        "litellm_settings": {
            "drop_params": True,
            "num_retries": 0,
            "request_timeout": _REQUEST_S_MAX,
            "telemetry": False,
            "sse_keepalive_ping_interval_seconds": 0,  # its comments are nothing to some clients;
            "anthropic_sse_ping_interval_seconds": 0,  # the empty deltas and pings are ours
            "custom_provider_map": [
                {
                    "provider": "hearth",
                    "custom_handler": "hearth.proxy.gateway.litellm_handlers.chat_handler",
                }
            ],
        },
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "general_settings": {
            "master_key": token,  # LiteLLM refuses to start without one
            "custom_auth": "hearth.proxy.gateway.litellm_handlers.authorise",
            "cancel_on_disconnect": True,
            "disable_spend_logs": True,
        },
    }


def load(settings: Settings) -> tuple[App, str]:
    """Import LiteLLM and return its app, which warms up at its start, and the token it accepts.

    Takes seconds. Changes this process's environment; call it once, from any one thread.
    """
    wanted = environment(os.environ)
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
    with without_collecting():
        seams = importlib.import_module("hearth.proxy.gateway.litellm_handlers")
        server = importlib.import_module("litellm.proxy.proxy_server")
    path = settings.instance_dir / CONFIG_NAME
    _write_private(path, json.dumps(config(settings, seams.edge_token)))  # JSON is YAML
    os.environ["CONFIG_FILE_PATH"] = str(path)
    _patch(seams)
    _quieten(settings.log_level)
    app = server.app
    started = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(scope_app: Any) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints its model list, in green
                state = await stack.enter_async_context(started(scope_app))
            path.unlink(missing_ok=True)  # it was read, and it holds the token
            await warm_up(app, seams.edge_token, settings.model_name)
            yield state

    app.router.lifespan_context = lifespan
    return app, seams.edge_token


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Collect no garbage within, and never again look through what was made.

    Modules make hundreds of thousands of objects that all stay: looking through them takes a
    quarter of the time that LiteLLM's import takes, and holds the event loop up later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _patch(seams: Any) -> None:
    """Change what no setting of LiteLLM's changes."""
    hooks: Any = importlib.import_module("litellm.proxy.hooks")
    auth: Any = importlib.import_module("litellm.proxy.auth.user_api_key_auth")
    found: Any = importlib.import_module(
        "litellm.llms.anthropic.pass_through.messages.interceptors"
    )
    assert isinstance(hooks.PROXY_HOOKS, dict), "LiteLLM renamed PROXY_HOOKS"
    assert callable(auth._seed_request_destinations), "LiteLLM renamed a function of its auth"
    assert isinstance(found._interceptors, list), "LiteLLM renamed its interceptors"
    hooks.PROXY_HOOKS.clear()  # rate limits, budgets and skills of virtual keys: there are none
    auth._seed_request_destinations = lambda *args, **kwargs: None  # retries a failing import
    if seams.messages_handler not in found._interceptors:
        found._interceptors.insert(0, seams.messages_handler)


def _quieten(level: str) -> None:
    """Silence LiteLLM: it logs every broken answer with its traceback, and prints advice."""
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(
            logging.WARNING if level == "debug" else logging.CRITICAL + 1
        )


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
