"""Runs the real server with LiteLLM's virtual keys, which a callback of the user's own puts there.

LiteLLM's database cannot be had here. Its keys are put where it keeps those that it has just read,
and it never asks for others: a wrong key is not tried with this.
"""

import json
from typing import Final

from tests.helpers.cloud.gateway_server import cloud_entry, write_config
from tests.helpers.servers.mock_cloud import MockCloud
from tests.helpers.servers.server import Server

MINE, THEIRS = "sk-canary-mine-1", "sk-canary-theirs-1"
CLOUD_ONLY: Final = "sk-canary-cloud-1"  # may ask for the group `cloud` alone
SPENT: Final = "sk-canary-spent-1"
MASTER: Final = "sk-canary-master-1"
KEYS: Final = {
    MINE: {"user_id": "me"},
    THEIRS: {"user_id": "they"},
    CLOUD_ONLY: {"models": ["cloud"]},
    SPENT: {"max_budget": 0.5, "spend": 1.0},
}
_CALLBACK: Final = """
import asyncio
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy import proxy_server
from litellm.proxy._types import UserAPIKeyAuth

class Database:
    async def disconnect(self):
        pass

class Keys(CustomLogger):
    def __init__(self):
        super().__init__()
        self.task = asyncio.get_running_loop().create_task(self.put())

    async def put(self):
        while proxy_server.llm_router is None:
            await asyncio.sleep(0.01)
        proxy_server.prisma_client = Database()
        for key, fields in KEYS.items():
            known = UserAPIKeyAuth(api_key=key, **fields)
            await proxy_server.user_api_key_cache.async_set_cache(key=known.token, value=known)

keys = Keys()
"""


class VirtualKeyServer(Server):
    """A server of a local model and of a group of a mock cloud's; it knows KEYS and MASTER."""

    def __init__(self, cloud: MockCloud, **settings: str) -> None:
        super().__init__(DEFAULT_MAX_TOKENS="16", **settings)
        self.cloud = cloud
        (self.run_dir / "preloaded_keys.py").write_text(f"KEYS = {json.dumps(KEYS)}\n{_CALLBACK}")
        config = {
            "model_list": [
                cloud_entry(cloud, "cloud", "openai/gpt-mock"),
                cloud_entry(cloud, "other", "openai/other-mock"),
            ],
            "litellm_settings": {
                "num_retries": 0,
                "callbacks": ["preloaded_keys.keys"],
                "fallbacks": [{"cloud": ["local"]}],
            },
            "router_settings": {"model_group_alias": {"by-alias": "local"}},
            "general_settings": {"master_key": MASTER},
        }
        self.environment["LITELLM_CONFIG"] = write_config(self.run_dir, config)
