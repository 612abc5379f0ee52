"""Finds the marks that one model writes, and makes the splitter for its answers."""

from typing import Any, Final

from hearth.worker.stream import harmony_parser
from hearth.worker.stream.answer_parts import AnswerCollector, AnswerParts, ToolCall
from hearth.worker.stream.answer_splitter import AnswerSplitter, Channel
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer
from hearth.worker.stream.reasoning_and_tool_parser import (
    AnswerOptions,
    OutputMarks,
    ReasoningAndToolParser,
)
from hearth.worker.stream.tool_calls import call_parser, upstream_parsers
from hearth.worker.stream.tool_calls.call_parser import CallFormat
from hearth.worker.stream.tool_calls.request_tools import RequestTools

__all__ = ["AnswerParts", "OutputFormat", "ToolCall", "template_of"]

# Think marks that mlx-lm does not look for.
_THINK_MARKS: Final = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_RESPONSE_MARKS: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_GLM: Final = "[gMASK]"  # GLM's vocabulary has it: its models may not open what they close


class OutputFormat:
    """The format of one model's answers: the marks that mlx-lm finds for its tokenizer.

    Immutable: any thread may use it, also several at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take mlx-lm's TokenizerWrapper."""
        vocabulary = tokenizer.get_vocab().keys()
        self._has_channels = vocabulary >= harmony_parser.MARKS
        self._is_glm = _GLM in vocabulary
        start, end = tokenizer.think_start or "", tokenizer.think_end or ""
        for marks in _THINK_MARKS:
            if not start and vocabulary >= set(marks):
                start, end = marks
        dropped = tuple(mark for mark in _RESPONSE_MARKS if mark in vocabulary)
        self._marks = OutputMarks(
            start, end, _formats(tokenizer), (*tokenizer.structural_markers, *dropped)
        )

    @property
    def think_marks(self) -> tuple[str, str]:
        """The marks around a think block; ("", "") where the model writes none."""
        return self._marks.think_start, self._marks.think_end

    @property
    def thinks(self) -> bool:
        """Whether answers may hold thinking."""
        return self._has_channels or bool(self._marks.think_start)

    def is_thinking_open(self, prompt_tail: str) -> bool:
        """Return whether a generation prompt leaves a think block open.

        `prompt_tail` is what the template writes behind the last message, nothing of a message.
        """
        if self._has_channels:
            return prompt_tail.endswith(harmony_parser.ANALYSIS)
        start, end = self.think_marks
        return bool(start) and prompt_tail.rfind(start) > prompt_tail.rfind(end)

    def may_think(self, prompt_tail: str) -> bool:
        """Return whether the answer may begin with a think block that nobody opens.

        So GLM may answer where its prompt neither opens nor closes thinking.
        """
        return self._is_glm and not any(mark in prompt_tail for mark in self.think_marks)

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

        What is no call is content, exactly as written, and so is all other text. Blanks beside a
        call are content only between text and text: those in front of the call, or where there are
        none, those behind it.
        """
        buffer, known = LookaheadBuffer(), RequestTools(tools)
        collector = AnswerCollector(buffer)
        if self._has_channels:
            harmony = harmony_parser.HarmonyParser(buffer, collector, known, takes_calls)
            begun: Channel | None = "content" if is_continued else None
            return AnswerSplitter(
                buffer, collector, harmony.read("reasoning" if is_thinking else begun)
            )
        options = AnswerOptions(known, is_thinking, may_think, takes_calls, is_continued)
        parser = ReasoningAndToolParser(self._marks, options, buffer, collector)
        return AnswerSplitter(buffer, collector, parser.read())

    def read(self, text: str, is_thinking: bool, tools: list[Any]) -> AnswerParts:
        """Return the parts of a complete generated text, without its end-of-turn token."""
        splitter = self.splitter(is_thinking, tools)
        splitter.feed(text)
        splitter.finish(is_complete=True)
        return splitter.parts


def _formats(tokenizer: Any) -> tuple[CallFormat, ...]:
    """Return the formats of calls: the template's own, and those of models that leave theirs."""
    own = _own_format(tokenizer)
    found = {} if own is None else {own.start: own}
    if own and own.start == call_parser.KIMI:
        found[call_parser.KIMI_CALL] = CallFormat(call_parser.KIMI_CALL, own.end, own.parser)
    if own is None:
        found[call_parser.TOOL_CODE] = CallFormat(call_parser.TOOL_CODE)
    if call_parser.PYTHON_TAG in tokenizer.get_vocab():
        found[call_parser.PYTHON_TAG] = CallFormat(call_parser.PYTHON_TAG)
    for start in ("<tool_call>", "<function="):
        found.setdefault(start, CallFormat(start, "</tool_call>"))
    return tuple(found.values())


def _own_format(tokenizer: Any) -> CallFormat | None:
    module = upstream_parsers.of_mlx_vlm(template_of(tokenizer))
    if module is not None:
        return CallFormat(module.tool_call_start, module.tool_call_end, module.parse_tool_call)
    if tokenizer.tool_parser is None:
        return None
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    return CallFormat(start, end or "", tokenizer.tool_parser)


def template_of(tokenizer: Any) -> str:
    """Return the source of the tokenizer's chat template; "" where it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    # A dictionary has one for tools beside the default.
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
