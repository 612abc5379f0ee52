"""Makes the prompt builder and the session manager of a loaded model."""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

from hearth.shared.settings import Settings
from hearth.worker.cache.block_hash import root_hash
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.formats.shared.output_format import OutputFormat, template_of
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder
from hearth.worker.prompt.render_messages import Renderer
from hearth.worker.prompt.template_capabilities import OwnForm, ToolForm
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids, history_marks
from hearth.worker.prompt.tokenise import ImageForm, PieceTokeniser
from hearth.worker.schedule.answer_drafts import DraftPolicy
from hearth.worker.sessions.cache_trace_log import TraceLog
from hearth.worker.sessions.session_manager import SessionManager, SessionRules
from hearth.worker.setup.kv_setup import cache_root, is_exact
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.threads.request_builder import PromptFacts, SessionPromptBuilder

log = logging.getLogger(__name__)


def end_ids_of(tokenizer: Any, generation_config: dict[str, Any]) -> frozenset[int]:
    """Return all tokens that end a model's answer."""
    own = OutputFormat(tokenizer).model_format
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
    """Return the prompt builder; `end_ids` end a generated turn; `form` is the form of images.

    `context_by` names what limits the context, as in ModelFacts.
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
    """Return the form of the model's calls and results; None if the format defines none."""
    own = OutputFormat(tokenizer, tool_form).model_format
    grammar, text = own.grammar, own.call_text
    if grammar is None or text is None:
        return None
    return OwnForm(
        lambda calls: grammar.text(text(call["name"], call["arguments"]) for call in calls),
        own.result,
        own.tools,
    )


def turns_directory(cache_directory: Path, loaded: LoadedModel) -> Path:
    """Return the directory of this model's turns, which are remembered across restarts.

    The name is a hash of the model's path, tokenizer and template, since token ids of another
    tokenizer mean something else. The format of kept KV does not matter for turns.
    """
    tokenizer = loaded.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
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
    """Return a session manager that stores turns in `directory`; None = in memory only.

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


def sessions_of(
    loaded: LoadedModel, settings: Settings, chunk: int, worker_id: int
) -> SessionManager:
    """Return the session manager of a worker; prefills are cut at most `chunk` tokens apart."""
    is_kept = settings.max_kv_size_gb != 0
    directory = turns_directory(settings.kv_cache_dir, loaded) if is_kept else None
    exact = is_exact(loaded, settings)
    return make_sessions(settings, chunk, exact, worker_id, directory, loaded.facts.name)


def make_prompts(
    loaded: LoadedModel,
    settings: Settings,
    cut_rule: CutRule,
    vocabulary: Vocabulary,
    sessions: SessionManager,
    drafts: DraftPolicy,
    form: ImageForm | None,
) -> SessionPromptBuilder:
    """Return the builder of prompts from messages; `form` is the form of images.

    This also starts the loading of the grammar compiler.
    """
    facts, tokenizer = loaded.facts, loaded.tokenizer
    end_ids = end_ids_of(tokenizer, loaded.generation_config)
    builder = make_builder(
        tokenizer,
        cut_rule.marks,
        end_ids,
        facts.context_tokens,
        settings,
        form,
        facts.context_by,
    )
    output_format = OutputFormat(tokenizer, builder.tool_form)
    compiler = GrammarCompiler(
        tokenizer,
        facts.vocab_size,
        end_ids,
        vocabulary.token_bytes,
        output_format.grammar,
        output_format.think_marks,
        output_format.is_thinking_open,
    )
    compiler.load()
    prompt_facts = PromptFacts(
        context_tokens=facts.context_tokens,
        vocab_size=facts.vocab_size,
        root=cache_root(loaded, settings),
        output_format=output_format,
        grammar_compiler=compiler,
        vocabulary=vocabulary,
        cut_rule=cut_rule,
        model_name=facts.name,
        drafts=drafts,
        thinking=dataclasses.replace(builder.thinking, facts=facts.thinking),
        adapters=loaded.adapters.identities,
    )
    return SessionPromptBuilder(builder, sessions, prompt_facts)
