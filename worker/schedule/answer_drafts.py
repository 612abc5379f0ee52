"""Makes the drafter of each answer, and keeps answers as drafts for the same API key.

Owner: the inference thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources, DraftMemory
from hearth.worker.draft.draft import DraftSource, ForcedTokens
from hearth.worker.draft.draft_length import CPU_CURVE, TextKind
from hearth.worker.engine.decode.draft_model import DraftModel
from hearth.worker.schedule.request_state import Request
from hearth.worker.stream.answer_parts import Channel

Reach = Literal["none", "forced", "all"]
CANNOT_VERIFY: Final = "this model cannot verify several tokens in one forward"

TEXT_KINDS: Final[Mapping[Channel, TextKind]] = {
    "reasoning": "thinking",
    "content": "text",
    "tool_call": "call",
}


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """Says which drafts a request gets by default, and which drafts it may ask for.

    `reason` says why nothing is drafted. `curve` maps a forward's number of rows to
    its cost; a forward of one row costs 1.
    """

    mode: str = "off"  # the setting SPECULATE
    reach: Reach = "none"
    reach_max: Reach = "none"
    reason: str = ""
    curve: Mapping[int, float] = field(default_factory=lambda: CPU_CURVE)
    takes_trees: bool = False

    def of(self, asked: bool | None) -> Reach:
        """Return which drafts a request gets; `asked` is the client's option, None if not set."""
        if asked is None:
            return self.reach
        return self.reach_max if asked else "none"


class AnswerDrafts:
    """Makes the drafters of a worker's answers and keeps what they learn.

    Owner: the inference thread.
    """

    def __init__(
        self, policy: DraftPolicy | None = None, draft_model: DraftModel | None = None
    ) -> None:
        self.policy = policy or DraftPolicy()
        self._draft_model = draft_model
        self._memory = DraftMemory(self.policy.curve)

    def begin(self, request: Request) -> AnswerDrafter | None:
        """Return the drafter of a request's answer; None if nothing is drafted."""
        reach = self.policy.of(request.sampling.speculate)
        sources = request.draft_sources or AnswerSources(request.ids)
        forced = sources.forced
        if request.guide is not None:
            forced = _ForcedByBoth(request.guide, forced)
        if reach == "none" or (reach == "forced" and forced is None):
            return None
        draft_model = self._draft_model if reach == "all" else None
        return self._memory.begin(
            request.api_key if request.uses_cache else None,
            replace(
                sources,
                forced=forced,
                looks_up=reach == "all",
                model=draft_model.follow() if draft_model is not None else None,
            ),
            lambda: TEXT_KINDS[request.output.channel],
            allows_trees=self.policy.takes_trees and request.guide is None,
        )

    def stop(self) -> None:
        """Draft nothing from now on, because a trial showed that the model cannot verify drafts."""
        self._memory.clear()
        self.policy = replace(self.policy, reach="none", reach_max="none", reason=CANNOT_VERIFY)

    def prompt_pairs_max(self, request: Request) -> int:
        """Return how many of the prompt's last hidden states the draft model takes."""
        is_drafted = self.policy.of(request.sampling.speculate) == "all"
        if self._draft_model is None or not is_drafted or request.prefill_only is not None:
            return 0
        return self._draft_model.prompt_pairs_max

    def end(self, request: Request) -> None:
        """Keep a finished answer as a source of drafts, and add the counts of its drafter."""
        drafter = request.drafter
        if drafter is not None:
            drafter.end_at(request.completion_tokens)
        if not request.uses_cache:  # such a request leaves nothing, not even a count
            return
        if self.policy.reach == "all":
            self._memory.keep(request.api_key, request.sampled)
        if drafter is not None:
            self._memory.counts.add(drafter.counts)

    def clear(self) -> None:
        """Drop the kept answers."""
        self._memory.clear()

    def report(self) -> dict[str, Any]:
        """Return the draft counts of all finished answers, for `/v1/cache`."""
        counts, policy = self._memory.counts, self.policy
        cost = counts.tokens - counts.saved
        return {
            "mode": policy.mode,
            "state": "off" if policy.reach == "none" else "on",
            "reason": policy.reason,
            "forwards": counts.forwards,
            "rows": counts.rows,
            "tokens": counts.tokens,
            "speedup_estimate": round(counts.tokens / cost, 3) if cost > 0 else None,
            "by_source": {
                source: {"drafted": counts.drafted[source], "accepted": counts.accepted[source]}
                for source in get_args(DraftSource)
            },
            "bytes": self._memory.nbytes,
        }


class _ForcedByBoth:
    """Returns the tokens that the guide forces, or else the tokens that a call's grammar forces.

    The engine advances the guide; `take` advances the call's grammar.
    """

    def __init__(self, guide: TokenMask, calls: ForcedTokens | None) -> None:
        self._guide, self._calls = guide, calls

    def take(self, tokens: Sequence[int]) -> None:
        if self._calls is not None:
            self._calls.take(tokens)

    def forced(self, tokens_max: int) -> list[int]:
        forced = self._guide.forced(tokens_max)
        return forced or (self._calls.forced(tokens_max) if self._calls is not None else [])

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        """See `ForcedTokens`. The engine cuts a draft at a token that the guide rejects."""
        return (len(tokens), []) if self._calls is None else self._calls.fitting(ahead, tokens)

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        return self._calls.choice(ahead) if self._calls is not None else None
