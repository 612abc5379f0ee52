"""Renders a prompt with what its session remembers, and the one that is likely to follow it."""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt, TokenQuery
from hearth.worker.cache.block_hash import PrefixHash, common_length, prefix_hashes
from hearth.worker.cache.image_keys import PromptImages, keys_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.awaited_work import NobodyWaits
from hearth.worker.prompt.deferred_tools import with_loaded_tools
from hearth.worker.prompt.images.image_placeholders import without_images
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt, PromptBuilder, PromptContent
from hearth.worker.prompt.thinking_switches import ThinkingSwitches
from hearth.worker.schedule.answer_drafts import DraftPolicy
from hearth.worker.schedule.request_state import Request
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.find_divergence import explain
from hearth.worker.sessions.session_manager import SessionManager
from hearth.worker.sessions.session_visit import SessionVisit
from hearth.worker.sessions.turn_store import Turn
from hearth.worker.stream.detokenise import Vocabulary


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Holds what a request needs of the model. Never changes; the prompt threads share it."""

    context_tokens: int
    vocab_size: int
    root: PrefixHash  # the name of the empty prefix
    output_format: OutputFormat  # reads what the model writes
    grammar_compiler: GrammarCompiler  # holds the model to what it has to write
    vocabulary: Vocabulary
    cut_rule: CutRule  # where prefills are cut
    model_name: str = ""
    drafts: DraftPolicy = field(default_factory=DraftPolicy)  # what is drafted for answers
    thinking: ThinkingSwitches = field(default_factory=ThinkingSwitches)
    adapters: Mapping[str, str] = field(default_factory=dict)  # by name: what tells its bytes


_IMAGE: Final = "[image]"


def is_raw(prompt: Prompt) -> bool:
    """Return whether the prompt goes to the model as it is, without a template."""
    return prompt.text is not None or bool(prompt.ids)


class SessionPromptBuilder:
    """Builds prompts from messages and from what their sessions remember. Any prompt thread.

    Invariant: what the model sampled stands in a later prompt as it was sampled, where it is known.
    """

    def __init__(
        self, builder: PromptBuilder, sessions: SessionManager, facts: PromptFacts
    ) -> None:
        self.sessions = sessions
        self.builder = builder
        self.facts = facts

    def build(
        self,
        prompt: Prompt,
        images: PromptImages,
        uses_cache: bool = True,
        adds_header: bool = True,
        is_counted: bool = False,
    ) -> tuple[SessionVisit | None, BuiltPrompt]:
        """Return what is known of the request, and its tokens. Raises RequestError.

        `is_counted`: nothing computes it, and it may be longer than the context. Nothing is known
        of a raw prompt, nor of one that neither reads nor writes the cache.
        """
        if is_raw(prompt):
            return None, self.builder.raw(prompt.text, prompt.ids, prompt.speaker.key)
        if prompt.images:
            messages = without_images(prompt, self.facts.model_name)
            prompt = dataclasses.replace(prompt, messages=messages, images={})
        visit = self.sessions.arrive(prompt, uses_cache)
        if visit is not None:
            visit.images = images
        content = self.content(prompt, visit, images)
        return visit, self.builder.build(content, adds_header, is_counted)

    def raw_ids(self, prompt: Prompt, query: TokenQuery) -> list[int]:
        """Return the tokens of a raw prompt of any length. Raises: RequestError."""
        if prompt.text is None:
            self.builder.check_ids(prompt.ids)
            return prompt.ids
        text, mark, tokeniser = prompt.text, "", self.builder.tokeniser
        if not query.reads_controls:
            mark = tokeniser.mark
            text = tokeniser.shielded(text, mark)
        ids = tokeniser.ids(text, mark, prompt.speaker.key)
        return self.builder.with_beginning(ids) if query.adds_beginning else ids

    def content(
        self, prompt: Prompt, visit: SessionVisit | None, images: PromptImages
    ) -> PromptContent:
        """Return the messages as the template is to see them, with the turns that are known.

        What is remembered of their texts serves the prompt's key alone.
        """
        messages, loaded = prompt.messages, list[str]()
        turns: Sequence[Turn | None] = ()
        if visit is not None:
            messages, loaded, turns = visit.messages, visit.loaded, visit.turns
        messages = with_loaded_tools(messages, prompt.deferred, loaded)
        if prompt.continues and turns:  # it is not over: the client's text says how far it goes
            turns = [*turns[:-1], None]
        return PromptContent(
            *(messages, prompt.tools, prompt.template_kwargs, turns, images, prompt.speaker.key),
            *(prompt.continues, prompt.thinking),
        )

    def explain(self, visit: SessionVisit, built: BuiltPrompt) -> None:
        """Find out what the request loses against its own line; note it in its visit."""
        tokens = built.keys
        assert 0 <= built.header <= len(tokens), (built.header, len(tokens))
        system_end = self.facts.cut_rule.system_end(tokens)
        visit.set_prompt(tokens, built.header, built.kept, system_end)
        visit.doubtful, visit.begins = built.doubtful, built.begins

        def boundary(count: int) -> tuple[int, bool] | None:
            """Return how many of the prompt's tokens its first `count` messages make."""
            whole = self.content(visit.prompt, visit, visit.images)
            part = dataclasses.replace(
                whole, messages=whole.messages[:count], turns=whole.turns[:count]
            )
            try:
                keys = self.builder.build(part, adds_header=False).keys
            except NobodyWaits:
                raise
            except RequestError:  # a template may refuse a conversation that ends there
                return None
            covered = common_length(keys, tokens)
            return covered, covered == len(keys)

        visit.divergence = explain(visit, boundary, self.text, self.builder.preserves_thinking)

    def text(self, keys: Sequence[int]) -> str:
        """Return the text of tokens; an image among them is "[image]"."""
        detokeniser = self.facts.vocabulary.detokeniser()
        parts = []
        for is_image, run in itertools.groupby(keys, lambda key: key < 0):
            parts.append(_IMAGE if is_image else "".join(map(detokeniser.add, run)))
        return "".join(parts)


