"""Writes tools, calls and results as text for models whose chat template has no place for them.

Two forms, beside the model's own where that is known. "manual" is JSON in <tool_call> tags, as
Hermes and Qwen write it; "tool_code" is a Python call in a fenced block, as Gemma 2 and 3 were
trained. What is written here is what hearth.worker.stream reads of such models' answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hearth.shared import written_numbers
from hearth.worker.formats.shared.python_text import python_text

ToolForm = Literal["native", "manual", "tool_code"]  # native: the template's own


@dataclass(frozen=True, slots=True)
class OwnForm:
    """A model's own form of calls, and of results where that is known. Immutable."""

    calls: Callable[[Sequence[dict[str, Any]]], str]  # those of one message, each as `function`
    result: tuple[str, str] | None = None  # what stands around one
    tools: Callable[[Sequence[dict[str, Any]]], str] | None = None  # shows the model functions


_EXAMPLE: Final = {"name": "function_name", "arguments": {"argument_name": "value"}}
_PROMPTS: Final[dict[ToolForm, str]] = {
    "manual": """\
# Tools

You may call functions to help with the user's request. Each line in <tools></tools> is one:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object{place}:
{call}
To call several, write several such blocks. Write nothing behind the last one and wait: each \
result comes back in {result}.""",
    "tool_code": """\
You have access to functions. Each line here is one, with its parameters as a JSON schema:
{tools}

If you decide to call a function, write the call in Python, wrapped in ```tool_code```. Give every \
argument its name, and use literal values only:
```tool_code
function_name(argument_name="value", other_name=3)
```
To call several, write several such blocks. Write nothing behind the last one and wait: each \
result comes back in ```tool_output```.""",
}
_RESULTS: Final[dict[ToolForm, tuple[str, str]]] = {
    "manual": ("<tool_response>\n", "\n</tool_response>"),
    "tool_code": ("```tool_output\n", "\n```"),
}


def markup(form: ToolForm, own: OwnForm | None) -> str:
    """Return all that is written in these forms around names, arguments and results."""
    texts = [] if form == "native" else [tool_prompt((), form, own), *_RESULTS[form]]
    return "\n".join(texts if own is None else [*texts, own.calls([_EXAMPLE]), *(own.result or ())])


def tool_prompt(tools: Sequence[Any], form: ToolForm, own: OwnForm | None = None) -> str:
    """Return the text that shows the model its tools; `form` is not "native"."""
    assert form != "native"
    functions = [tool["function"] for tool in tools]
    if own and own.tools:
        return own.tools(functions)
    shown = tools if form == "manual" else functions
    call = own.calls([_EXAMPLE]) if own else call_text(_EXAMPLE, form)
    return _PROMPTS[form].format(
        tools="\n".join(map(written_numbers.dumps, shown)),
        place=" in <tool_call></tool_call>" if call.startswith("<tool_call>") else "",
        call=call,
        result=result_text("", form, own).replace("\n", ""),
    )


def call_text(function: dict[str, Any], form: ToolForm) -> str:
    """Return a call as the model is asked to write it; `function` has its name and arguments.

    In JSON also where the template shows tools, but no calls.
    """
    name, arguments = function["name"], function["arguments"]
    if form == "tool_code":
        return f"```tool_code\n{python_text(name, arguments)}\n```"
    call = written_numbers.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def result_text(content: str, form: ToolForm, own: OwnForm | None = None) -> str:
    """Return the result of a call in the form that the tool prompt announces."""
    usual = _RESULTS["tool_code" if form == "tool_code" else "manual"]
    start, end = own.result if own and own.result else usual
    return f"{start}{content}{end}"
