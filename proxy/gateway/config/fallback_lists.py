"""Reads the fallbacks of a LiteLLM config and says which apply, as LiteLLM's Router would."""

from collections.abc import Callable
from typing import Any, Final, Literal

from hearth.proxy.gateway.config.config_file import ConfigFile

Cause = Literal["error", "context_window", "content_policy"]

DEFAULT: Final = "default_fallbacks"
LISTS: Final[dict[Cause, str]] = {
    "error": "fallbacks",
    "context_window": "context_window_fallbacks",
    "content_policy": "content_policy_fallbacks",
}
_SHAPE: Final = "Write it as in `- gpt-4o: [claude, small]`."
STEPS_MAX: Final = 5  # LiteLLM's default for max_fallbacks


class FallbackLists:
    """What is tried after a group failed. A value that nobody changes."""

    def __init__(self, config: ConfigFile, is_known: Callable[[str], bool]) -> None:
        """`is_known` is of names to be tried.

        Raises:
            StartError: a list has another shape, or parameters beside names.
        """
        self._config = config
        self._is_known = is_known
        self._rows = {cause: self._read(name) for cause, name in LISTS.items()}
        if default := self._names(DEFAULT, self._setting(DEFAULT)):
            self._rows["error"]["*"] = default
        self.has_any = any(self._rows["error"].values())
        steps = self._setting("max_fallbacks")
        self.steps_max = steps if isinstance(steps, int) else STEPS_MAX

    def after(self, names: tuple[str, ...], cause: Cause) -> tuple[str, ...]:
        """Return what is tried after the group that has these names, the full one first.

        Where the list of a cause has nothing, `fallbacks` apply to it too.
        """
        for of in (cause, "error"):
            rows = self._rows[of]
            found = next((rows[name] for name in (*names, "*") if name in rows), ())
            if tried := tuple(name for name in found if name != names[0]):
                return tried
        return ()

    def _setting(self, name: str) -> Any:
        """Return what router_settings has, or else litellm_settings: LiteLLM's order."""
        router, settings = map(self._config.section, ("router_settings", "litellm_settings"))
        return router.get(name) or settings.get(name)

    def _read(self, name: str) -> dict[str, tuple[str, ...]]:
        """Return the names to try by the name that failed."""
        rows: dict[str, tuple[str, ...]] = {}
        for row in self._config.rows(name, self._setting(name)):
            if not isinstance(row, dict) or len(row) != 1:
                self._config.refuse(name, "has an entry that is no single `model_name`", _SHAPE)
            ((failed, names),) = row.items()
            if failed == "*" or failed not in rows:  # of these the first counts, of stars the last
                rows[str(failed)] = self._names(f"{name} of {failed!r}", names)
        return rows

    def _names(self, where: str, value: Any) -> tuple[str, ...]:
        names = []
        for row in self._config.rows(where, value):
            beside = set(row) - {"model"} if isinstance(row, dict) else ()
            if beside:
                self._config.refuse(
                    where,
                    f"has parameters of its own ({', '.join(sorted(map(str, beside)))})",
                    "Make an entry of model_list that has them, and name that.",
                )
            name = row.get("model") if isinstance(row, dict) else row
            if not isinstance(name, str) or not name:
                self._config.refuse(where, "has an entry that is no name", _SHAPE)
            if self._is_known(name):
                names.append(name)
            else:
                self._config.warn(where, f"names {name!r}, which no model is; it is passed over")
        return tuple(names)
