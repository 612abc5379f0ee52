"""Tells what of an echo a recorded turn hides: the second judgement beside the worker's own.

Written apart from hearth.worker.sessions.echoed_turn_match, whose judgement it checks, and strict:
nothing is trimmed, true, 1, 1.0 and "1" are four values.
"""

import json
import re
from typing import Any, Final

from hearth.proxy.request.content_pieces import text_of
from hearth.shared.wire_messages import Prompt
from hearth.worker.stream.answer_parts import AnswerParts

CAPTURED_IN: Final = "/home/dev/textkit"  # the directory that all captured sessions work in
_NUMBER: Final = re.compile(r"-?\d{1,15}(\.\d+)?")


def is_claude(prompt: Prompt) -> bool:
    return prompt.speaker.client == "claude-code"


def properties_of(prompt: Prompt, tool: str) -> dict[str, Any]:
    """Return the schemas of a tool's arguments, as `prompt` declares them."""
    schemas = {row["function"]["name"]: row["function"].get("parameters") for row in prompt.tools}
    return (schemas.get(tool) or {}).get("properties") or {}


def differences(
    record: AnswerParts, message: dict[str, Any], prompt: Prompt, directory: str = CAPTURED_IN
) -> tuple[list[str], list[str]]:
    """Return what of `message` the recorded turn hides, and which rules the rest took."""
    thinking = message.get("reasoning_content") or ""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    differs = {
        "content": text_of(message["content"] or "") != record.content,
        "thinking": thinking not in ("", record.reasoning),
        "calls": [call["name"] for call in calls] != [call.name for call in record.calls],
    }
    hidden = [part for part, is_other in differs.items() if is_other]
    rules = ["thinking-stripped"] if record.reasoning and not thinking else []
    for ours, theirs in () if differs["calls"] else zip(record.calls, calls, strict=True):
        found = _argument_rules(ours.name, ours.arguments, theirs["arguments"], prompt, directory)
        hidden += [f"arguments of {ours.name}"] if None in found else []
        rules += [rule for rule in found if rule]
    return hidden, rules


Rules = list[str | None]  # that make one value of two; None where no rule does


def _argument_rules(name: str, ours: Any, theirs: Any, prompt: Prompt, directory: str) -> Rules:
    """Return the rules that make the arguments one."""
    rules: Rules = []
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return _printed(ours, theirs)
    if name == "Edit" and "replace_all" not in ours and theirs.get("replace_all") is False:
        ours = ours | {"replace_all": False}
        rules.append("replace_all-added")
    if ours.keys() != theirs.keys():
        return [None]
    for key, value in ours.items():
        found = _printed(value, theirs[key])
        if None in found and is_claude(prompt):
            if (name, key) == ("Bash", "command") and value == f"cd {directory} && {theirs[key]}":
                found = ["cd-stripped"]
            elif _is_declared(properties_of(prompt, name).get(key), value, theirs[key]):
                found = ["value-coerced"]
        rules += found
    return rules


def _printed(ours: Any, theirs: Any) -> Rules:
    """Return the rules that make one value of two: numbers as JavaScript prints them."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(value, theirs[key]) for key, value in ours.items()]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = list(zip(ours, theirs, strict=True))
    elif type(ours) is float and type(theirs) is int and ours == theirs:
        return ["number-printed"]
    else:
        return [] if json.dumps(ours) == json.dumps(theirs) else [None]
    return [rule for pair in pairs for rule in _printed(*pair)]


def _is_declared(schema: Any, ours: Any, theirs: Any) -> bool:
    """Whether a string says the number or boolean that its schema wants."""
    kinds = {"integer": (int,), "number": (int, float), "boolean": (bool,)}
    declared = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(ours, str) or type(theirs) not in kinds.get(str(declared), ()):
        return False
    if isinstance(theirs, bool):
        return ours == json.dumps(theirs)
    return bool(_NUMBER.fullmatch(ours)) and float(ours) == theirs
