"""Asks questions cold and warm, and says whether the cache changed any answer.

    hearth eval [FILE] --base-url http://127.0.0.1:4000 [--key K] [--count 100]
    hearth eval --save off.json        # then start the server with other settings, and
    hearth eval --compare off.json     # see what these change

FILE has one question a line, as {"input": [messages], "ideal": "B"} (OpenAI evals), as requests
of the batch API with "ideal" beside "body", or as {"messages": [...]} that end with the right
answer. Without FILE the questions that come with Hearth are asked: short ones whose answers stand
in them, so that any model that works has nearly all right.

Every question is asked three times, greedily. cold: apart from the cache. first: with the cache,
behind whatever beginning it shares. warm: once more, all of its prompt kept. An answer of the
latter two that is not the cold one is a change.

Exit status 0: no answer changed; 1: one did; 2: there is no verdict: the server does not answer,
a question was refused, or nothing was kept.
"""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hearth.commands.accuracy.answer_changes import GRADES, Reply
from hearth.commands.accuracy.eval_report import Comparison, EvalReport, PassResult, as_json, show
from hearth.commands.accuracy.question_file import SHIPPED, Question, read_questions
from hearth.commands.accuracy.saved_answers import SavedRun, check_writable, digest_of, load, save
from hearth.commands.server_client import (
    CHAT,
    ProbeError,
    Refused,
    Row,
    Server,
    parser_of,
    run,
    server_of,
)

COLD, FIRST, WARM = "cold", "first", "warm"
PASSES: Final = (COLD, FIRST, WARM)
TOKENS_MAX: Final = 32  # of an answer, where the question does not say
SEED: Final = 0
# A status that says something of the question; any other ends the run.
QUESTION_STATUSES: Final = (400, 413, 422, 500)
# What a question says of these would make its answers differ, or not be one answer.
_OURS: Final = ("model", "stream", "stream_options", "n", "store", "use_kv_cache", "top_logprobs")
_THINKING: Final = (
    *("enable_thinking", "thinking", "thinking_budget", "reasoning", "reasoning_effort"),
    "chat_template_kwargs",
)


# ---------------------------------------------------------------- asking


def body_of(question: Question, options: argparse.Namespace) -> Row:
    """Return what is sent for `question` in every pass, but for the model and the cache.

    The repetition penalty is off unless the question sets it: it would count the letters of
    earlier answers in the prompt against this one.
    """
    body = {name: value for name, value in question.body.items() if name not in _OURS}
    limit = body.pop("max_completion_tokens", None) or body.get("max_tokens") or TOKENS_MAX
    body |= {"temperature": 0, "seed": SEED, "logprobs": True}
    body["max_tokens"] = options.max_tokens or limit
    body.setdefault("repetition_penalty", 1.0)
    if not options.thinking and not any(name in body for name in _THINKING):
        body["enable_thinking"] = False
    return body


def reply_of(told: Row) -> Reply:
    """Return the answer in a chat completion.

    Raises:
        ProbeError: it does not say what of its prompt was cached.
    """
    usage, choice = told["usage"], told["choices"][0]
    if "kv_cache" not in usage:
        raise ProbeError("the answer has no usage.kv_cache: this is no Hearth; ask one")
    message, scores = choice["message"], choice.get("logprobs") or {}
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return Reply(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=tuple(f"{each['name']} {each['arguments']}" for each in functions),
        logprobs=tuple((row["token"], row["logprob"]) for row in scores.get("content") or ()),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["kv_cache"]["prefix_length"],
        source=usage["kv_cache"]["source"],
    )


@dataclass(slots=True)
class Examiner:
    """Asks one server all questions, pass by pass, one after another."""

    server: Server
    bodies: Mapping[str, Row]  # by the question's id
    session: str = field(default_factory=lambda: f"eval-{secrets.token_hex(4)}")

    async def play(self, name: str) -> PassResult:
        """Return what all questions are answered in pass `name`."""
        result, began = PassResult(name), time.monotonic()
        for each in self.bodies:
            await self._ask(result, each)
            _progress(result, len(self.bodies))
        result.took_s = time.monotonic() - began
        return result

    async def _ask(self, result: PassResult, each: str) -> None:
        body = {
            **self.bodies[each],
            "model": await self.server.model_name(),
            "use_kv_cache": result.name != COLD,
        }
        headers = {"x-session-id": self.session}
        try:
            reply = reply_of(await self.server.post(CHAT, body, headers))
        except Refused as refused:
            if refused.status not in QUESTION_STATUSES:
                raise
            result.errors[each] = str(refused)
            return
        if result.name == COLD and reply.cached_tokens:
            raise ProbeError(
                f"{each} was to be asked cold, and {reply.cached_tokens:,} of its tokens were "
                "cached: the server does not keep use_kv_cache: false; update it"
            )
        result.replies[each] = reply


def _progress(result: PassResult, count: int) -> None:
    if sys.stderr.isatty():
        done = len(result.replies) + len(result.errors)
        end = "\n" if done == count else ""
        print(f"\r{result.name}: {done} of {count}", end=end, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- command line


def against(
    saved: SavedRun, digests: Mapping[str, str], passes: Sequence[PassResult]
) -> list[Comparison]:
    """Return what changed since `saved`, in each pass, of the requests that are the same.

    Raises:
        ProbeError: none is.
    """
    same = {each for each, digest in digests.items() if saved.digests.get(each) == digest}
    if not same:
        raise ProbeError(
            f"none of the {len(digests):,} questions was asked so in the saved run; "
            "compare runs of one file with the same options"
        )
    return [
        Comparison.of(
            f"saved {each.name}",
            {name: row for name, row in saved.passes.get(each.name, {}).items() if name in same},
            each.name,
            each.replies,
        )
        for each in passes
    ]


async def eval_answers(options: argparse.Namespace) -> int:
    questions = read_questions(options.file or SHIPPED, options.count)
    saved = load(options.compare) if options.compare else None
    if options.save:
        check_writable(options.save)
    bodies = {question.id: body_of(question, options) for question in questions}
    digests = {each: digest_of(body) for each, body in bodies.items()}
    async with server_of(options) as server:
        examiner = Examiner(server, bodies)
        passes = [await examiner.play(name) for name in PASSES]
    cold, *others = passes
    compared = [Comparison.of(COLD, cold.replies, each.name, each.replies) for each in others]
    grade = options.grade or ("match" if options.file else "includes")
    report = EvalReport(questions, grade, passes, compared, saved)
    if saved is not None:
        report.against = against(saved, digests, passes)
    if options.save:
        save(options.save, SavedRun(digests, {each.name: each.replies for each in passes}))
    if options.json:
        print(json.dumps(as_json(report), ensure_ascii=False))
    else:
        show(report)
    return report.status


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("eval", __doc__)
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="a question a line")
    parser.add_argument("--count", type=_positive, default=100, help="the first so many questions")
    parser.add_argument(
        "--grade",
        choices=GRADES,
        help="an answer is right that begins with the right one (match), or has it anywhere "
        "(includes); default match, and includes for the questions that come with Hearth",
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        help=f"of an answer; default what the question says, else {TOKENS_MAX}",
    )
    parser.add_argument("--thinking", action="store_true", help="leave thinking to the server")
    parser.add_argument("--save", metavar="OUT", type=Path, help="keep the answers in this file")
    parser.add_argument("--compare", metavar="IN", type=Path, help="with a run that was saved")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    return run(eval_answers(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
