"""Finds the marks that one model writes, and makes the splitter for its answers."""

import itertools
from dataclasses import replace
from typing import Any, Final

from hearth.worker.formats.llama3 import SECTION as LLAMA_TAG
from hearth.worker.formats.shared.format_parts import (
    NOTHING,
    AnswerCollector,
    CallGrammar,
    Channel,
    Lark,
    LookaheadBuffer,
    MessageGrammar,
    ModelFormat,
    ModelWords,
    RequestTools,
    Section,
    ToolSchema,
    all_formats,
    format_of,
)
from hearth.worker.formats.tool_code import SECTION as TOOL_CODE
from hearth.worker.stream.answer_parts import AnswerSplitter
from hearth.worker.stream.reasoning_and_tool_parser import (
    AnswerOptions,
    OutputMarks,
    ReasoningAndToolParser,
)

# What models of any family write that leave their own form.
_STRAYS: Final = (
    Section("<tool_call>", "</tool_call>", is_own=False),
    Section("<function=", "</tool_call>", is_own=False, is_head=True),
)


class OutputFormat:
    """The format of one model's answers: found by its vocabulary and its template.

    `own` is the family's. Immutable: any thread may use it, also several at once.
    """

    def __init__(self, tokenizer: Any, tool_form: str = "native") -> None:
        """Take mlx-lm's TokenizerWrapper, and the form in which prompts show tools."""
        vocabulary = tokenizer.get_vocab().keys()
        words = ModelWords(vocabulary, template_of(tokenizer), tool_form)
        self.own = own = format_of(words) or ModelFormat(is_of=lambda words: False)
        forms = dict.fromkeys(form for each in (own, *all_formats()) if (form := each.form))
        # The marks around thinking are the format's own, or those that mlx-lm finds, or another's.
        pairs = [own.thinking, (tokenizer.think_start or "", tokenizer.think_end or "")]
        pairs += [each.thinking for each in all_formats() if {*each.thinking} <= vocabulary]
        # Calls may stand between the model's own marks, or those that many write.
        others = [LLAMA_TAG] if LLAMA_TAG.start in vocabulary else []
        others += [] if own.sections else [TOOL_CODE]
        sections = {each.start: each for each in (*_STRAYS, *others, *reversed(own.sections))}
        marks: OutputMarks = replace(
            own,
            thinking=next((pair for pair in pairs if pair[0]), ("", "")),
            sections=tuple(sections.values()),
            forms=tuple(forms),
        )
        self._marks = replace(marks, tokens=_tokens_of_marks(own, marks, tokenizer))

    @property
    def grammar(self) -> CallGrammar | MessageGrammar | None:
        """The grammar in which the model calls, or of answers that are a row of messages."""
        return self.own.messages or self.own.grammar

    @property
    def think_marks(self) -> tuple[str, ...]:
        """The marks around a think block, and others that end one; ("", "") where none is."""
        return *self._marks.thinking, *(end for _, end in self.own.more_thinking)

    @property
    def thinks(self) -> bool:
        """Whether answers may hold thinking."""
        return self.own.read is not None or bool(self._marks.thinking[0])

    def is_thinking_open(self, prompt_tail: str) -> bool:
        """Return whether a generation prompt leaves a think block open.

        `prompt_tail` is what the template writes behind the last message, nothing of a message.
        """
        if self.own.analysis:
            return prompt_tail.endswith(self.own.analysis)
        return any(
            start and prompt_tail.rfind(start) > prompt_tail.rfind(end)
            for start, end in (self._marks.thinking, *self.own.more_thinking)
        )

    def may_think(self, prompt_tail: str) -> bool:
        """Return whether the answer may begin with a think block that nobody opens.

        So GLM may answer where its prompt neither opens nor closes thinking.
        """
        return self.own.leaves_thinking_open and not any(
            mark in prompt_tail for mark in self.think_marks
        )

    def splitter(
        self,
        is_thinking: bool,
        tools: list[Any],
        takes_calls: bool = True,
        may_think: bool = False,
        is_continued: bool = False,
    ) -> AnswerSplitter:
        """Return the splitter of one answer.

        `is_thinking` is `is_thinking_open` of the prompt, `may_think` the method of that name.
        `tools` are the request's, in OpenAI's shape; they have the types of arguments that a format
        writes as plain text. Without `takes_calls` the marks of calls are content. An answer that
        `is_continued` begins amid content, where nobody thinks.

        Reasoning is the think block that the text begins with, or that follows a call: with its
        opening mark, or without it where the prompt wrote one, or the model may leave it out. A
        block that never closes is all there is. Newlines at both ends of the block, and those
        behind it, belong to the block; each block begins a line. The first closing mark of an
        answer without a block is left out, with the newlines behind it.

        What is no call is content, exactly as written, and so is all other text. Where tools are
        offered, a mark that is a token of the vocabulary, or whose call was cut off, is content
        only between quotation marks or within a fenced block of code; one that is plain text stays
        as written. Blanks beside a call are content only between text and text: those in front of
        the call, or where there are none, those behind it.
        """
        buffer, known = LookaheadBuffer(), RequestTools(tools)
        collector = AnswerCollector(buffer)
        if self.own.read is not None:
            begun: Channel | None = "content" if is_continued else None
            steps = self.own.read(
                buffer, collector, known, takes_calls, "reasoning" if is_thinking else begun
            )
            return AnswerSplitter(buffer, collector, steps)
        options = AnswerOptions(known, is_thinking, may_think, takes_calls, is_continued)
        parser = ReasoningAndToolParser(self._marks, options, buffer, collector)
        return AnswerSplitter(buffer, collector, parser.read())


def _tokens_of_marks(own: ModelFormat, marks: OutputMarks, tokenizer: Any) -> frozenset[str]:
    """Return the added tokens that the marks of a model's calls and thinking are made of."""
    lark, tool = Lark({}), ToolSchema("", {"properties": {"x": {}}})
    call = own.grammar.expression(lark, [tool], True) if own.grammar else NOTHING
    pairs = (marks.thinking, *own.more_thinking)
    around = ((each.start, each.end, each.quote) for each in marks.sections)
    ends = (own.form.value_end, own.form.call_end) if own.form else ()
    written = (lark.source(call), *own.framing, *itertools.chain(*pairs, *around), *ends)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = (each.content for each in added if len(each.content.strip()) > 2)
    return frozenset(each for each in found if any(each in mark for mark in written))


def template_of(tokenizer: Any) -> str:
    """Return the source of the tokenizer's chat template; "" where it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    # A dictionary has one for tools beside the default.
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
