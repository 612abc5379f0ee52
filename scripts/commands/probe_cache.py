"""Checks a server's prefix cache with four short conversations of its own, or five with an image.

    hearth probe --base-url http://127.0.0.1:4000 [--key K] [--tokens 2000] [--image shot.png]

normal     three turns are appended: the third finds nearly all of its prompt
drift      one volatile field changes at each turn: it stays the same line, nothing is rejected
semantic   an earlier tool result changes: what stands from the change on is prefilled again
insertion  a message is inserted in mid-history: all before it is reused
image      with --image: a turn of words behind an image finds nearly all of its prompt

Exit status 0: all as expected; 1: something is not; 2: the server does not answer.
"""

import argparse
import math
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.commands.probe_images import ProbeImage, add_image_options, hit_misses, probe_images
from hearth.commands.server_client import (
    MESSAGES,
    Answer,
    Row,
    Server,
    parser_of,
    run,
    server_of,
    table,
    verdict,
)

# A prefill is not cut within 64 tokens of the last cut (worker/prompt/prefill_cuts.py), so that a
# hybrid model resumes up to so far before what changed; 16 are for the generation prompt, which
# `count` counts in.
CUT_SLACK_TOKENS: Final = 64 + 16
ANSWER_TOKENS_MAX: Final = 16
REJECTED, DRIFT, TRIM_MISS, RETREAT = (
    "exact_key_rejected_by_model_lcp",
    "canonical_drift",
    "hybrid_trim_miss",
    "vlm_retreat",
)
TOOLS: Final = [
    {
        "name": "read",
        "description": "Returns the content of a file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]


@dataclass(slots=True)
class Talk:
    """One conversation, in Anthropic's shape."""

    session: str
    system: list[Row]
    messages: list[Row] = field(default_factory=list)

    def body(self, messages: Sequence[Row] | None = None) -> Row:
        shown = self.messages if messages is None else messages
        return {"system": self.system, "messages": list(shown), "tools": TOOLS}

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def show(self, images: Sequence[ProbeImage], text: str) -> None:
        blocks = [*(image.messages_block for image in images), {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": blocks})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text or "Done."})


@dataclass(slots=True)
class Report:
    """What a scenario has to tell."""

    name: str
    rows: list[list[Any]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    def expect(self, is_met: bool, otherwise: str) -> None:
        if not is_met:
            self.misses.append(f"{self.name}: {otherwise}")

    def expect_between(self, cached: int, floor: int, ceiling: int) -> None:
        """Expect all before a change to be reused, and nothing from it on; in tokens."""
        hidden = f"{cached:,} tokens cached, but the change stands before {ceiling:,}"
        self.expect(cached < ceiling, f"{hidden}: it was hidden")
        unused = f"{cached:,} tokens cached of at least {floor:,} that stand before the change"
        self.expect(cached >= floor, unused)


@dataclass(slots=True)
class Probe:
    """Starts conversations on one server and asks them."""

    server: Server
    hit_min: float
    session: str
    sentences: int = 0  # that make a system prompt as long as was asked for
    images: Sequence[ProbeImage] = ()
    image_hit_min: float = 0.0

    def talk(self, name: str) -> Talk:
        """Return a conversation that shares no beginning with any other."""
        session = f"{self.session}-{name}"
        rules = (f" Rule {n}: read what you are given twice." for n in range(self.sentences))
        text = f"Session {session}. You are careful and brief.{''.join(rules)}"
        return Talk(session, [{"type": "text", "text": text}])

    async def fit(self, tokens: int) -> None:
        """Choose the length of all system prompts so that one is about `tokens` long."""
        sizes = []
        for self.sentences in (0, 64):
            talk = self.talk("size")
            talk.say("hi")
            sizes.append(await self.server.count(talk.body()))
        self.sentences = max(0, math.ceil((tokens - sizes[0]) * 64 / (sizes[1] - sizes[0])))

    async def ask(self, report: Report, step: str, talk: Talk) -> Answer:
        """Send `talk`, add its answer to it and a row to `report`."""
        body = talk.body() | {
            "max_tokens": ANSWER_TOKENS_MAX,
            "thinking": {"type": "disabled"},
        }
        answer = await self.server.ask(MESSAGES, body, {"x-session-id": talk.session})
        tokens = answer.tokens
        hit = f"{tokens.cached / tokens.prompt:.4f}"
        report.rows.append([report.name, step, tokens.prompt, tokens.cached, tokens.prefilled, hit])
        talk.answer(answer.text)
        return answer


# ---------------------------------------------------------------- normal


async def normal(probe: Probe) -> Report:
    report, talk = Report("normal"), probe.talk("normal")
    for number in (1, 2, 3):
        talk.say(f"Question {number}: which rule comes first?")
        answer = await probe.ask(report, f"turn {number}", talk)
    hit = answer.tokens.cached / answer.tokens.prompt
    report.expect(hit >= probe.hit_min, f"turn 3 hit {hit:.4f}, expected {probe.hit_min}")
    return report


# ---------------------------------------------------------------- drift

# As clients send them (proxy/request/volatile_fields.py names which); {v} is what changes.
BILLING: Final = "x-anthropic-billing-header: cc_version=2.1.32{v}; cc_entrypoint=cli; cch=5644{v};"
VOLATILE: Final = {
    "message id": "[message_id: om_x100b5f{v}]",
    "current time": "Current time is 2026-11-21 09:3{v} UTC",
    "inbound context": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions: {v}\n"
    "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
    "run statistics": "Stats: runtime 1{v}s • tokens 8.{v}k (in 8.0k / out 0.{v}k)",
}
HEADER: Final = "billing header"  # telemetry: the model never sees it, so no token differs
# What each request changes, one after another: (field, its version; None = the field is gone).
DRIFTS: Final[Sequence[tuple[str, int | None]]] = (
    *((name, 2) for name in VOLATILE),
    ("inbound context", None),
    (HEADER, 2),
)


def drifted(talk: Talk, versions: Mapping[str, int | None]) -> Talk:
    """Return `talk` with the volatile fields in its first system and user messages."""
    shown = [text.format(v=versions[name]) for name, text in VOLATILE.items() if versions[name]]
    first = {"role": "user", "content": "\n".join([*shown, talk.messages[0]["content"]])}
    header = {"type": "text", "text": BILLING.format(v=versions[HEADER])}
    return Talk(talk.session, [header, *talk.system], [first, *talk.messages[1:]])


async def drift(probe: Probe) -> Report:
    report, talk = Report("drift"), probe.talk("drift")
    versions: dict[str, int | None] = {name: 1 for name in (*VOLATILE, HEADER)}
    talk.say("Question 0: which rule comes first?")
    talk.answer((await probe.ask(report, "first", drifted(talk, versions))).text)
    for number, (name, version) in enumerate(DRIFTS, start=1):
        versions[name] = version
        step = f"{name} {'changed' if version else 'gone'}"
        talk.say(f"Question {number}: and then?")
        before = await probe.server.counters()
        answer = await probe.ask(report, step, drifted(talk, versions))
        talk.answer(answer.text)
        rise = since(before, await probe.server.counters())
        report.expect(rise[REJECTED] == 0, f"{step}: {REJECTED} rose by {rise[REJECTED]}")
        if name == HEADER:
            hit = answer.tokens.cached / answer.tokens.prompt
            report.expect(rise[DRIFT] == 0, f"{step}: {DRIFT} rose although no token differs")
            report.expect(hit >= probe.hit_min, f"{step}: hit {hit:.4f}, expected {probe.hit_min}")
        else:
            report.expect(rise[DRIFT] > 0, f"{step}: {DRIFT} did not rise")
        lines = len(await probe.server.lines(talk.session))
        report.expect(lines == 1, f"{step}: the session has {lines} lines, expected 1")
    return report


def since(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}


# ---------------------------------------------------------------- semantic change, insertion


NOTES: Final = "The notes begin here. The limit is "


def reading(content: str) -> list[Row]:
    """Return a call of the tool, and `content` as its result."""
    use = {"type": "tool_use", "id": "call1", "name": "read", "input": {"path": "notes.md"}}
    result = {"type": "tool_result", "tool_use_id": "call1", "content": content}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


async def semantic(probe: Probe) -> Report:
    """An earlier tool result changes in one word, with much behind it."""
    report, talk = Report("semantic"), probe.talk("semantic")
    behind = " tokens." + " The notes go on." * 20
    talk.say("Read notes.md and tell me the limit.")
    floor = await probe.server.count(talk.body()) - CUT_SLACK_TOKENS
    ceiling = await probe.server.count(talk.body([*talk.messages, *reading(NOTES)]))
    talk.messages += reading(f"{NOTES}forty{behind}")
    await probe.ask(report, "the limit is forty", talk)
    talk.messages[1:3] = reading(f"{NOTES}ninety{behind}")
    talk.say("And the limit is?")
    tokens = (await probe.ask(report, "the limit is ninety", talk)).tokens
    report.expect_between(tokens.cached, floor, ceiling)
    return report


async def insertion(probe: Probe) -> Report:
    """A message is inserted behind the second question, with an answer and a question behind it."""
    report, talk = Report("insertion"), probe.talk("insertion")
    talk.say("Question 1: which rule comes first?")
    await probe.ask(report, "turn 1", talk)
    talk.say("Question 2: and which comes second? " + "Think of every rule above. " * 8)
    place = len(talk.messages)
    floor = await probe.server.count(talk.body()) - CUT_SLACK_TOKENS
    await probe.ask(report, "turn 2", talk)
    inserted = {"role": "user", "content": "The file notes.md was changed by someone else."}
    ceiling = await probe.server.count(talk.body([*talk.messages[:place], inserted]))
    talk.messages.insert(place, inserted)
    talk.say("Question 3: and which comes third?")
    tokens = (await probe.ask(report, "inserted before turn 2's answer", talk)).tokens
    report.expect_between(tokens.cached, floor, ceiling)
    return report


# ---------------------------------------------------------------- images


async def image(probe: Probe) -> Report:
    """A question about the images, and one of words behind it."""
    report, talk = Report("image"), probe.talk("image")
    talk.show(probe.images, "What is this?")
    await probe.ask(report, "turn 1, the image is new", talk)
    talk.say("And what stands out most?")
    tokens = (await probe.ask(report, "turn 2, words behind it", talk)).tokens
    report.misses += hit_misses(tokens.prompt, tokens.cached, probe.image_hit_min)
    return report


# ---------------------------------------------------------------- command line

IMAGE: Final = "image"  # the scenario that takes --image
SCENARIOS: Final[Mapping[str, Callable[[Probe], Awaitable[Report]]]] = {
    "normal": normal,
    "drift": drift,
    "semantic": semantic,
    "insertion": insertion,
    IMAGE: image,
}
# A hybrid or window model that resumes before what is the same, since its state was not kept there.
TRIMS_MAX: Final = {
    "normal": 0,
    "drift": len(DRIFTS) - 1,
    "semantic": 1,
    "insertion": 1,
    IMAGE: 0,
}


def counter_rows(rise: Mapping[str, int], names: Sequence[str]) -> list[tuple[str, int, str, bool]]:
    """Return for each counter by how much it rose, what is expected, and whether that is met."""
    drifts = len(DRIFTS) - 1 if "drift" in names else 0
    trims = sum(TRIMS_MAX[name] for name in names)
    retreat = (RETREAT, rise[RETREAT], "0", rise[RETREAT] == 0)
    return [
        (REJECTED, rise[REJECTED], "0", rise[REJECTED] == 0),
        (DRIFT, rise[DRIFT], f"{drifts}", rise[DRIFT] == drifts),
        (TRIM_MISS, rise[TRIM_MISS], f"at most {trims}", rise[TRIM_MISS] <= trims),
        *([retreat] if IMAGE in names else []),
    ]


async def probe_session(options: argparse.Namespace) -> int:
    names = options.only or [name for name in SCENARIOS if name != IMAGE or options.image]
    async with server_of(options) as server:
        probe = Probe(server, options.hit, f"probe-{secrets.token_hex(4)}")
        probe.images = await probe_images(options, server)
        probe.image_hit_min = options.image_hit
        await probe.fit(options.tokens)
        before = await server.counters()
        reports = [await SCENARIOS[name](probe) for name in names]
        counts = counter_rows(since(before, await server.counters()), names)
    head = ("scenario", "request", "prompt", "cached", "prefilled", "hit")
    print(table(head, [row for report in reports for row in report.rows]), end="\n\n")
    print(table(("counter", "rose by", "expected"), [row[:3] for row in counts]))
    misses = [miss for report in reports for miss in report.misses]
    misses += [
        f"{name} rose by {rise}, expected {wish}" for name, rise, wish, met in counts if not met
    ]
    return verdict(misses, f"{', '.join(names)} as expected")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("probe", __doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="of each system prompt, about")
    parser.add_argument("--hit", type=float, default=0.97, help="what an appended turn must reach")
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="may be repeated")
    add_image_options(parser)
    options = parser.parse_args(arguments)
    if IMAGE in (options.only or ()) and not options.image:
        parser.error("--only image needs an --image PATH to show")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return run(probe_session(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
