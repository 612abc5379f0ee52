"""Runs the real proxy with a LiteLLM config: scripted workers on one side, a mock cloud there."""

import os
from typing import Any, Final

from tests.helpers.cloud.gateway_config import everything, write_config
from tests.helpers.cloud.json_sink import JsonSink
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.mock_cloud import MockCloud
from tests.helpers.worker_processes.fake_worker import MISSING

# Not of the form sk-...: LiteLLM takes such keys out of its errors by itself.
WRONG_KEY: Final = "canary.literal.4711"
WRONG_KEY_OF_ENVIRONMENT: Final = "canary.environment.4712"
IMPLICIT_KEY: Final = "canary.implicit.4713"  # which no config names, and LiteLLM takes


class GatewayServer(FakeServer):
    """The server that most tests of the gateway share. `callbacks` has what is logged to a tool."""

    def __init__(self, cloud: MockCloud, callbacks: JsonSink, **settings: str) -> None:
        models = f"second=/b, broken={MISSING}"
        super().__init__(MODELS=models, **settings)
        self.cloud = cloud
        self.callbacks = callbacks
        self.environment |= {
            "LITELLM_CONFIG": write_config(
                self.run_dir, everything(cloud, WRONG_KEY, callbacks.url)
            ),
            "WRONG_KEY": WRONG_KEY_OF_ENVIRONMENT,
            "OPENAI_API_KEY": IMPLICIT_KEY,
            # LiteLLM's logger loses what comes while it sends: it sends each row at once here, and
            # tests wait for one before they cause the next.
            "DEFAULT_BATCH_SIZE": "1",
            "DEFAULT_FLUSH_INTERVAL_SECONDS": "3600",
        }

    def submits(self, after: float) -> list[dict[str, Any]]:
        """Return what the local workers were asked since `after`, in the seconds of time.time()."""
        return self.events("Submit", after) if self.worker_log.exists() else []


def texts_below(*directories: os.PathLike[str]) -> str:
    """Return the text of all files below `directories`."""
    found = []
    for directory in directories:
        for place, _, names in os.walk(directory):
            for name in names:
                path = os.path.join(place, name)
                if os.path.isfile(path):
                    with open(path, "rb") as file:
                        found.append(file.read().decode("utf-8", "replace"))
    return "\n".join(found)
