"""Builds what LITELLM_CONFIG asks for: the table of names, LiteLLM's process, the gateway."""

from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.config.routing_table import RoutingTable
from hearth.proxy.gateway.gateway import Gateway
from hearth.proxy.gateway.litellm_process import LiteLLMProcess
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.cloud_requests import CloudRequests
from hearth.proxy.monitoring.gateway_metrics import served_here
from hearth.shared.settings_from_env import Settings


def make_gateway(table: RoutingTable, settings: Settings, routes: AdminRoutes) -> Gateway:
    """Return the gateway and what it runs on, not yet started.

    `table` is of the config that LITELLM_CONFIG names.
    """
    routes.groups = table.listed
    metrics, names = routes.metrics, routes.names
    served_by = {row.id: table.served_by(row) for row in table.all_deployments}
    clouds = (served_by[row.id] for row in table.all_deployments if not row.local)
    metrics.gateway.know(map(served_here, names.models), is_cloud=False)
    metrics.gateway.know(clouds, is_cloud=True)
    litellm = LiteLLMProcess(table, settings.instance_dir, settings.log_level)
    records = CloudRequests(routes.requests, metrics, lambda name: served_by.get(name, ""))
    accounts = Accounts(table.config.values, litellm, checks_keys=table.checks_keys)
    accounts.on_lost = metrics.gateway.log_lost
    return Gateway(table, names, litellm, routes.stored, records, accounts)
