"""Builds what LITELLM_CONFIG asks for: the table of names, LiteLLM's process, the gateway."""

from typing import Final

from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.config.routing_table import RoutingTable
from hearth.proxy.gateway.gateway import Gateway
from hearth.proxy.gateway.litellm_process import LiteLLMProcess
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.cloud_requests import CloudRequests
from hearth.proxy.monitoring.gateway_metrics import served_here
from hearth.shared.settings_from_env import Settings

LOGS_WAIT_S_MAX: Final = 2.0  # at the end, for callbacks to take what waits


class GatewaySetup:
    """The gateway and what it runs on. Owner: the event loop."""

    def __init__(
        self,
        table: RoutingTable,
        settings: Settings,
        routes: AdminRoutes,
    ) -> None:
        """`table` is of the config that LITELLM_CONFIG names."""
        self.litellm = LiteLLMProcess(table, settings.instance_dir, settings.log_level)
        self.table = table
        routes.groups = table.listed
        metrics, names = routes.metrics, routes.names
        served_by = {row.id: table.served_by(row) for row in table.all_deployments}
        metrics.gateway.know(map(served_here, names.models), is_cloud=False)
        metrics.gateway.know(
            (table.served_by(row) for row in table.all_deployments if not row.local),
            is_cloud=True,
        )
        self.cloud_requests = CloudRequests(
            routes.requests, metrics, lambda name: served_by.get(name, "other")
        )
        self.accounts = Accounts(table.config.values, self.litellm, checks_keys=table.checks_keys)
        self.accounts.on_lost = metrics.gateway.log_lost
        self.gateway = Gateway(
            table, names, self.litellm, routes.stored, self.cloud_requests, self.accounts
        )

    def start(self) -> None:
        """Begin to load LiteLLM; returns at once."""
        self.litellm.start(self.cloud_requests.told)

    def end_calls(self) -> None:
        """End each answer of another server with an error: this server stops."""
        self.litellm.end_calls("The server is shutting down.")

    async def close(self) -> None:
        """Tell LiteLLM what it has not been told, end it, and note what it has not told."""
        await self.accounts.close(LOGS_WAIT_S_MAX)
        await self.litellm.close()
        self.cloud_requests.close()
