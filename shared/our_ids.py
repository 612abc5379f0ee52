"""Makes the ids that clients are given, and tells them from other servers' by their form alone.

A conversation may go on at a provider that knows none of ours, and come back with ids of the
provider's. No memory is asked which are which: it would end with a restart.
"""

import base64
import re
import secrets
import string
from collections.abc import Collection
from typing import Any, Final

ID_CHARS: Final = 22  # of letters and digits: 131 bits
SIGNATURE_BEGIN: Final = "hearth-"  # of thinking
_ALPHABET: Final = string.ascii_letters + string.digits
_PLAIN: Final = re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}")
# The model's own id, or the number in Kimi's, which few clients take; 95 bits make it unique.
_MARKED: Final = re.compile(r"([A-Za-z0-9_-]*?)hearth[A-Za-z0-9]{16}")
_NUMBERED: Final = re.compile(r"(functions\.)?(.+):([0-9]{1,9})", re.DOTALL)
# Sessions that began before signatures had a beginning of their own carry plain ones.
_SIGNATURE: Final = re.compile(rf"(?:{SIGNATURE_BEGIN})?{_PLAIN.pattern}")
_RESPONSE: Final = re.compile(r"resp_[0-9a-f]{32}")
_PROVIDERS: Final = re.compile(
    r"litellm:custom_llm_provider:[^;]*;model_id:([^;]+);response_id:resp_[A-Za-z0-9_-]+"
)
_ITEM: Final = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}_[0-9]{1,6}")


def new_id() -> str:
    """Return an id that nobody can guess, of characters that every client sends back."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))


def call_id_for(written: str, name: str, known: Collection[str], unique: str) -> str:
    """Return the id that a client is given for a call of `name`; `unique` is a new one.

    It is the id that the model wrote, where every client and provider takes that and it is not
    among `known`: models begin their numbers anew. Else `written_call_id` finds it in the result.
    Anthropic takes these characters alone, OpenAI 40 of them at most.
    """
    kept = written if re.fullmatch("[A-Za-z0-9_-]{1,40}", written) else ""
    if kept and kept not in known and not _MARKED.fullmatch(kept):
        return kept
    if (found := _NUMBERED.fullmatch(written)) and found[2] == name:
        kept = ("" if found[1] else "n") + found[3]
    return f"{kept}hearth{unique[-16:]}" if kept else unique


def written_call_id(given: str) -> str:
    """Return the id that the model wrote for a call, of the id that its client was given."""
    return found[1] if (found := _MARKED.fullmatch(given)) else given


def numbered_call_id(given: str, name: str, number: int) -> str:
    """Return Kimi's id of a call of `name`: as the model wrote it, or else with this number."""
    found = _NUMBERED.fullmatch(given)
    if found and found[1] and found[2] == name:
        return given
    own = re.fullmatch("(n?)([0-9]{1,9})hearth[A-Za-z0-9]{16}", given) or ("", "", number)
    return f"{'' if own[1] else 'functions.'}{name}:{own[2]}"


def is_our_call_id(value: Any) -> bool:
    """Return whether we may have given a call this id.

    Of other providers only Mistral's are letters and digits alone, and Mistral wants no thinking
    back.
    """
    return (
        type(value) is str
        and re.fullmatch(rf"[A-Za-z0-9]{{1,{ID_CHARS}}}|{_MARKED.pattern}", value) is not None
    )


def is_our_signature(value: Any) -> bool:
    """Return whether we signed thinking with `value`; a provider's is hundreds of characters."""
    return type(value) is str and _SIGNATURE.fullmatch(value) is not None


def is_our_response_id(value: Any) -> bool:
    """Return whether a response of ours has this id; a provider's is longer, or LiteLLM's own."""
    return type(value) is str and _RESPONSE.fullmatch(value) is not None


def is_our_item_id(value: Any) -> bool:
    """Return whether an output item of ours has this id: its kind, its answer, its number there."""
    return type(value) is str and _ITEM.fullmatch(value) is not None


def response_maker(response_id: str) -> str:
    """Return the deployment that LiteLLM named in the id of a response that its provider keeps.

    "" of any other id. Where the provider has no Responses API, LiteLLM's id leads nowhere.
    """
    try:
        told = base64.b64decode(response_id.removeprefix("resp_") + "==").decode()
    except ValueError:  # neither base64 nor a text
        return ""
    found = _PROVIDERS.fullmatch(told)
    return found[1] if found is not None and response_id.startswith("resp_") else ""
