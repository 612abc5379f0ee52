"""Lists the suites of other projects that a real Hearth is held to, each at one version.

A suite is run unchanged, but for the address of the server. What is not run has its reason here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

SERVED_NAME: Final = "qwen3.6-pocket"  # Rapid-MLX's matrices ask for a family by its name
# Names of models in requests, beside those that CATCH_ALL_MODELS takes.
ALIASES: Final = ("default", "model", "model_id", "string")


class Origin(StrEnum):
    SDIST = "sdist"
    GIT = "git"


class Kind(StrEnum):
    PYTEST = "pytest"
    SUMMARY = "summary"  # a program that ends with a line for each check: `name: PASS`
    EXIT = "exit status"  # a program that is one check


@dataclass(frozen=True, slots=True)
class Source:
    """Where suites come from. `project` is a name on PyPI, or owner/name on GitHub."""

    name: str
    origin: Origin
    project: str
    version: str  # of the sdist, or a whole commit
    paths: tuple[str, ...] = ()  # of the repository

    @property
    def label(self) -> str:
        """Return what a reader can look up."""
        version = self.version[:8] if self.origin is Origin.GIT else self.version
        return f"{self.project} {version}"


@dataclass(frozen=True, slots=True)
class Packages:
    """An environment of its own for suites, outside the checkout."""

    name: str
    requirements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """What is run, and how. `{url}` stands for the server's address, `{port}` for its port."""

    name: str
    about: str
    source: Source
    packages: Packages
    kind: Kind
    arguments: tuple[str, ...]  # of pytest, or a program and its arguments
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # of pytest: what the project's own settings would say
    plugin: str = ""  # a module of plugins/ that gives pytest an option of theirs
    replaced: tuple[tuple[str, str], ...] = ()  # what is fixed in a program and differs here
    limit_s: int = 300


OPENAI: Final = Source("openai", Origin.SDIST, "openai", "2.54.0")
ANTHROPIC: Final = Source("anthropic", Origin.SDIST, "anthropic", "2.14.0")
# Neither project puts these tests into its sdist.
RAPID: Final = Source(
    "rapid-mlx",
    Origin.GIT,
    "raullenchai/Rapid-MLX",
    "7222ca776c029b045cba424e7b2e942c5073529f",
    (
        *("tests/integrations", "tests/test_tool_call_e2e.py", "vllm_mlx/http_auth.py"),
        *("scripts/stress_test.py", "scripts/progressive_context_soak.py"),
        "scripts/agent_soak_test.py",
    ),
)
VLLM_MLX: Final = Source(
    "vllm-mlx",
    Origin.GIT,
    "waybarrios/vllm-mlx",
    "4b654c09e61029afa1c061a3684bff0d4c385b3c",
    ("tests/test_server.py",),
)

SDKS: Final = Packages(
    "sdks",
    (
        *("openai[aiohttp]==2.54.0", "anthropic[aiohttp]==2.14.0", "pytest==9.2.0"),
        *("pytest-asyncio==1.5.0", "respx==0.23.1", "dirty-equals==0.11"),
        *("time-machine==3.6.0", "inline-snapshot==0.36.1", "http-snapshot==0.1.9"),
        *("nest-asyncio==1.6.0", "rich==15.0.0"),
    ),
)
AGENTS: Final = Packages(
    "agents",
    (
        *("openai==3.57.0", "anthropic==2.14.0", "pytest==9.2.0", "httpx==0.28.1"),
        *("requests==2.34.2", "langchain-core==1.8.3", "langchain-openai==1.7.4"),
        *("pydantic-ai-slim[openai]==2.68.0", "smolagents[openai]==1.26.0", "fastapi==0.165.0"),
    ),
)

_STRICT: Final = ("-o", "xfail_strict=true", "-o", "asyncio_mode=auto", "-W", "error")
_RAPID_ENVIRONMENT: Final = {
    "RAPID_MLX_BASE_URL": "{url}/v1",
    "RAPID_MLX_AGENT_MATRIX_FAMILY": "qwen36",
    "RAPID_MLX_MATRIX_STRICT": "1",  # a cell that the server fails is a failure and no skip
}


def _openai(name: str, about: str, *paths: str) -> Suite:
    return Suite(
        f"openai-{name}",
        about,
        OPENAI,
        SDKS,
        Kind.PYTEST,
        tuple(f"tests/api_resources/{path}" for path in paths),
        {"TEST_API_BASE_URL": "{url}/v1"},
        _STRICT,
    )