log = logging.getLogger(__name__)


def predict_next_prompt(request: Request, prompts: SessionPromptBuilder) -> PrefixQuery | None:
    """Return the beginning of the prompt that follows an answer. Prompt thread.

    It ends where the next message begins. None where the answer's own tokens stand there as they
    were fed, so that the slot holds them, or where the template refuses such a conversation.
    """
    assert request.slot is None, request.request_id
    visit, facts = request.visit, prompts.facts
    if visit is None or visit.said is None:
        return None
    try:
        # The conversation with the answer, and the messages that will follow it, empty.
        echo, following = _continuation(visit.said, visit.turn)
        content = prompts.content(visit.prompt, visit, visit.images)
        before = len(content.messages) - content.continues
        content = dataclasses.replace(
            content,
            messages=[*content.messages[:before], echo, *following],
            turns=[*content.turns[:before], visit.turn, *(None for _ in following)],
        )
        built = prompts.builder.build(content, adds_header=False)
    except RequestError as error:  # nothing is lost but the head start
        log.debug("the next prompt cannot be foreseen: %s", error.code)
        return None
    ends = [request.end_id] if request.end_id is not None else []
    fed = keys_of([*request.ids, *request.sampled, *ends], request.query.images)
    tokens = built.keys[: prompts.builder.last_header(built.ids)]
    if common_length(tokens, fed) >= min(len(tokens), len(fed)):
        return None
    cuts, root = facts.cut_rule.natural(tokens), request.query.root or facts.root
    names = prefix_hashes(root, tokens, cuts)
    images = tuple(run.bare() for run in built.images if run.end <= len(tokens))
    return PrefixQuery(
        tokens,
        cuts,
        names,
        request.query.conversation,
        root=root,
        images=images,
        system_end=facts.cut_rule.system_end(tokens),
        adapter=request.query.adapter,
    )


def _continuation(
    said: TurnContent, turn: Turn | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an answer as a client echoes it, and what it will send behind it, empty."""
    echo: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        echo["reasoning_content"] = said.reasoning
    if not said.calls:
        return echo, [{"role": "user", "content": ""}]
    ids = turn.call_ids if turn is not None else ()
    if len(ids) != len(said.calls):  # it was cut off
        ids = tuple(f"call{n:05d}" for n in range(len(said.calls)))
    echo["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, said.calls, strict=True)
    ]
    return echo, [{"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in ids]
