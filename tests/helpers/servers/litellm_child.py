"""Starts a process that runs LiteLLM with a config, and asks it what its loop is to do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from hearth.shared.settings_from_env import PROJECT_DIR

PROGRAM: Final = Path(__file__).with_name("litellm_child_program.py")
_ENVIRONMENT: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_DONT_SHOW_FEEDBACK_BOX": "true",
}


class Refused(Exception):
    """What was asked ended in a RequestError: its status, code and text are `args`."""


class LiteLLMChild:
    """LiteLLM in a process of its own, which ends with `close`."""

    def __init__(self, config: Path, **environ: str) -> None:
        environ = os.environ | _ENVIRONMENT | {"CONFIG_FILE_PATH": str(config)} | environ
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            cwd=PROJECT_DIR,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # LiteLLM logs each refusal
            text=True,
        )
        assert self._read() == {"ready": True}

    def ask(self, what: str, /, **fields: Any) -> Any:
        """Raises: Refused: it ended in a RequestError."""
        assert self._process.stdin is not None
        print(json.dumps({"do": what, **fields}), file=self._process.stdin, flush=True)
        reply = self._read()
        if "refused" in reply:
            raise Refused(*reply["refused"])
        assert "failed" not in reply, reply
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "LiteLLM's process has ended"
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()
