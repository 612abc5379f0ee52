"""Makes the prompt builder, the sessions and the prompt facts of a loaded model."""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

from hearth.shared.settings import Settings
from hearth.worker.cache.block_hash import PrefixHash, root_hash
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.formats.shared.output_format import OutputFormat, template_of
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder
from hearth.worker.prompt.render_messages import Renderer
from hearth.worker.prompt.template_capabilities import OwnForm, ToolForm
from hearth.worker.prompt.template_turn_tokens import (
    end_of_turn_ids,
    history_marks,
)
from hearth.worker.prompt.tokenise import ImageForm, PieceTokeniser
from hearth.worker.requests.session_prompt_builder import PromptFacts
from hearth.worker.sessions.cache_trace_log import TraceLog
from hearth.worker.sessions.session_manager import SessionManager, SessionRules
from hearth.worker.stream.detokenise import Vocabulary

log = logging.getLogger(__name__)


def end_ids_of(tokenizer: Any, generation_config: dict[str, Any]) -> frozenset[int]:
    """Return every token that ends an answer of the model."""
    own = OutputFormat(tokenizer).own
    return end_of_turn_ids(tokenizer, generation_config, own.ends, own.part_ends)


def make_builder(
    tokenizer: Any,
    marks: TurnMarks,
    end_ids: frozenset[int],
    context_tokens: int,
    settings: Settings,
    form: ImageForm | None = None,
    context_by: str = "setting",
) -> PromptBuilder:
    """Return the prompt builder; `end_ids` end a generated turn, `form` is how images stand.

    `context_by` is what makes the context no longer, as ModelFacts has it.
    """
    thinks, preserves = settings.default_thinking, settings.preserve_thinking
    renderer = Renderer(tokenizer, thinks, preserves, functools.partial(_own_form, tokenizer))
    if not renderer.has_template:
        log.warning(
            "the model has no chat template: it is shown messages as a plain transcript, which "
            "most models read badly. Put the template that it was trained with beside its weights, "
            "as chat_template.jinja, or ask it by /v1/completions"
        )
    return PromptBuilder(
        renderer,
        PieceTokeniser(tokenizer, template_of(tokenizer) + renderer.markup),
        history_marks(tokenizer, marks, end_ids),
        context_tokens,
        preserves,
        form,
        context_by,
    )


def _own_form(tokenizer: Any, tool_form: ToolForm) -> OwnForm | None:
    """Return the form of the model's calls and their results; None where its format has none."""
    own = OutputFormat(tokenizer, tool_form).own
    grammar, text = own.grammar, own.call_text
    if grammar is None or text is None:
        return None
    return OwnForm(
        lambda calls: grammar.text(text(each["name"], each["arguments"]) for each in calls),
        own.result,
        own.tools,
    )


def turns_directory(cache_directory: Path, loaded: LoadedModel) -> Path:
    """Return where the turns of this model are remembered across restarts.

    It is named by the model and by what makes its prompts, its tokenizer and its template: tokens
    mean nothing to another. How KV is kept does not matter here.
    """
    tokenizer = loaded.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda row: row[1])
    added = sorted(tokenizer.added_tokens_decoder.items())
    parts = (loaded.facts.path, repr(vocabulary), repr(added), template_of(tokenizer))
    return cache_directory / f"turns-{root_hash(parts).hex()}"


def make_sessions(
    settings: Settings,
    chunk: int,
    is_exact: bool = False,
    worker_id: int = 0,
    directory: Path | None = None,
    model: str = "",
) -> SessionManager:
    """Return the sessions that are remembered in `directory`; None remembers in memory only.

    Prefills are cut at most `chunk` tokens apart; `model` is the public name, for reports.
    """
    rules = SessionRules(
        lines_max=settings.prompt_cache_max_entries_per_session,
        idle_s=settings.prompt_cache_session_max_idle_seconds,
        ttl_s=settings.prompt_cache_ttl_seconds,
        shows_text=settings.log_prompts,
        is_exact=is_exact,
        worker_id=worker_id,
        model=model,
    )
    log = TraceLog(settings.log_root, settings.enable_request_logging)
    return SessionManager(rules, log, slack=chunk, directory=directory)


def prompt_facts(
    loaded: LoadedModel,
    root: PrefixHash,
    builder: PromptBuilder,
    vocabulary: Vocabulary,
    cut_rule: CutRule,
) -> PromptFacts:
    """Return what prompts need to know of the model; `root` names its cache."""
    facts, tokenizer = loaded.facts, loaded.tokenizer
    output_format = OutputFormat(tokenizer, builder.tool_form)
    return PromptFacts(
        context_tokens=facts.context_tokens,
        vocab_size=facts.vocab_size,
        root=root,
        output_format=output_format,
        grammar_compiler=GrammarCompiler(
            tokenizer,
            facts.vocab_size,
            end_ids_of(tokenizer, loaded.generation_config),
            vocabulary.token_bytes,
            output_format.grammar,
            output_format.think_marks,
            output_format.is_thinking_open,
        ),
        vocabulary=vocabulary,
        cut_rule=cut_rule,
        model_name=facts.name,
        thinking=dataclasses.replace(builder.thinking, told=facts.thinking),
    )
