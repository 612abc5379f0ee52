"""Writes LiteLLM configs of a user with a mock cloud, for tests of the gateway."""

import json
from pathlib import Path
from typing import Any, Final

from tests.helpers.servers.mock_cloud import KEY, MockCloud
from tests.helpers.servers.server import free_port

Entry = dict[str, Any]
TIMEOUT_S: Final = 1
BUDGETED: Final = "deepseek"  # the provider with a budget


def local(name: str, model: str) -> Entry:
    return {"model_name": name, "litellm_params": {"model": f"hearth/{model}"}}


def cloud_entry(cloud: MockCloud, name: str, model: str, **params: Any) -> Entry:
    """Return a group of one model of the mock; `model` is provider/name."""
    is_anthropic = model.startswith("anthropic/")
    base = {"api_base": cloud.url if is_anthropic else f"{cloud.url}/v1", "api_key": KEY}
    return {"model_name": name, "litellm_params": {"model": model, **base, **params}}


def write_config(directory: Path, config: Entry) -> str:
    """Write `config` as a user's YAML, which JSON is too, and return its path."""
    path = directory / "litellm.yaml"
    path.touch(0o600)
    path.write_text(json.dumps(config, indent=1))
    return str(path)


def everything(cloud: MockCloud, wrong_key: str, callback_url: str) -> Entry:
    """Return the config of the server that most tests share: each way of failing has a group.

    It is for a server of the models local, second and broken.
    """
    costly = {"input_cost_per_token": 1.0, "output_cost_per_token": 1.0}
    refused = {"api_base": f"http://127.0.0.1:{free_port()}/v1"}
    first = {
        "local-first": ["cloud"],
        "broken-first": ["cloud"],
        **{name: ["local"] for name in ("cloud-first", "slow-first", "costly-first")},
        **{name: ["local"] for name in ("refused-first", "denied-first", "claude-first")},
    }
    return {
        "model_list": [
            cloud_entry(cloud, "cloud", "openai/gpt-mock"),
            cloud_entry(cloud, "claude-cloud", "anthropic/claude-mock"),
            cloud_entry(cloud, "text-cloud", "text-completion-openai/text-mock"),
            cloud_entry(cloud, "embed-cloud", "openai/embed-mock"),
            cloud_entry(cloud, "gemini-cloud", "gemini/gemini-mock"),
            cloud_entry(cloud, "spare", "openai/spare"),
            cloud_entry(cloud, "strict-spare", "openai/strict-spare"),
            cloud_entry(cloud, "denied", "openai/denied", api_key=wrong_key),
            cloud_entry(cloud, "denied-env", "openai/denied", api_key="os.environ/WRONG_KEY"),
            cloud_entry(cloud, "denied-implicit", "openai/denied", api_key=None),
            cloud_entry(cloud, "denied-first", "openai/denied", api_key=wrong_key),
            cloud_entry(cloud, "cloud-first", "openai/flaky"),
            cloud_entry(cloud, "claude-first", "anthropic/flaky"),
            cloud_entry(cloud, "slow-first", "openai/slow", timeout=TIMEOUT_S),
            cloud_entry(cloud, "costly-first", f"{BUDGETED}/costly", **costly),
            cloud_entry(cloud, "refused-first", "openai/refused", **refused),
            local("local-first", "local"),
            local("broken-first", "broken"),
            local("either", "local"),
            cloud_entry(cloud, "either", "openai/gpt-mock"),
        ],
        "litellm_settings": {
            "num_retries": 0,
            "callbacks": ["our_tool"],
            "fallbacks": [{name: names} for name, names in first.items()],
            "context_window_fallbacks": [
                {name: ["spare"]} for name in ("local-first", "cloud-first", "claude-first")
            ],
            "content_policy_fallbacks": [{"cloud-first": ["strict-spare"]}],
        },
        "router_settings": {
            "disable_cooldowns": True,
            "provider_budget_config": {BUDGETED: {"budget_limit": 0.5, "time_period": "1d"}},
        },
        "callback_settings": {
            "our_tool": {
                "callback_type": "generic_api",
                "endpoint": callback_url,
                "headers": {"x-tool": "1"},
            }
        },
    }
