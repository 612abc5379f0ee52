"""Plays an agent: a tool loop on the model's own answers, with two sub-agents in its middle.

    hearth probe-agent --base-url http://127.0.0.1:4000 [--key K] [--turns 6] [--echo stripped]
    hearth probe-agent --image screenshot.png

Each answer is sent back as a client would (--echo): verbatim; stripped of its thinking; or trimmed
at both ends with the tool arguments written anew. Where the model calls a tool, a canned result
follows; where it does not, the next task does. Within each line a request must prefill no more
than what is new in it: its prompt less the prompt and the answer before it, and --slack tokens.

Exit status 0: none prefilled more; 1: one did; 2: the server does not answer.
"""

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.commands.probe_images import ProbeImage, add_image_options, hit_misses, probe_images
from hearth.commands.server_client import (
    CHAT,
    SLACK_TOKENS,
    Answer,
    Row,
    Server,
    parser_of,
    run,
    server_of,
    table,
    verdict,
)

SUB_AGENTS: Final = ("agentone", "agenttwo")
SUB_TURNS: Final = 3
MAIN: Final = "main"  # the orchestrator's line
DIRECTORY: Final = "/home/dev/textkit"
TOOLS: Final = {  # name -> (what it does, its parameters)
    "bash": ("Runs a command in a shell.", "command timeout_s"),
    "read": ("Returns a file's content, or some lines of it.", "path offset limit"),
    "write": ("Writes a file, over what was there.", "path content"),
    "edit": ("Replaces a text in a file by another.", "path old new replace_all"),
    "glob": ("Lists the files whose path matches a pattern.", "pattern path"),
    "grep": ("Lists the lines that match a regular expression.", "pattern path context"),
    "list": ("Lists a directory.", "path"),
    "fetch": ("Returns a page as text.", "url"),
    "todo": ("Sets the list of what is left to do.", "items"),
    "task": ("Has a sub-agent do something and report.", "description prompt"),
    "notebook": ("Edits a cell of a notebook.", "path cell source"),
    "ask": ("Asks the user a question.", "question options"),
}
RESULT: Final = "src/words.py: 212 lines\nsrc/lines.py: 87 lines\ntests/test_words.py: 140 lines\n"
TASKS: Final = (
    "Find out what this project does.",
    "Which of its modules is the longest?",
    "Write down what its tests leave out.",
    "Which function would you test first, and how?",
    "Say in one sentence what you changed.",
)


def tool_rows() -> list[Row]:
    """Return the tools as chat completions have them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": about,
                "parameters": {
                    "type": "object",
                    "properties": {each: {"type": "string"} for each in parameters.split()},
                    "required": parameters.split()[:1],
                },
            },
        }
        for name, (about, parameters) in TOOLS.items()
    ]


# ---------------------------------------------------------------- echoes


def echoed(answer: Answer, how: str) -> Row:
    """Return the assistant message that a client makes of `answer`."""
    text, reasoning, calls = answer.text, answer.reasoning, answer.calls
    if how == "stripped":
        reasoning = ""
    elif how == "trimmed":
        text, reasoning = text.strip(), reasoning.strip()
        calls = [rewritten(call) for call in calls]
    message: Row = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def rewritten(call: Row) -> Row:
    """Return `call` with its arguments parsed and written as a client in JavaScript does."""
    inner = call["function"]
    try:
        given = json.loads(inner["arguments"], parse_float=_as_javascript)
    except ValueError:
        return call
    arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    return call | {"function": inner | {"arguments": arguments}}


def _as_javascript(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1e21 else number


# ---------------------------------------------------------------- a line


@dataclass(frozen=True, slots=True)
class Cost:
    """One request of a line, in tokens."""

    who: str
    turn: int
    prompt: int
    new: int  # of the prompt, behind the prompt and the answer before it
    cached: int
    prefilled: int
    calls: int

    @property
    def excess(self) -> int:
        """What it prefilled although it was known; 0 for a line's first request."""
        return self.prefilled - self.new if self.turn > 1 else 0


