"""Holds what a client wishes of thinking, and what a model's template can be told of it."""

from dataclasses import dataclass, field
from typing import Any, Final

THINKING_LEVELS: Final = ("minimal", "low", "medium", "high", "xhigh", "max")  # least first
# (variable, on, off) of chat templates; enable_thinking and thinking come first.
TEMPLATE_SWITCHES: Final[tuple[tuple[str, Any, Any], ...]] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),  # Kimi K3, Granite 3.3
    ("thinking_mode", "enabled", "disabled"),  # MiniMax M3
    ("thinking_mode", "thinking", "chat"),  # DeepSeek's encoders, which are Python functions
    ("reasoning", True, False),  # Cohere 2 MoE, GigaChat 3.5
    ("thinking_option", "on", "off"),  # Ling
    ("thinking_budget", -1, 0),  # Seed-OSS
)


@dataclass(frozen=True, slots=True)
class ThinkingWish:
    """How much the model may think, as the client said it; the worker knows its template's words.

    A level with no `on` says how hard to work, not whether to think.
    """

    on: bool | None = None
    level: str | None = None  # of THINKING_LEVELS
    budget: int | None = None  # tokens, >= 0

    @property
    def options(self) -> dict[str, Any]:
        """The fields in which a client says the same."""
        level = {"effort": self.level} if self.on is None else self.level
        name = "output_config" if self.on is None else "reasoning_effort"
        rows = (
            ("enable_thinking", self.on),
            (name, self.level and level),
            ("thinking_budget", self.budget),
        )
        return {key: value for key, value in rows if value is not None}


@dataclass(frozen=True, slots=True)
class ThinkingFacts:
    """What a model's template can be told about thinking, and what it does where nobody says."""

    # "on" | "off" | "adaptive" (the model decides); without a switch also "always" | "never"
    default: str = "never"
    has_switch: bool = False  # between on and off
    levels: list[str] = field(default_factory=list)  # of THINKING_LEVELS, least first
