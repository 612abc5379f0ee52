"""Builds what LITELLM_CONFIG asks for: the table of names, LiteLLM's thread, the gateway."""

from collections.abc import Mapping
from pathlib import Path

from hearth.proxy.event_loop import SuspendingEventLoop
from hearth.proxy.gateway.gateway import Gateway
from hearth.proxy.gateway.litellm_thread import LiteLLMThread
from hearth.proxy.gateway.routing_table import read_table
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.cloud_requests import CloudRequests
from hearth.proxy.monitoring.gateway_metrics import served_here
from hearth.proxy.monitoring.gateway_records import CountedGateway
from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings


class GatewaySetup:
    """The gateway and what it runs on. Owner: the event loop."""

    def __init__(
        self, path: Path, settings: Settings, given: Mapping[str, str], routes: AdminRoutes
    ) -> None:
        """`path` is of the config, `given` the environment with the variables of `.env`.

        Raises:
            StartError: the config cannot be used, or others could reach the server without a key.
        """
        self.table = table = read_table(path, settings, given)
        if not settings.is_loopback and not settings.api_keys and not table.checks_keys:
            raise StartError(
                f"PROXY_HOST is {settings.proxy_host}, which others can reach, and neither "
                f"PROXY_API_KEY nor a master_key in {path} is set. Set one, or "
                "PROXY_HOST=127.0.0.1."
            )
        self.litellm = LiteLLMThread(
            table, settings.instance_dir, given, SuspendingEventLoop, settings.log_level
        )
        metrics, names = routes.metrics, routes.names
        served_by = {row.id: table.served_by(row) for row in table.all_deployments}
        metrics.gateway.know(map(served_here, names.models), is_cloud=False)
        metrics.gateway.know(
            (table.served_by(row) for row in table.all_deployments if not row.local),
            is_cloud=True,
        )
        self.cloud_requests = CloudRequests(
            routes.requests, metrics.gateway, lambda name: served_by.get(name, "other")
        )
        records = CountedGateway(metrics, self.cloud_requests)
        self.gateway = Gateway(table, names, self.litellm, routes.stored, records)
        self.gateway.is_apart = len(settings.api_keys) > 1 or table.checks_keys

    async def close(self) -> None:
        """End LiteLLM, and note what it has not told of yet."""
        await self.litellm.close()
        self.cloud_requests.close()
