"""Makes a client's body our request: its dialect's fields, and what all dialects share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from proxy.canonical import Canonicaliser
from proxy.dialects import chat, completions, fields, foreign, messages, responses
from proxy.dialects.stored import ResponseStore
from proxy.images import Images
from proxy.prompt_images import shows_images, with_images
from proxy.request import Dialect, ParsedRequest
from proxy.speaker import key_digest, speaker_of
from shared.config import Settings

_PARSERS: Final = {
    "chat": chat.parse,
    "completions": completions.parse,
    "messages": messages.parse,
    "responses": responses.parse,
}


class Intake:
    """Reads bodies. Owner: the event loop."""

    def __init__(self, settings: Settings, stored: ResponseStore) -> None:
        self._canonicaliser = Canonicaliser(
            settings.cache_canonicalize_tool_context, settings.cache_norm_safety_check
        )
        self._images = Images(settings.allow_image_urls)
        self._uses_kv_cache = settings.use_kv_cache
        self._stored = stored

    def read(
        self, dialect: Dialect, body: dict[str, Any], headers: Mapping[str, str]
    ) -> ParsedRequest:
        """Return the request in `body`, for `complete`; the names of `headers` are in lower case.

        Raises:
            RequestError: a field is not what the API allows, or needs what this server lacks.
        """
        key = key_digest(headers)
        if dialect == "responses":
            body = self._stored.expanded(key, body)
        request = _PARSERS[dialect](body)
        use_kv_cache = fields.boolean(body, "use_kv_cache", default=self._uses_kv_cache)
        foreign.note(request.left_out)
        speaker = speaker_of(headers, body, key)
        prompt = dataclasses.replace(request.prompt, speaker=speaker)
        more = tuple(dataclasses.replace(each, speaker=speaker) for each in request.more_prompts)
        return dataclasses.replace(
            request, prompt=prompt, more_prompts=more, use_kv_cache=use_kv_cache
        )

    async def complete(
        self, request: ParsedRequest, hold: Callable[[int], None] = lambda _: None
    ) -> ParsedRequest:
        """Return a request of `read` with its images read and its messages named.

        It waits only where there are images. `hold` is told the bytes that are kept of them.

        Raises:
            RequestError: an image cannot be had; or what `hold` raises.
        """
        prompt = request.prompt
        if shows_images(prompt):
            prompt = await with_images(prompt, self._images, hold)
        names, delta_chars = self._canonicaliser.names(prompt.messages)
        prompt = dataclasses.replace(prompt, names=names, delta_chars=delta_chars)
        return dataclasses.replace(request, prompt=prompt)
