"""Parses a client's body into a ParsedRequest, whatever its dialect."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from hearth.proxy.api.body import field_readers as fields, prompt_limits
from hearth.proxy.api.body.message_content import log_left_out
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.documents.prompt_documents import DocumentReader, holds_documents, with_documents
from hearth.proxy.http.http_exchange import work_on_body
from hearth.proxy.images.prompt_images import ImageFetcher, shows_images, with_images
from hearth.proxy.request.message_digests import MessageDigester
from hearth.proxy.request.parsed_request import Dialect, ParsedRequest
from hearth.proxy.request.session_id import api_key_digest, conversation_of, session_of, title_of
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import Prompt, Sampling


def has_files(request: ParsedRequest) -> bool:
    """Return whether `request` has images or documents that `complete` will read."""
    return shows_images(request.prompt) or holds_documents(request.prompt)


class BodyParser:
    """Parses bodies, reads their images and documents, and names their messages.

    Owner: the event loop.
    """

    def __init__(self, settings: Settings, stored: ResponseStore) -> None:
        self._digester = MessageDigester(
            settings.cache_canonicalize_tool_context, settings.cache_norm_safety_check
        )
        self.images = ImageFetcher(settings.allow_image_urls)
        self.documents = DocumentReader()
        self._stored = stored

    def expand(
        self, dialect: Dialect, body: dict[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return `body` with stored items in place of its references. Raises: RequestError."""
        return (
            self._stored.expand(api_key_digest(headers), body) if dialect == "responses" else body
        )

    def parse(
        self, dialect: Dialect, body: dict[str, Any], headers: Mapping[str, str]
    ) -> ParsedRequest:
        """Return the request in an expanded `body`; `complete` comes next. Any thread.

        The names of `headers` are in lower case.

        Raises:
            RequestError: a field has a value that the API or this server does not allow.
        """
        prompt_limits.check_body(body)
        request = DIALECTS[dialect].parse(body)
        prompt_limits.check_prompt(request.prompt, request.constraints)
        use_kv_cache = fields.boolean(body, "use_kv_cache", default=True)
        log_left_out(request.left_out)
        speaker = dataclasses.replace(
            session_of(headers, body, api_key_digest(headers)),
            title=title_of(request.prompt.messages),
        )
        prompt, *more = (
            dataclasses.replace(prompt, speaker=speaker)
            for prompt in (request.prompt, *request.more_prompts)
        )
        return dataclasses.replace(
            request, prompt=prompt, more_prompts=tuple(more), use_kv_cache=use_kv_cache
        )

    def raw_request(
        self, prompt: Prompt, body: dict[str, Any], headers: Mapping[str, str]
    ) -> ParsedRequest:
        """Return the request for a raw `prompt` whose tokens are only counted or converted."""
        speaker = session_of(headers, body, api_key_digest(headers))
        prompt = dataclasses.replace(prompt, speaker=speaker)
        return ParsedRequest("completions", "", prompt, Sampling(), stream=False, body=body)

    async def complete(
        self,
        request: ParsedRequest,
        hold: Callable[[int], None] = lambda _: None,
        size: int = 0,
    ) -> ParsedRequest:
        """Return `request` with its images and documents read, and its messages named.

        The event loop is blocked only briefly: the method awaits if `has_files(request)`, or if the
        body's `size` in bytes is large. `hold` receives the bytes of kept images and the sizes
        of document texts.

        Raises:
            RequestError: an image or a document cannot be read, or `hold` refuses more bytes.
        """
        prompt = request.prompt
        owner = prompt.speaker.key
        if holds_documents(prompt):
            prompt, chars = await with_documents(prompt, self.documents, owner, hold)
            size += chars
        if shows_images(prompt):
            prompt = await with_images(prompt, self.images, hold)
        naming = functools.partial(self._digester.names, prompt.messages, owner)
        names, delta_chars = await work_on_body(size, naming)
        conversation = conversation_of(prompt.speaker, prompt.messages, names)
        prompt = dataclasses.replace(
            prompt,
            names=names,
            delta_chars=delta_chars,
            speaker=dataclasses.replace(prompt.speaker, conversation=conversation),
        )
        return dataclasses.replace(request, prompt=prompt)
