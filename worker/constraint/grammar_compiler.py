"""Compiles what an answer has to be into a mask of the tokens that may come next."""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.call_grammars import call_grammar
from hearth.worker.constraint.harmony_grammar import call_message, final_message, turn
from hearth.worker.constraint.json_schemas import ToolSchema, fault, tool_of
from hearth.worker.constraint.lark_builder import LENIENT, NEWLINES, TEXT, Expression, Lark
from hearth.worker.constraint.thinking_budget import ThinkingBudget, think_marks
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.stream import harmony_parser
from hearth.worker.stream.model_output_format import OutputFormat

log = logging.getLogger(__name__)

COMPILED_MAX: Final = 32  # grammars that are remembered
SCHEMA_BYTES_MAX: Final = 1_000_000
GRAMMAR_CHARS_MAX: Final = 2_000_000  # of all schemas in it together
LEXER_STATES_MAX: Final = 50_000
_SILENT: Final = 0  # llguidance's log level: above it the answer is quoted on stderr
ANY_OBJECT: Final = {"type": "object"}


class GrammarCompiler:
    """Makes token masks for one model's answers. Owner: the prompt thread.

    Invariant: at most COMPILED_MAX grammars are remembered, and each answer gets a matcher of its
    own.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        end_ids: frozenset[int],
        output_format: OutputFormat,
        token_bytes: Callable[[int], bytes],
        tool_form: str = "native",
    ) -> None:
        """Take mlx-lm's TokenizerWrapper, the number of logits, and the tokens that end a turn.

        `output_format` is that of the model's answers, `tool_form` the form in which its prompts
        show tools.
        """
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.end_ids = end_ids
        self._is_thinking_open = output_format.is_thinking_open
        self._token_bytes = token_bytes
        self._has_channels = tokenizer.get_vocab().keys() >= harmony_parser.MARKS
        self._call_grammar = call_grammar(tokenizer, tool_form)
        self.think_marks = think_marks(tokenizer, self._has_channels, output_format.think_marks)
        self._marks = _marks(tokenizer, output_format.think_marks)
        self._limits = LLParserLimits(verbose_errors=False, max_lexer_states=LEXER_STATES_MAX)
        self._ll_tokenizer: LLTokenizer | None = None  # made at first need: it takes seconds
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @property
    def compiled_count(self) -> int:
        """How many grammars are remembered."""
        return len(self._compiled)

    def token_mask(
        self, constraints: Constraints, tools: list[Any], opening: str, prompt_tokens: int
    ) -> TokenMask | None:
        """Return the mask that holds an answer to its constraints; None where it has none.

        `tools` are those that may be called, in OpenAI's shape; `opening` is the generation
        prompt, and `prompt_tokens` the length of the whole one.

        Raises:
            RequestError: a schema cannot be compiled, or the model has no way to do what is asked.
        """
        assert prompt_tokens >= 0, prompt_tokens
        is_open = self._is_thinking_open(opening)
        try:
            matcher = self._matcher(constraints, tools, opening, is_open)
        except RecursionError:
            raise _refused("A JSON schema is nested too deeply.", None) from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            log.warning("a schema is of a shape that nobody expects", exc_info=error)
            raise _refused("A JSON schema is not one.", None) from None
        thinking = None
        if self.think_marks is not None and constraints.thinking_budget is not None:
            budget = constraints.thinking_budget
            thinking = ThinkingBudget(self.think_marks, budget, is_open, self._token_bytes)
        banned = None
        if constraints.tool_choice == "none" and matcher is None:
            banned = self._marks.get(self.tokenizer.tool_call_start or "")
        if matcher is None and thinking is None and banned is None:
            return None
        return TokenMask(prompt_tokens, matcher, thinking, banned)

    # ------------------------------------------------------------ grammars

    def _matcher(
        self, constraints: Constraints, tools: list[Any], opening: str, is_open: bool
    ) -> LLMatcher | None:
        """Return the matcher of the whole answer, None where it needs none."""
        callable_tools = _callable(constraints, tools)
        lark = Lark(self._marks)
        if constraints.tool_choice == "required":
            last = self._calls(lark, callable_tools, constraints.parallel_calls)
        elif constraints.is_json:
            schema = constraints.schema if constraints.schema is not None else ANY_OBJECT
            last = self._json(lark, schema, callable_tools, constraints)
        elif constraints.tool_choice == "none" and self._has_channels:
            last = final_message(lark, lark.optional(TEXT))
        else:
            return None
        source = lark.source(self._answer(lark, last, opening, is_open))
        return self._compile(source, constraints, callable_tools)

    def _json(
        self, lark: Lark, schema: dict[str, Any], tools: list[ToolSchema], constraints: Constraints
    ) -> Expression:
        """Return an answer in JSON, or calls where the model may call instead."""
        answer = lark.json(schema)
        if self._has_channels:
            answer = final_message(lark, answer)
        may_call = constraints.tool_choice == "auto" and tools
        if not may_call or (self._call_grammar is None and not self._has_channels):
            return answer
        return lark.any_of([answer, self._calls(lark, tools, constraints.parallel_calls)])

    def _calls(self, lark: Lark, tools: list[ToolSchema], is_parallel: bool) -> Expression:
        if self._has_channels:
            return call_message(lark, tools)
        if self._call_grammar is None:
            raise RequestError(
                "tool_choice asks for a tool call, which cannot be enforced in the format in which "
                'this model calls tools. Use tool_choice "auto".',
                code="unsupported_tool_choice",
                param="tool_choice",
            )
        return self._call_grammar.expression(lark, tools, is_parallel)

    def _answer(self, lark: Lark, last: Expression, opening: str, is_open: bool) -> Expression:
        """Return a whole answer that ends with `last`; there may be thinking in front of it."""
        if self._has_channels:
            return turn(lark, last, opening)
        if self.think_marks is None:
            return last
        start, end = self.think_marks.start, self.think_marks.end
        if is_open:
            return lark.row(lark.optional(TEXT), end, NEWLINES, last)
        if end in opening:
            return lark.row(NEWLINES, last)
        block = lark.optional(start, lark.optional(TEXT), end, NEWLINES)
        return lark.row(NEWLINES, block, last)

    # ------------------------------------------------------------ llguidance

    def _compile(self, source: str, constraints: Constraints, tools: list[ToolSchema]) -> LLMatcher:
        """Return a matcher of its own for one answer. Raises RequestError."""
        compiled = self._compiled.pop(source, None)
        if compiled is None:
            if len(source) > GRAMMAR_CHARS_MAX:
                raise _refused(
                    f"The JSON schemas of what may be called are {len(source):,} characters; the "
                    f"limit is {GRAMMAR_CHARS_MAX:,}.",
                    "tools",
                )
            if constraints.schema is not None:
                self._check(constraints.schema, "the answer", "response_format", {})
            compiled = LLMatcher(
                self.ll_tokenizer(), source, log_level=_SILENT, limits=self._limits
            )
            if compiled.is_error():
                for tool in tools:  # one by one they take longer than all of them together
                    self._check(tool.schema, f"the tool {tool.name!r}", "tools", LENIENT)
                raise _refused(f"The answer's grammar: {_error_text(compiled.get_error())}.", None)
        self._compiled[source] = compiled
        if len(self._compiled) > COMPILED_MAX:
            self._compiled.popitem(last=False)
        assert len(self._compiled) <= COMPILED_MAX, len(self._compiled)
        return compiled.deep_copy()

    def _check(
        self, schema: dict[str, Any], whose: str, param: str, options: dict[str, bool]
    ) -> None:
        """Raise RequestError where a schema cannot be compiled, or allows no value."""
        size = len(json.dumps(schema))
        if size > SCHEMA_BYTES_MAX:
            raise _refused(
                f"The JSON schema of {whose} is {size:,} bytes; the limit is {SCHEMA_BYTES_MAX:,}.",
                param,
            )
        place, said = fault(schema, lambda part: self._error(part, options))
        if said:
            raise _refused(f"The JSON schema of {whose} at {place}: {said}.", param)

    def _error(self, schema: dict[str, Any], options: dict[str, bool]) -> str:
        """Return what llguidance says against a schema, "" where it says nothing."""
        lark = Lark(self._marks)
        source = lark.source(lark.json(schema, **options))
        matcher = LLMatcher(self.ll_tokenizer(), source, log_level=_SILENT, limits=self._limits)
        matcher.compute_bitmask()  # some of what allows no value is found at the first token only
        return _error_text(matcher.get_error())

    def ll_tokenizer(self) -> LLTokenizer:
        """Return llguidance's form of the tokenizer. Raises RequestError where there is none."""
        if self._ll_tokenizer is None:
            self._ll_tokenizer = _make_ll_tokenizer(
                self.tokenizer, self._vocab_size, self.end_ids, set(self._marks.values())
            )
        return self._ll_tokenizer