@dataclass(slots=True)
class Agent:
    """One line: an orchestrator, or a sub-agent of it."""

    server: Server
    options: argparse.Namespace
    session: str
    name: str  # empty = the orchestrator
    images: Sequence[ProbeImage] = ()  # that its first task shows
    messages: list[Row] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    known: int = 0  # tokens of the last prompt and its answer

    def __post_init__(self) -> None:
        who = f"a sub-agent ({self.name}) that reports in one line" if self.name else "an agent"
        system = f"You are {who}. Session {self.session}.\nWorking directory: {DIRECTORY}\n"
        self.messages.append({"role": "system", "content": system + "Use the tools you have."})
        shown = [image.chat_part for image in self.images]
        content = [*shown, {"type": "text", "text": TASKS[0]}] if shown else TASKS[0]
        self.messages.append({"role": "user", "content": content})

    async def play(self, turns: int) -> None:
        """Ask `turns` times, each time with the answer before and what follows from it."""
        headers = {"x-claude-code-session-id": self.session}
        if self.name:
            headers["x-claude-code-agent-id"] = self.name
        for _ in range(turns):
            body = {
                "messages": self.messages,
                "tools": tool_rows(),
                "max_tokens": self.options.max_tokens,
            }
            answer = await self.server.ask(CHAT, body, headers)
            self._note(answer)
            self.messages.append(echoed(answer, self.options.echo))
            self.messages += self._next(answer.calls)

    def _note(self, answer: Answer) -> None:
        tokens = answer.tokens
        self.costs.append(
            Cost(
                who=self.name or MAIN,
                turn=len(self.costs) + 1,
                prompt=tokens.prompt,
                new=max(0, tokens.prompt - self.known),
                cached=tokens.cached,
                prefilled=tokens.prefilled,
                calls=len(answer.calls),
            )
        )
        self.known = tokens.prompt + tokens.completion

    def _next(self, calls: Sequence[Row]) -> list[Row]:
        """Return a result for each call; without any, the next task."""
        if calls:
            return [
                {"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls
            ]
        return [{"role": "user", "content": TASKS[len(self.costs) % len(TASKS)]}]


# ---------------------------------------------------------------- command line


async def play(
    server: Server, options: argparse.Namespace, images: Sequence[ProbeImage]
) -> list[Cost]:
    """Return the costs of the orchestrator's first half, of its sub-agents, of its second half."""
    session = f"probe-{secrets.token_hex(4)}"
    main = Agent(server, options, session, "", images)
    await main.play(options.turns // 2)
    first = len(main.costs)
    agents = [Agent(server, options, session, name) for name in SUB_AGENTS]
    await asyncio.gather(*(agent.play(SUB_TURNS) for agent in agents))
    await main.play(options.turns - first)
    costs = main.costs[:first]
    for agent in agents:
        costs += agent.costs
    return costs + main.costs[first:]


def cost_row(cost: Cost) -> tuple[Any, ...]:
    figures = (cost.turn, cost.calls, cost.prompt, cost.new, cost.cached, cost.prefilled)
    return (cost.who, *figures, cost.excess)


async def agent_probe(options: argparse.Namespace) -> int:
    async with server_of(options) as server:
        images = await probe_images(options, server)
        costs = await play(server, options, images)
    head = ("line", "turn", "calls", "prompt", "new", "cached", "prefilled", "excess")
    print(table(head, [cost_row(each) for each in costs]))
    misses = [
        f"{each.who} turn {each.turn} prefilled {each.prefilled:,}, new were {each.new:,}"
        for each in costs
        if each.excess > options.slack
    ]
    if images:
        second = next(each for each in costs if (each.who, each.turn) == (MAIN, 2))
        misses += hit_misses(second.prompt, second.cached, options.image_hit)
    worst = max(each.excess for each in costs)
    return verdict(misses, f"{len(costs)} requests, at most {worst:,} tokens beyond what was new")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("probe-agent", __doc__)
    parser.add_argument("--turns", type=int, default=6, help="of the main line")
    parser.add_argument("--echo", choices=("verbatim", "stripped", "trimmed"), default="verbatim")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--slack", type=int, default=SLACK_TOKENS, help="tokens beyond what is new")
    add_image_options(parser)
    options = parser.parse_args(arguments)
    if options.image and options.turns < 2:
        parser.error(f"--turns is {options.turns}, and --image is judged by turn 2: use 2 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return run(agent_probe(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
