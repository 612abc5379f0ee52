"""Runs two scripted local models on two workers beside a mock cloud, every socket watched."""

from pathlib import Path
from typing import Any, Final

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.cloud.gateway_config import cloud_entry, local, write_config
from tests.helpers.servers.mock_cloud import MockCloud
from tests.helpers.servers.scripted_server import checkpoint
from tests.helpers.servers.watched_server import WatchedServer

BIG: Final = "big"
SMALL: Final = "small"


def config_of(cloud: MockCloud) -> dict[str, Any]:
    """Return the config: Claude's tiers here and there, and agents' MODEL, which is the cloud's."""
    entries = [
        local("claude-opus-*", BIG),
        local("claude-haiku-*", SMALL),
        cloud_entry(cloud, "claude-sonnet-*", "anthropic/claude-mock"),
        cloud_entry(cloud, "claude-3-5-haiku-*", "anthropic/claude-small-mock"),
        cloud_entry(cloud, MODEL, "openai/agent-mock"),
        cloud_entry(cloud, "cloud", "openai/gpt-mock"),
        cloud_entry(cloud, "claude-cloud", "anthropic/claude-mock"),
    ]
    return {"model_list": entries, "litellm_settings": {"num_retries": 0}}


class TwoSidedServer(WatchedServer):
    """Its local models are BIG and SMALL, each on a worker of its own once it was asked for."""

    def __init__(self, cloud: MockCloud, **settings: str) -> None:
        super().__init__(WORKERS="2", **settings)
        self.cloud = cloud
        small: Path = checkpoint(self.run_dir / "small", self.family_name)
        self.environment |= {
            "PROXY_MODEL_ID": BIG,
            "MODELS": f"{SMALL}={small}",
            "LITELLM_CONFIG": write_config(self.run_dir, config_of(cloud)),
        }
