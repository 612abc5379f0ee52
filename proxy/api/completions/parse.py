"""Parses the body of a legacy completion, with raw prompts, into a ParsedRequest."""

from typing import Any, Final, NoReturn

from hearth.proxy.api.body import field_readers as fields, sampling_params
from hearth.proxy.api.chat_completions.parse import CHOICES_MAX
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

PROMPTS_MAX: Final = 32  # prompts in one request
ANSWERS_MAX: Final = 32  # prompts times n
LOGPROBS_MAX: Final = 5
TOKEN_ID_MAX: Final = 2**31 - 1
_PROMPT: Final = "text, a list of texts, token ids, or a list of lists of token ids; none empty"


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field has a value that the API or this server does not allow.
    """
    prompts = _prompts(body.get("prompt"))
    count = fields.integer(body, "n", 1, CHOICES_MAX) or 1
    if len(prompts) * count > ANSWERS_MAX:
        fields.refuse("n", count, f"up to {ANSWERS_MAX} answers to all prompts together")
    top_logprobs = fields.integer(body, "logprobs", 0, LOGPROBS_MAX)
    _refuse_unsupported(body, prompts[0], count, top_logprobs)
    stream_options = fields.optional_object(body, "stream_options")
    limit = sampling_params.read_max_tokens(body, "max_tokens", "n_predict", low=0)
    return ParsedRequest(
        dialect="completions",
        model=str(body.get("model") or ""),
        prompt=prompts[0],
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit or None, stop="stop", top_logprobs=top_logprobs
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        include_usage=fields.boolean(stream_options, "include_usage"),
        choices=count,
        more_prompts=tuple(prompts[1:]),
        prefill_only=limit == 0,
    )


def _prompts(value: Any) -> list[Prompt]:
    """Return the prompts, each as a text or as token ids."""
    if type(value) is not list or (value and all(type(item) is int for item in value)):
        return [_prompt(value, "prompt")]
    if not 1 <= len(value) <= PROMPTS_MAX:
        fields.refuse("prompt", f"a list of {len(value)}", f"1 to {PROMPTS_MAX} prompts")
    return [_prompt(prompt, f"prompt[{index}]") for index, prompt in enumerate(value)]


def _prompt(value: Any, param: str) -> Prompt:
    if type(value) is str and value:
        return Prompt([], text=value)
    if type(value) is not list or not value:
        fields.refuse(param, value, _PROMPT)
    for token in value:
        if type(token) is not int or not 0 <= token <= TOKEN_ID_MAX:
            fields.refuse(param, token, _PROMPT)
    return Prompt([], ids=value)


def _refuse_unsupported(
    body: dict[str, Any], prompt: Prompt, count: int, top_logprobs: int | None
) -> None:
    if body.get("suffix") not in (None, ""):
        _unsupported("suffix", "this server only continues a prompt; leave it out")
    if fields.integer(body, "best_of", 1, CHOICES_MAX) not in (None, count):
        _unsupported("best_of", f"it has to equal n, which is {count}")
    if fields.boolean(body, "echo"):
        if prompt.text is None:
            _unsupported("echo", "of token ids there is no text to repeat; send the prompt as text")
        if top_logprobs is not None:
            _unsupported("echo", "there are no logprobs of a prompt; leave one of the two out")


def _unsupported(param: str, reason: str) -> NoReturn:
    raise RequestError(
        f"{param} is not supported so: {reason}.", code="unsupported_parameter", param=param
    )
