"""Asks axe-core, Deque's rules of accessibility, what is wrong with the page that a tab shows."""

import functools
import json
from typing import Final

from tests.helpers.clients.browser import Page
from tests.helpers.clients.npm_clients import AXE, NotInstallableError, node_modules

SERIOUS: Final = ("serious", "critical")
RULES: Final = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
RUN: Final = """axe.run(document, {
  runOnly: {type: "tag", values: %s}, resultTypes: ["violations"],
}).then((told) => ({
  passed: told.passes.length,
  found: told.violations.flatMap((rule) => rule.nodes.map(
    (node) => [node.impact, rule.id, node.target.join(" "), node.failureSummary])),
}))"""


@functools.cache
def axe_source() -> str | None:
    """Return the script of axe-core; None where it cannot be installed."""
    try:
        return (node_modules(AXE) / "axe-core" / "axe.min.js").read_text()
    except NotInstallableError:
        return None


async def serious_findings(tab: Page) -> list[str] | None:
    """Return what is seriously wrong with what `tab` shows; None where there is no axe-core."""
    source = axe_source()
    if source is None:
        return None
    if not await tab.value("'axe' in window"):
        await tab.value(source + ";0")
    told = await tab.value(RUN % json.dumps(RULES))
    assert told["passed"] > 5, f"axe-core looked at nothing: {told}"
    return [": ".join(row[1:]) for row in told["found"] if row[0] in SERIOUS]