def _callable(constraints: Constraints, tools: list[Any]) -> list[ToolSchema]:
    """Return the tools that may be called. Raises RequestError where one must be and none may."""
    offered = [tool_of(tool["function"]) for tool in tools]
    names = constraints.tool_names
    chosen = [tool for tool in offered if not names or tool.name in names]
    if constraints.tool_choice != "required":
        return chosen
    missing = sorted(set(names) - {tool.name for tool in chosen})
    if missing or not chosen:
        what = f"the tool {missing[0]!r}" if missing else "any tool"
        raise RequestError(
            f"tool_choice asks for a call of {what}, which is not among the request's tools.",
            param="tool_choice",
        )
    return chosen


def _refused(text: str, param: str | None) -> RequestError:
    return RequestError(
        f"{text} Only what can be enforced is accepted; leave that out, or ask in words.",
        code="invalid_grammar",
        param=param,
    )


def _error_text(error: str) -> str:
    """Return the words of llguidance's error without its listing of our grammar."""
    lines = [line.strip() for line in error.partition("<backtrace>")[0].splitlines()]
    kept = [line for line in lines if line and not re.match(r"\d+ \||\^", line)]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(kept))


def _marks(tokenizer: Any, think_marks: tuple[str, str]) -> dict[str, int]:
    """Return the added tokens that mean something: special ones, and those the format is made of.

    Others are ordinary text, as runs of blanks and HTML tags are in some vocabularies.
    """
    found = [*think_marks, tokenizer.tool_call_start, tokenizer.tool_call_end]
    written = f"{tokenizer.chat_template}{''.join(filter(None, found))}"
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or token.content in written)
    }


def _make_ll_tokenizer(
    tokenizer: Any, vocab_size: int, end_ids: frozenset[int], marks: set[int]
) -> LLTokenizer:
    """Return llguidance's form of a tokenizer in which the marks are never part of a text.

    Raises RequestError where llguidance cannot read it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unreadable("it has no fast form")
    config = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    for token in config["added_tokens"]:
        token["special"] = token["special"] or token["id"] in marks
    size = max(vocab_size, len(tokenizer))
    try:
        return LLTokenizer(json.dumps(config), n_vocab=size, eos_token=sorted(end_ids))
    except ValueError as error:
        raise _unreadable(str(error)) from error


def _unreadable(why: str) -> RequestError:
    return RequestError(
        f"Answers of this model cannot be constrained: its tokenizer cannot be read ({why}).",
        code="unsupported_constraint",
    )
