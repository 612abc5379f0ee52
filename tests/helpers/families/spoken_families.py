"""Has a script's answers written as the models of tests/data/families write them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.model_families import Family, family
from tests.helpers.families.family_cases import written_family


def spoken_family(name: str) -> Family:
    """Return a family of scripts/harness/model_families.py, or one of those written below."""
    return replace(written_family(name), write=WRITERS[name]) if name in WRITERS else family(name)


def _deepseek(parts: AnswerParts) -> str:
    calls = "".join(map(_deepseek_call, parts.calls))
    section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return f"{parts.reasoning}</think>{parts.content}{section}"


def _deepseek_call(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _minimax(parts: AnswerParts) -> str:
    calls = "".join(map(_minimax_call, parts.calls))
    section = f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else ""
    return f"{parts.reasoning}\n</think>\n\n{parts.content}{section}"


def _minimax_call(call: ToolCall) -> str:
    assert isinstance(call.arguments, dict)
    values = "".join(
        f'<parameter name="{name}">{value}</parameter>\n' for name, value in call.arguments.items()
    )
    return f'<invoke name="{call.name}">\n{values}</invoke>\n'


WRITERS: Final[Mapping[str, Callable[[AnswerParts], str]]] = {
    "glm45": family("glm4").write,
    "deepseek-v31": _deepseek,
    "minimax_m2": _minimax,
}
