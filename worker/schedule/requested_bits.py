"""Says whether a request may have its KV held in the bits that it asks for (`kv_bits`)."""

import logging
from collections.abc import Callable
from typing import Final

from hearth.shared.errors import RequestError
from hearth.shared.settings import KV_BITS
from hearth.worker.cache.block_hash import PrefixHash, bits_root
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.quantise_kv import QuantFormat

NO_RULES: Final = KeepRules(slots_max=1, chunk=1, is_exact=False)

log = logging.getLogger(__name__)


class RequestedBits:
    """Gives KV of other bits than the server's a root of its own, and refuses what cannot be.

    Whether a model runs on packed KV, alone and in a batch, is tried when it is first asked for:
    few requests ever do, and a start would be longer for all.
    Owner: the inference thread; the prompt threads read.
    """

    def __init__(
        self,
        rules: KeepRules = NO_RULES,
        why_not: Callable[[QuantFormat | None], str | None] = lambda _form: None,
        never: str = "",
    ) -> None:
        """`why_not` tries rows of a format, None = raw, and says what is against them.

        `never` is why no rows can be packed for a request, without a trial.
        """
        self._rules = rules
        self._why_not = why_not
        self.never = never
        self._own = _own_bits(rules)
        self._tried: dict[int, str | None] = {}  # bits -> what is against them

    def asked(self, kv_bits: int | None) -> int | None:
        """Return the bits that a request asks for; None where it has the server's. Any thread.

        Raises:
            RequestError: 400, `kv_bits_refused`: it is known by now that it cannot have them.
        """
        assert kv_bits in (None, *KV_BITS), kv_bits
        if kv_bits is None or kv_bits == self._own:
            return None
        reason = self._tried.get(kv_bits) or (self.never if kv_bits else "")
        if reason:
            raise self._refused(kv_bits, reason)
        return kv_bits

    def root(self, root: PrefixHash, kv_bits: int | None) -> PrefixHash:
        """Return what the hashes of a prompt begin with that gets these bits. Any thread."""
        return root if kv_bits is None else bits_root(root, kv_bits, self._rules.group_size)

    def try_out(self, kv_bits: int | None) -> None:
        """Try bits that `asked` gave, once. Inference thread.

        Raises:
            RequestError: 400, `kv_bits_refused`.
        """
        if kv_bits is None:
            return
        if kv_bits not in self._tried:
            reason = self._tried[kv_bits] = self._why_not(self._rules.running(kv_bits))
            log.info("kv_bits=%d of a request: %s", kv_bits, reason or "this model takes it")
        self.asked(kv_bits)

    def _refused(self, kv_bits: int, reason: str) -> RequestError:
        return RequestError(
            f"kv_bits is {kv_bits}, and this server cannot hold this model's KV so: {reason}. "
            f"Leave kv_bits out, or set it to {self._own}, as KV_BITS is here.",
            code="kv_bits_refused",
            param="kv_bits",
        )


def roots_of(rules: KeepRules, root: PrefixHash) -> tuple[PrefixHash, ...]:
    """Return `root` and those of what has it but for the bits."""
    others = (bits for bits in KV_BITS if bits != _own_bits(rules))
    return (root, *(bits_root(root, bits, rules.group_size) for bits in others))


def _own_bits(rules: KeepRules) -> int:
    return rules.running_format.bits if rules.running_format is not None else 0
