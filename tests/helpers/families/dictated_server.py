"""Runs all of Hearth with a model that writes a family's cases, and asks it in every dialect."""

from typing import Any, Final

import anthropic
import ollama

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import TALKS, Sdks, Told
from tests.helpers.families.dictated_model import write_dictated_model
from tests.helpers.families.family_cases import TOOLS, WrittenFamily
from tests.helpers.servers.server import Server

DIALECTS: Final = (*TALKS, "ollama")
FILLER: Final = " a"  # one token of any family's tokenizer


class DictatedServer(Server):
    """A server whose model writes the case that a prompt's length names."""

    def __init__(self, family: WrittenFamily) -> None:
        super().__init__(PROXY_MODEL_ID=MODEL, IDLE_PREFILL="never")
        directory = self.run_dir / "model"
        directory.mkdir()
        self.family = family
        self.starts = write_dictated_model(directory, family)
        self.environment["MODEL_PATH"] = str(directory)

    def told(self, name: str, dialect: str, *, stream: bool, choice: str = "") -> Told:
        """Have a case written, behind a prompt that is padded to the length that names it."""
        asks = self._ollama if dialect == "ollama" else self._talk
        thinks = True if self.family.cases[name].reasoning else self.family.think
        told = asks("Go:", thinks, False, dialect, choice)
        missing = self.starts[name] - told.prompt
        assert missing >= 0, f"the prompt has {-missing} tokens too many: raise FIRST"
        told = asks("Go:" + FILLER * missing, thinks, stream, dialect, choice)
        assert told.prompt == self.starts[name], "a filler word is one token"
        return told

    def _talk(
        self, text: str, thinks: bool | None, stream: bool, dialect: str, choice: str
    ) -> Told:
        claude = anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)
        with self.openai() as gpt, claude:
            talk = TALKS[dialect](Sdks(self, gpt, claude))
            talk.options |= {} if thinks is None else talk.thinking(thinks)
            tools = [tool["function"] for tool in TOOLS]
            return talk.user(text).ask(stream=stream, tools=tools, choice=choice)

    def _ollama(self, text: str, thinks: bool | None, stream: bool, *_: str) -> Told:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "think": thinks}
        with ollama.Client(host=self.url) as client:
            chat: Any = client.chat(MODEL, tools=TOOLS, stream=stream, **asked)
            parts: list[Any] = list(chat) if stream else [chat]
        calls = [call.function for part in parts for call in part.message.tool_calls or ()]
        return Told(
            reasoning="".join(part.message.thinking or "" for part in parts),
            content="".join(part.message.content or "" for part in parts),
            calls=[(call.name, dict(call.arguments)) for call in calls],
            call_ids=[],
            reason="tool_calls" if calls else parts[-1].done_reason,  # it has no word for calls
            prompt=parts[-1].prompt_eval_count,
            cached=0,
            completion=parts[-1].eval_count,
            thought=0,
            raw=parts,
        )
