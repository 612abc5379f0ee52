"""Compiles the constraints of an answer into a mask of the tokens that may come next."""

import functools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from llguidance import LLTokenizer

from hearth.shared.errors import RequestError
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.call_drafts import CallDrafts, CallShape, ForcedTexts
from hearth.worker.constraint.call_grammars import (
    LENIENT,
    NEWLINES,
    NOTHING,
    TEXT,
    CallGrammar,
    CallsWriter,
    Expression,
    Lark,
    MessageGrammar,
)
from hearth.worker.constraint.compiled_grammar import (
    Grammar,
    GrammarAnswer,
    GrammarBuild,
    NamedSchema,
    check_size,
    refused,
)
from hearth.worker.constraint.json_schemas import ToolSchema, tool_of, with_quoted_references
from hearth.worker.constraint.token_mask import ThinkingBudget, TokenMask, think_marks

log = logging.getLogger(__name__)

OWNERS_MAX: Final = 64  # API keys with remembered forced texts: some 100 KB each
IDLE_S: Final = 45.0  # time that an unused grammar is kept; it is gone within a minute
HELD_BYTES_MAX: Final = 256 << 20  # bytes of all remembered grammars
GRAMMAR_BYTES: Final = 12 << 20  # added to each grammar's measured memory, as lexers grow
ANY_OBJECT: Final = {"type": "object"}
COUNTED: Final = ("refused", "ended", "left_out", "answers_ended", "call_drafts_ended")


