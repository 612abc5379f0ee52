"""Makes the lines that the server prints when it starts."""

import json

from hearth.proxy.request.model_names import models_of
from hearth.shared.listen_addresses import url_of
from hearth.shared.machine import bytes_for_models
from hearth.shared.models.model_path import SMOLLM2, builtin_model, first_model_words
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import ModelFacts


def starting_line(settings: Settings, version: str, missing: str) -> str:
    """Return the line that says which model is being loaded; `missing` as in `ready_lines`."""
    if missing:
        return f"hearth {version}: starting without {settings.model_path} ..."
    count = "1 worker" if settings.workers == 1 else f"{settings.workers} workers"
    elsewhere = len(settings.worker_endpoints)
    more = f" and {elsewhere} on other machines" if elsewhere else ""
    return f"hearth {version}: loading {settings.model_path} in {count}{more} ..."


def ready_lines(settings: Settings, facts: ModelFacts | None, missing: str = "") -> list[str]:
    """Return the lines that say what is served and where, with a first request to paste.

    `missing` says why the default model is not on this disk; then `facts` may be None.
    """
    url = url_of(settings.proxy_host, settings.proxy_port)
    request = {
        "model": facts.name if facts else settings.model_name,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    header = ' -H "Authorization: Bearer $PROXY_API_KEY"' if settings.api_keys else ""
    body = json.dumps(request, ensure_ascii=False).replace("'", "'\\''")
    others = ", ".join(model.name for model in models_of(settings)[1:])
    return [
        f"ready: {url}",
        f"  talk     {url}/ in a browser",
        f"  see      {url}/dashboard",
        *([f"  missing  {missing} The next request loads it once it is there."] if missing else []),
        *(_model_lines(settings, facts) if facts else []),
        *([f"  others   {others} (loaded when they are asked for)"] if others else []),
        "try:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'",
    ]


def _model_lines(settings: Settings, facts: ModelFacts) -> list[str]:
    size = f"{_scaled(facts.parameter_count)} parameters, {_scaled(facts.weight_bytes)}B"
    computed = f", {facts.computed_in}" if facts.computed_in else ""
    is_first = builtin_model(settings.model_path) is SMOLLM2
    own = f"the model's own is {facts.model_tokens:,}"
    whys = {
        "memory": f" ({own}; more does not fit into memory)",
        "setting": f" ({own}; MAX_KV_SIZE)",
    }
    return [
        f"  model    {facts.name} ({facts.architecture}, {size})",
        *([f"           {first_model_words(bytes_for_models())}"] if is_first else []),
        *([f"  tables   {facts.tables}"] if facts.tables else []),
        *(["  images   yes"] if facts.takes_images else []),
        f"  context  {facts.context_tokens:,} tokens{whys.get(facts.context_by, '')}",
        f"  cache    {facts.cache_layout}",
        f"  backend  {facts.backend}{computed}",
    ]


def _scaled(count: float) -> str:
    """Return `count` with three digits and a unit prefix: 27,400,000 as "27.4 M"."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} T"