def _anthropic(name: str, about: str, *paths: str) -> Suite:
    return Suite(
        f"anthropic-{name}",
        about,
        ANTHROPIC,
        SDKS,
        Kind.PYTEST,
        tuple(f"tests/api_resources/{path}" for path in paths),
        {"TEST_API_BASE_URL": "{url}"},
        (*_STRICT, "-p", "tests._alias_httpx"),
    )


def _rapid(name: str, about: str, program: str) -> Suite:
    arguments = (f"tests/integrations/{program}",)
    return Suite(f"rapid-{name}", about, RAPID, AGENTS, Kind.SUMMARY, arguments, _RAPID_ENVIRONMENT)


SUITES: Final = (
    _openai("chat", "OpenAI's SDK: chat completions", "chat/test_completions.py"),
    _openai("completions", "OpenAI's SDK: completions", "test_completions.py"),
    _openai("responses", "OpenAI's SDK: Responses", "test_responses.py", "responses"),
    _openai("embeddings", "OpenAI's SDK: embeddings", "test_embeddings.py"),
    _openai("models", "OpenAI's SDK: models", "test_models.py"),
    _anthropic("messages", "Anthropic's SDK: messages, counting", "test_messages.py"),
    _anthropic("beta", "Anthropic's SDK: the same, beta", "beta/test_messages.py"),
    _anthropic("models", "Anthropic's SDK: models", "test_models.py", "beta/test_models.py"),
    _rapid("anthropic", "Rapid-MLX: Anthropic's SDK", "test_anthropic_sdk.py"),
    _rapid("langchain", "Rapid-MLX: LangChain", "test_langchain.py"),
    _rapid("pydantic-ai", "Rapid-MLX: PydanticAI", "test_pydantic_ai_full.py"),
    _rapid("smolagents", "Rapid-MLX: smolagents", "test_smolagents_full.py"),
    Suite(
        "rapid-agents",
        "Rapid-MLX: what eleven agents send, three frameworks",
        RAPID,
        AGENTS,
        Kind.PYTEST,
        (
            "tests/integrations/test_agents_matrix.py",
            "tests/integrations/test_frameworks_matrix.py",
        ),
        _RAPID_ENVIRONMENT,
    ),
    Suite(
        "rapid-tools",
        "Rapid-MLX: an agent with OpenClaw's 14 tools, streamed",
        RAPID,
        AGENTS,
        Kind.PYTEST,
        ("tests/test_tool_call_e2e.py",),
        replaced=(("http://localhost:8000", "{url}"),),
    ),
    Suite(
        "rapid-stress",
        "Rapid-MLX: many at once, aborted streams, tools",
        RAPID,
        AGENTS,
        Kind.SUMMARY,
        ("scripts/stress_test.py", "--port", "{port}"),
    ),
    Suite(
        "rapid-growing-context",
        "Rapid-MLX: a Responses session that grows",
        RAPID,
        AGENTS,
        Kind.EXIT,
        (
            *("scripts/progressive_context_soak.py", "--url", "{url}/v1", "--model", "default"),
            *("--stages", "1000,2000,4000", "--timeout", "60"),
        ),
    ),
    Suite(
        "rapid-soak",
        "Rapid-MLX: agents for 20 seconds",
        RAPID,
        AGENTS,
        Kind.EXIT,
        ("scripts/agent_soak_test.py", "--url", "{url}/v1", "--duration", "20"),
    ),
    Suite(
        "vllm-mlx",
        "vllm-mlx: what its server's integration tests ask",
        VLLM_MLX,
        AGENTS,
        Kind.PYTEST,
        ("tests/test_server.py",),
        options=("-k", "TestServerIntegration", "--noconftest", "--server-url", "{url}"),
        plugin="server_url_option",
        # The file's other tests need Apple silicon; these ask over HTTP.
        replaced=(('sys.platform != "darwin" or platform.machine() != "arm64"', "False"),),
    ),
)

NOT_RUN: Final = (
    (
        "OpenAI's and Anthropic's other resources",
        "stored chat completions, files, batches, audio, images, assistants, "
        "fine-tuning, agents ...: Hearth does not serve them",
    ),
    ("Rapid-MLX: Open WebUI, LibreChat", "need Docker"),
    ("Rapid-MLX: Aider and Hermes in depth", "need these programs"),
    ("Rapid-MLX: forced tools in depth, Hy3 parsers", "load Rapid-MLX's own package in-process"),
    ("Rapid-MLX: evals", "grade what a model knows"),
    (
        "vllm-mlx: bench-serve, GSM8K",
        "measure a model and its speed; GSM8K downloads its questions",
    ),
    ("mlx-lm, mlx-vlm, oMLX, mlx-openai-server, mlx-engine", "test their own modules in-process"),
)
