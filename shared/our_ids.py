"""Makes the ids that clients are given, and tells them from other servers' by their form alone.

A conversation may go on at a provider that knows none of ours, and come back with ids of the
provider's. No memory is asked which are which: it would end with a restart.
"""

import base64
import re
import secrets
import string
from typing import Any, Final

ID_CHARS: Final = 22  # of letters and digits: 131 bits
SIGNATURE_BEGIN: Final = "hearth-"  # of thinking
_ALPHABET: Final = string.ascii_letters + string.digits
_PLAIN: Final = re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}")
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


def is_our_call_id(value: Any) -> bool:
    return type(value) is str and _PLAIN.fullmatch(value) is not None


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
