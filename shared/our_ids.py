"""Makes the ids that clients get, and recognises them by their form alone.

A conversation may continue at another provider and return with that provider's ids. The form
decides, because a list of issued ids would be lost at a restart.
"""

import base64
import re
import secrets
import string
from collections.abc import Collection
from typing import Any, Final

ID_CHARS: Final = 22  # letters and digits: 131 bits
SIGNATURE_BEGIN: Final = "hearth-"  # prefix of a thinking signature
_ALPHABET: Final = string.ascii_letters + string.digits
_PLAIN: Final = re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}")
# The model's id, or the number in Kimi's id (few clients accept the whole one), then 95 random
# bits that make it unique.
_MARKED: Final = re.compile(r"([A-Za-z0-9_-]*?)hearth[A-Za-z0-9]{16}")
_NUMBERED: Final = re.compile(r"(functions\.)?(.+):([0-9]{1,9})", re.DOTALL)
# Old sessions carry signatures without the prefix.
_SIGNATURE: Final = re.compile(rf"(?:{SIGNATURE_BEGIN})?{_PLAIN.pattern}")
_RESPONSE: Final = re.compile(r"resp_[0-9a-f]{32}")
_PROVIDERS: Final = re.compile(
    r"litellm:custom_llm_provider:[^;]*;model_id:([^;]+);response_id:resp_[A-Za-z0-9_-]+"
)
_ITEM: Final = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}_[0-9]{1,6}")


def new_id() -> str:
    """Return an unguessable id, of characters that every client returns unchanged."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))


def call_id_for(written: str, name: str, known: Collection[str], unique: str) -> str:
    """Return the id under which a client sees a call of `name`; `unique` is a new random id.

    The id that the model wrote is used if every client and provider accepts it and it is not among
    `known` (models restart their numbering). Otherwise the result embeds it, and `written_call_id`
    extracts it. Anthropic accepts letters, digits, - and _; OpenAI accepts at most 40 characters.
    """
    kept = written if re.fullmatch("[A-Za-z0-9_-]{1,40}", written) else ""
    if kept and kept not in known and not _MARKED.fullmatch(kept):
        return kept
    if (found := _NUMBERED.fullmatch(written)) and found[2] == name:
        kept = ("" if found[1] else "n") + found[3]
    return f"{kept}hearth{unique[-16:]}" if kept else unique


def written_call_id(client_id: str) -> str:
    """Return the id that the model wrote for a call, from the client's id."""
    return found[1] if (found := _MARKED.fullmatch(client_id)) else client_id


def numbered_call_id(written: str, name: str, number: int) -> str:
    """Return Kimi's id for a call of `name`: the model's own, else one with `number`."""
    found = _NUMBERED.fullmatch(written)
    if found and found[1] and found[2] == name:
        return written
    embedded = re.fullmatch("(n?)([0-9]{1,9})hearth[A-Za-z0-9]{16}", written) or ("", "", number)
    return f"{'' if embedded[1] else 'functions.'}{name}:{embedded[2]}"


def is_our_call_id(value: Any) -> bool:
    """Return whether a call's id may be from Hearth.

    Among other providers only Mistral has ids of letters and digits alone, and Mistral expects no
    thinking in return.
    """
    return (
        type(value) is str
        and re.fullmatch(rf"[A-Za-z0-9]{{1,{ID_CHARS}}}|{_MARKED.pattern}", value) is not None
    )


def is_our_signature(value: Any) -> bool:
    """Return whether `value` is a thinking signature of Hearth; a provider's is far longer."""
    return type(value) is str and _SIGNATURE.fullmatch(value) is not None


def is_our_response_id(value: Any) -> bool:
    """Return whether `value` is a response id of Hearth; other servers' ids have another form."""
    return type(value) is str and _RESPONSE.fullmatch(value) is not None


def is_our_item_id(value: Any) -> bool:
    """Return whether `value` is Hearth's id of an output item, made of kind, answer and number."""
    return type(value) is str and _ITEM.fullmatch(value) is not None


def response_maker(response_id: str) -> str:
    """Return the deployment that LiteLLM encoded in a response id; "" for any other id.

    Such a response is stored at its provider. A provider without a Responses API stores none.
    """
    try:
        decoded = base64.b64decode(response_id.removeprefix("resp_") + "==").decode()
    except ValueError:  # no base64, or no text
        return ""
    found = _PROVIDERS.fullmatch(decoded)
    return found[1] if found is not None and response_id.startswith("resp_") else ""
