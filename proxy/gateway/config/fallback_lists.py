"""Reads the fallbacks of a LiteLLM config and says which apply, as LiteLLM's Router would."""

from collections.abc import Callable
from typing import Any, Final, Literal

from hearth.proxy.gateway.config.config_file import ConfigFile

Cause = Literal["error", "context_window", "content_policy"]

LISTS: Final = (
    *("fallbacks", "default_fallbacks", "context_window_fallbacks", "content_policy_fallbacks"),
)
STEPS_MAX: Final = 5  # LiteLLM's default for max_fallbacks
_SPECIAL: Final[dict[Cause, str]] = {
    "context_window": "context_window_fallbacks",
    "content_policy": "content_policy_fallbacks",
}
Rows = dict[str, tuple[str, ...]]


class FallbackLists:
    """What is tried after a group failed. A value that nobody changes."""

    def __init__(
        self,
        config: ConfigFile,
        is_known: Callable[[str], bool],
        may_fail: Callable[[str], bool],
    ) -> None:
        """`is_known` is of names to be tried, `may_fail` of those behind which they are.

        Raises:
            StartError: a list has another shape, or parameters beside names.
        """
        self._config = config
        self._may_fail = may_fail
        self._is_known = is_known
        self._error = self._rows("fallbacks")
        default = self._names("default_fallbacks", self._setting("default_fallbacks") or [])
        if default:
            self._error["*"] = default
        # None = not configured, so that `fallbacks` apply to that cause too.
        self._special = {
            cause: None if self._setting(name) is None else self._rows(name)
            for cause, name in _SPECIAL.items()
        }
        steps = self._setting("max_fallbacks")
        self.steps_max: int = steps if isinstance(steps, int) else STEPS_MAX

    @property
    def has_any(self) -> bool:
        """Tell whether anything is tried after a group that could not answer."""
        return any(self._error.values())

    def after(self, names: tuple[str, ...], cause: Cause) -> tuple[str, ...]:
        """Return what is tried after the group that has these names, the full one first."""
        special = self._special.get(cause)
        rows = self._error if special is None else special
        found = next((rows[name] for name in (*names, "*") if name in rows), ())
        return tuple(name for name in found if name != names[0])

    def _setting(self, name: str) -> Any:
        """Return what router_settings has, or else litellm_settings: LiteLLM's order."""
        for section in ("router_settings", "litellm_settings"):
            value = self._config.section(section).get(name)
            if value or (value is not None and section == "litellm_settings"):
                return value
        return None

    def _rows(self, name: str) -> Rows:
        """Return the names to try by the name that failed."""
        rows: Rows = {}
        value = self._setting(name) or []
        if not isinstance(value, list):
            self._refuse(name, "is no list")
        for row in value:
            if not isinstance(row, dict) or len(row) != 1:
                self._refuse(name, "has an entry that is no single `model_name: [names]`")
            ((failed, names),) = row.items()
            if failed != "*" and not self._may_fail(str(failed)):
                self._config.warn(name, f"has {str(failed)!r}, which no model is; it is never used")
            if failed == "*" or failed not in rows:  # of these the first counts, of stars the last
                rows[str(failed)] = self._names(f"{name} of {failed!r}", names)
        return rows

    def _names(self, where: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            self._refuse(where, "is no list of names")
        names = tuple(self._name(where, row) for row in value)
        for name in names:
            if not self._is_known(name):
                self._config.warn(where, f"names {name!r}, which no model is; it is passed over")
        return tuple(name for name in names if self._is_known(name))

    def _name(self, where: str, row: Any) -> str:
        if isinstance(row, dict) and set(row) - {"model"}:
            beside = ", ".join(sorted(map(str, set(row) - {"model"})))
            self._config.refuse(
                where,
                f"has parameters of its own ({beside})",
                "Make an entry of model_list that has them, and name that.",
            )
        name = row.get("model") if isinstance(row, dict) else row
        if not isinstance(name, str) or not name:
            self._refuse(where, "has an entry that is no name")
        return str(name)

    def _refuse(self, where: str, what: str) -> None:
        self._config.refuse(where, what, "Write it as in `- gpt-4o: [claude, small]`.")