class GrammarCompiler:
    """Makes token masks for one model's answers. Any thread may use it.

    Invariant: remembered grammars hold at most HELD_BYTES_MAX. A grammar is remembered only for the
    owner, an API key, of its request. Writing an answer starts no process.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        end_ids: frozenset[int],
        token_bytes: Callable[[int], bytes],
        grammar: CallGrammar | MessageGrammar | None,
        marks: tuple[str, ...],
        is_thinking_open: Callable[[str], bool],
    ) -> None:
        """`tokenizer` is mlx-lm's TokenizerWrapper, `vocab_size` the number of logits.

        The tokens `end_ids` end a turn. `grammar` describes the model's calls, or its messages.
        `marks` open and close thinking. `is_thinking_open` returns whether a prompt begins
        thinking.
        """
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.end_ids = end_ids
        self._is_thinking_open = is_thinking_open
        self._token_bytes = token_bytes
        self._messages = grammar if isinstance(grammar, MessageGrammar) else None
        self._call_grammar = grammar if isinstance(grammar, CallGrammar) else None
        self.think_marks = think_marks(tokenizer, self._messages, marks)
        self._marks = _marks(tokenizer, marks, self._call_grammar)
        self._tokens: LLTokenizer | None = None  # see `load`
        self._loading = threading.Lock()
        self.clock = awake_s  # measures how long a grammar was idle
        # Kept for one key: compiled grammars, 256 MB
        self._compiled: MemoryByOwner[str, Grammar] = MemoryByOwner(  # grammars by their source
            HELD_BYTES_MAX, lambda _, grammar: GRAMMAR_BYTES + grammar.held_bytes
        )
        self._lock = threading.Lock()  # guards the counts
        self.counts: Counter[str] = Counter()
        # Kept for one key: tokens of drafted calls
        self._draft_texts: MemoryByOwner[str, ForcedTexts] = MemoryByOwner(OWNERS_MAX)

    def report(self) -> dict[str, int]:
        """Return the counts of remembered grammars, refused requests and passed limits.

        `left_out` counts grammars that lack a part of a tool's schema. `call_drafts_ended` counts
        answers that went on without drafts of their calls.
        """
        return {"remembered": len(self._compiled)} | {name: self.counts[name] for name in COUNTED}

    def token_mask(
        self,
        constraints: Constraints,
        tools: list[Any],
        opening: str,
        prompt_tokens: int,
        owner: str = "",
    ) -> TokenMask | None:
        """Return the mask that enforces an answer's constraints; None without constraints.

        `tools` are the callable tools in OpenAI's shape. `opening` is the generation prompt, and
        `prompt_tokens` the length of the whole prompt. A compiled grammar is remembered for `owner`
        alone, so that no other API key can tell by the speed what was asked.

        Raises:
            RequestError: a schema cannot be compiled, or the model's format cannot be constrained.
        """
        assert prompt_tokens >= 0, prompt_tokens
        is_open = self._is_thinking_open(opening)
        try:
            compiled = self._grammar(constraints, tools, opening, is_open, owner)
        except RequestError:
            with self._lock:
                self.counts["refused"] += 1
            raise
        thinking = None
        if self.think_marks is not None and constraints.thinking_budget is not None:
            thinking = ThinkingBudget(
                self.think_marks, constraints.thinking_budget, is_open, self._token_bytes
            )
        banned = None
        if constraints.tool_choice == "none" and compiled is None:
            mark = self._call_grammar.mark if self._call_grammar else ""
            banned = next((self._marks[token] for token in self._marks if token in mark), None)
        if compiled is None and thinking is None and banned is None:
            return None
        answer = GrammarAnswer(compiled) if compiled is not None else None
        return TokenMask(prompt_tokens, answer, thinking, banned, self.counts)

    def load(self) -> None:
        """Read the tokenizer before the first request.

        llguidance blocks every thread meanwhile: a second for 150,000 tokens. If the tokenizer
        cannot be read, requests with constraints are refused later.
        """
        try:
            self._ll_tokenizer()
        except RequestError as error:
            log.warning("answers cannot be constrained code=%s", error.code)

    # ------------------------------------------------------------ drafts

    def call_drafts(
        self, constraints: Constraints, tools: list[Any], owner: str | None = ""
    ) -> CallDrafts | None:
        """Return a predictor of the answer's calls; None if it could predict nothing.

        That is so if no tool may be called, if the model's format has no grammar, or if the token
        mask constrains the whole answer. `tools` are the callable tools. Forced text is tokenised
        once for each owner; for the owner None, nothing is remembered.
        """
        grammar = self._messages or self._call_grammar
        is_free = constraints.tool_choice == "auto" and not constraints.is_json
        if grammar is None or not grammar.mark or not tools or not is_free:
            return None
        builder = CallShape(is_as_templates=not self._messages)
        calls: CallsWriter = (
            grammar.addressed_call if isinstance(grammar, MessageGrammar) else grammar.expression
        )
        try:
            known = [tool.contained() for tool in _callable_tools(constraints, tools)]
            shape = builder.shape(calls(builder, known, constraints.parallel_calls))
        except Exception as error:  # a client's schema may be anything; drafts are optional
            log.info("calls of an answer are not drafted: %s", type(error).__name__)
            self.counts["call_drafts_ended"] += 1
            return None
        texts = self._draft_texts.get(owner, "") if owner is not None else None
        if texts is None:
            texts = ForcedTexts(self._tokens_of, self._token_bytes, frozenset(self._marks.values()))
            if owner is not None:
                self._draft_texts.put(owner, "", texts)
        return CallDrafts(grammar.mark, shape, builder.order, texts, self.counts)

    def _tokens_of(self, text: str) -> Sequence[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    # ------------------------------------------------------------ grammars

    def _grammar(
        self,
        constraints: Constraints,
        tools: list[Any],
        opening: str,
        is_open: bool,
        owner: str,
    ) -> Grammar | None:
        """Return the grammar of the whole answer, None if it needs none. Raises RequestError."""
        try:
            callable_tools = _callable_tools(constraints, tools)
            if constraints.tool_choice == "required" or constraints.is_json:
                callable_tools = [
                    replace(tool, schema=with_quoted_references(tool.schema))
                    for tool in callable_tools
                ]
            if constraints.schema is not None:
                check_size(NamedSchema(constraints.schema, "the answer", "response_format", {}))
                constraints = replace(
                    constraints, schema=with_quoted_references(constraints.schema)
                )
            write = functools.partial(self._source, constraints, opening=opening, is_open=is_open)
            source = write(callable_tools)
            if source is None:
                return None
            self._compiled.drop(lambda grammar: grammar.is_spent)
            compiled = self._compiled.get(owner, source)
            if compiled is None:
                compiled = self._compile(source, constraints, callable_tools, write)
            compiled.used_at = self.clock()
            self._compiled.put(owner, source, compiled)
            return compiled
        except RecursionError:
            raise refused("A JSON schema is nested too deeply.", None) from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            log.warning("a schema is of a shape that nobody expects", exc_info=error)
            raise refused("A JSON schema is not one.", None) from None

    def _source(
        self,
        constraints: Constraints,
        callable_tools: list[ToolSchema],
        opening: str,
        is_open: bool,
    ) -> str | None:
        """Return the grammar in Lark, None if the answer needs none."""
        messages = self._messages if constraints.tool_choice == "none" else None
        if constraints.tool_choice != "required" and not constraints.is_json and not messages:
            return None
        lark = Lark(self._marks)
        if constraints.tool_choice == "required":
            last = self._calls(lark, callable_tools, constraints.parallel_calls)
        elif constraints.is_json:
            last = lark.json(ANY_OBJECT if constraints.schema is None else constraints.schema)
            if self._messages:
                last = self._messages.final_message(lark, last)
            # The model may call a tool instead.
            if (
                constraints.tool_choice == "auto"
                and callable_tools
                and (self._messages or self._call_grammar)
            ):
                calls = self._calls(lark, callable_tools, constraints.parallel_calls)
                last = lark.any_of([last, calls])
        else:
            assert messages is not None
            last = messages.final_message(lark, lark.optional(TEXT))
        return lark.source(self._answer(lark, last, opening, is_open))

    def _calls(self, lark: Lark, tools: list[ToolSchema], is_parallel: bool) -> Expression:
        if self._messages:
            return self._messages.call_message(lark, tools, is_parallel)
        if self._call_grammar is None:
            raise RequestError(
                "tool_choice asks for a tool call, which cannot be enforced in the format in which "
                'this model calls tools. Use tool_choice "auto".',
                code="unsupported_tool_choice",
                param="tool_choice",
            )
        return self._call_grammar.expression(lark, tools, is_parallel)

    def _answer(self, lark: Lark, last: Expression, opening: str, is_open: bool) -> Expression:
        """Return a whole answer that ends with `last`, maybe after thinking."""
        if self._messages:
            return self._messages.turn(lark, last, opening)
        if self.think_marks is None:
            return last
        start, end = self.think_marks.start, self.think_marks.end
        if is_open:
            ends = map(lark.text_until, (end, *self.think_marks.others))
            return lark.concat(lark.any_of(ends), NEWLINES, last)
        if end in opening:
            return lark.concat(NEWLINES, last)
        block = lark.optional(start, lark.text_until(end), NEWLINES)
        return lark.concat(NEWLINES, block, last)

    # ------------------------------------------------------------ memory

    def end_idle(self, idle_s: float = IDLE_S) -> None:
        """Forget grammars that were not used for `idle_s` seconds; answers keep their own.

        The inference thread calls this at each iteration, and when the cache is emptied.
        """
        oldest = self.clock() - idle_s
        self._compiled.drop(lambda grammar: grammar.is_spent or grammar.used_at <= oldest)

    def _compile(
        self,
        source: str,
        constraints: Constraints,
        tools: list[ToolSchema],
        write: Callable[[list[ToolSchema]], str | None],
    ) -> Grammar:
        """Compile a grammar, and count it if a part is not enforced. Raises RequestError.

        `write` returns the answer's source with other schemas of the tools.
        """
        schemas = [
            NamedSchema(tool.schema, f"the tool {tool.name!r}", "tools", LENIENT) for tool in tools
        ]
        if constraints.schema is not None:
            schemas.append(NamedSchema(constraints.schema, "the answer", "response_format", {}))
        build = GrammarBuild(
            self._ll_tokenizer(),
            self._marks,
            schemas,
            lambda enforced: (
                write([replace(a, schema=b.schema) for a, b in zip(tools, enforced, strict=False)])
                or ""
            ),
        )
        try:
            grammar = build.compile(source)
        except RequestError:
            with self._lock:
                self.counts["ended"] += build.is_ended
            raise
        if build.left_out:
            log.info("left out of a grammar keywords=%r", ", ".join(sorted({*build.left_out})))
            with self._lock:
                self.counts["left_out"] += 1
        return grammar

    def _ll_tokenizer(self) -> LLTokenizer:
        """Return llguidance's tokenizer for the model. Raises RequestError if it has none."""
        with self._loading:
            if self._tokens is None:
                config, ends = self.tokenizer_config(), sorted(self.end_ids)
                size = max(self._vocab_size, len(self.tokenizer))
                try:
                    self._tokens = LLTokenizer(config, n_vocab=size, eos_token=ends)
                except ValueError as error:
                    raise _unreadable(str(error)) from None
            return self._tokens

    def tokenizer_config(self) -> str:
        """Return the tokenizer's JSON, in which marks are tokens that never stand for text.

        Raises RequestError if the tokenizer has no JSON.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _unreadable("it has no fast form")
        config = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
        marks = set(self._marks.values())
        for token in config["added_tokens"]:
            token["special"] = token["special"] or token["id"] in marks
        return json.dumps(config)


def _callable_tools(constraints: Constraints, tools: list[Any]) -> list[ToolSchema]:
    """Return the callable tools. Raises RequestError if a tool must be called and none may be."""
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


def _marks(
    tokenizer: Any, think_marks: tuple[str, ...], grammar: CallGrammar | None
) -> dict[str, int]:
    """Return the added tokens that are marks: special tokens, and tokens of the model's format.

    Other added tokens are ordinary text, such as runs of blanks or HTML tags.
    """
    lark = Lark({})
    probe = ToolSchema("", {"properties": {"x": {}}})
    call = grammar.expression(lark, [probe], False) if grammar else NOTHING
    written = f"{tokenizer.chat_template}{''.join(think_marks)}{lark.source(call)}"
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or token.content in written)
    }


def _unreadable(why: str) -> RequestError:
    return RequestError(
        f"Answers of this model cannot be constrained: its tokenizer cannot be read ({why}).",
        code="unsupported_constraint",
    )
