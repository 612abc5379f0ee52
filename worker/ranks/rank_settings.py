"""Says what a model over several ranks goes without, and refuses settings that ask for it."""

from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings

# What is off -> why.
OFF: Final = {
    "drafts": "a draft's forward, and how much of it holds, are not told to the other ranks",
    "shared trunks": "attention over a shared trunk was never compared over ranks",
    "images": "vision towers are not split, so that text alone is loaded",
    "kv_bits": "rows that are packed while they run were never compared over ranks",
    "adapters": "mlx-lm splits no adapter",
    "idle checks": "hearth doctor checks one process; hearth ranks check compares the ranks",
}


def refuse_settings(settings: Settings) -> None:
    """Raise StartError where a setting asks for what several ranks cannot do."""
    asked = {
        "KV_BITS": str(settings.kv_bits or ""),
        "DRAFT_MODEL": settings.draft_model,
        "ADAPTERS": ",".join(name for name, _ in settings.adapters),
    }
    for name, value in asked.items():
        if value:
            raise StartError(
                f"RANKS is {settings.ranks} and {name} is {value!r}, which a model over several "
                f"ranks cannot have (docs/ranks.md). Leave {name} empty, or set RANKS=1."
            )
