"""Finds the marks that one model writes, and makes the splitters of its answers."""

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

# Sections that models of any family write when they leave their own format.
_STRAYS: Final = (
    Section("<tool_call>", "</tool_call>", takes_any_name=False),
    Section("<function=", "</tool_call>", takes_any_name=False, is_head=True),
)


class OutputFormat:
    """The format of one model's answers, found by its vocabulary and its template.

    `model_format` is the format of the model's family. Immutable: several threads may use it
    at once.
    """

    def __init__(self, tokenizer: Any, tool_form: str = "native") -> None:
        """`tokenizer` is mlx-lm's TokenizerWrapper; `tool_form` says how prompts show tools."""
        vocabulary = tokenizer.get_vocab().keys()
        words = ModelWords(vocabulary, template_of(tokenizer), tool_form)
        self.model_format = model_format = format_of(words) or ModelFormat(
            matches=lambda words: False
        )
        forms = dict.fromkeys(
            form for candidate in (model_format, *all_formats()) if (form := candidate.form)
        )
        # The marks around thinking come from the format, or from mlx-lm, or from another format.
        pairs = [model_format.thinking, (tokenizer.think_start or "", tokenizer.think_end or "")]
        pairs += [
            candidate.thinking for candidate in all_formats() if {*candidate.thinking} <= vocabulary
        ]
        # Calls may stand between the model's own marks, or between common ones.
        others = [LLAMA_TAG] if LLAMA_TAG.start in vocabulary else []
        others += [] if model_format.sections else [TOOL_CODE]
        sections = {
            section.start: section
            for section in (*_STRAYS, *others, *reversed(model_format.sections))
        }
        marks: OutputMarks = replace(
            model_format,
            thinking=next((pair for pair in pairs if pair[0]), ("", "")),
            sections=tuple(sections.values()),
            forms=tuple(forms),
        )
        self._marks = replace(marks, tokens=_tokens_of_marks(model_format, marks, tokenizer))

    @property
    def grammar(self) -> CallGrammar | MessageGrammar | None:
        """The grammar of the model's calls, or of its messages if its answers consist of them."""
        return self.model_format.messages or self.model_format.grammar

    @property
    def think_marks(self) -> tuple[str, ...]:
        """The marks around a think block, then other marks that end it; ("", "") without marks."""
        return *self._marks.thinking, *(end for _, end in self.model_format.more_thinking)

    @property
    def thinks(self) -> bool:
        """Whether answers may hold thinking."""
        return self.model_format.read is not None or bool(self._marks.thinking[0])

    def is_thinking_open(self, prompt_tail: str) -> bool:
        """Return whether a generation prompt leaves a think block open.

        `prompt_tail` is the text that the template writes after the last message.
        """
        if self.model_format.analysis:
            return prompt_tail.endswith(self.model_format.analysis)
        return any(
            start and prompt_tail.rfind(start) > prompt_tail.rfind(end)
            for start, end in (self._marks.thinking, *self.model_format.more_thinking)
        )

    def may_think(self, prompt_tail: str) -> bool:
        """Return whether the answer may begin with a think block without its opening mark.

        GLM may do this after a prompt that neither opens nor closes thinking.
        """
        return self.model_format.leaves_thinking_open and not any(
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

        `is_thinking` and `may_think` are the results of `is_thinking_open` and `may_think` for the
        prompt. `tools` are the request's tools in OpenAI's shape, with the types of arguments that
        a format writes as plain text. Without `takes_calls` the marks of calls are content. An
        answer that `is_continued` begins within content, and has no thinking at its beginning.

        Reasoning is the think block at the beginning of the text or after a call. Its opening mark
        may stand in the prompt, and some models omit the mark. A block that never closes is the
        whole answer. Newlines at both ends of the block, and after it, belong to the block; each
        block begins a new line. The first closing mark of an answer without a block is left out,
        with the newlines after it.

        Text that is no call and no reasoning is content, exactly as written. With tools, a mark
        that is a token of the vocabulary, or that began a cut-off call, is content only between
        quotation marks or within a fenced code block; other marks stay as written. Between two
        texts with a call between them, the blanks before the call are content; if there are none,
        the blanks after the call are. All other blanks beside a call are left out.
        """
        buffer, known = LookaheadBuffer(), RequestTools(tools)
        collector = AnswerCollector(buffer)
        if self.model_format.read is not None:
            begun: Channel | None = "content" if is_continued else None
            steps = self.model_format.read(
                buffer, collector, known, takes_calls, "reasoning" if is_thinking else begun
            )
            return AnswerSplitter(buffer, collector, steps)
        options = AnswerOptions(known, is_thinking, may_think, takes_calls, is_continued)
        parser = ReasoningAndToolParser(self._marks, options, buffer, collector)
        return AnswerSplitter(buffer, collector, parser.read())


def _tokens_of_marks(own: ModelFormat, marks: OutputMarks, tokenizer: Any) -> frozenset[str]:
    """Return the added tokens that stand in the marks of a model's calls and thinking."""
    lark, tool = Lark({}), ToolSchema("", {"properties": {"x": {}}})
    call = own.grammar.expression(lark, [tool], True) if own.grammar else NOTHING
    pairs = (marks.thinking, *own.more_thinking)
    around = ((section.start, section.end, section.quote) for section in marks.sections)
    ends = (own.form.value_end, own.form.call_end) if own.form else ()
    written = (lark.source(call), *own.framing, *itertools.chain(*pairs, *around), *ends)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    contents = (token.content for token in added if len(token.content.strip()) > 2)
    return frozenset(text for text in contents if any(text in mark for mark in written))


def template_of(tokenizer: Any) -> str:
    """Return the source of the tokenizer's chat template; "" without a template."""
    template = getattr(tokenizer, "chat_template", None) or ""
    # A dictionary has a template for tools besides the default.
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
