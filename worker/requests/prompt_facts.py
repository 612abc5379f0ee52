"""Defines what the prompt threads know of the loaded model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.thinking_switches import ThinkingSwitches
from hearth.worker.schedule.answers.answer_drafts import DraftPolicy
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
