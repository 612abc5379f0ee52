"""Lists the suites of other projects that a real Hearth is held to, each at one version.

A suite is run unchanged, but for the address of the server. Not run are resources that Hearth does
not serve, what needs Docker or a program of its own, and what tests its project's own modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

RAPID: Final = "raullenchai/Rapid-MLX@7222ca776c029b045cba424e7b2e942c5073529f"
SDKS: Final = (
    *("openai[aiohttp]==2.54.0", "anthropic[aiohttp]==2.14.0", "pytest==9.2.0"),
    *("pytest-asyncio==1.5.0", "respx==0.23.1", "dirty-equals==0.11", "time-machine==3.6.0"),
    *("inline-snapshot==0.36.1", "http-snapshot==0.1.9", "nest-asyncio==1.6.0", "rich==15.0.0"),
)
AGENTS: Final = (
    *("openai==3.57.0", "anthropic==2.14.0", "pytest==9.2.0", "httpx==0.28.1"),
    *("requests==2.34.2", "langchain-core==1.8.3", "langchain-openai==1.7.4"),
    *("pydantic-ai-slim[openai]==2.68.0", "smolagents[openai]==1.26.0", "fastapi==0.165.0"),
)
RAPID_PATHS: Final = (
    *("tests/integrations", "tests/test_tool_call_e2e.py", "vllm_mlx/http_auth.py"),
    *("scripts/stress_test.py", "scripts/progressive_context_soak.py"),
    "scripts/agent_soak_test.py",
)
STRICT: Final = ("-o", "xfail_strict=true", "-o", "asyncio_mode=auto", "-W", "error")


@dataclass(frozen=True, slots=True)
class Suite:
    """What is run, and how. `{url}` stands for the server's address, `{port}` for its port."""

    name: str
    source: str
    arguments: tuple[str, ...]  # of pytest, or a program and its arguments
    # A program ends with a line for each check (`name: PASS`), or is one check by its exit status.
    kind: Literal["pytest", "summary", "exit"] = "pytest"
    paths: tuple[str, ...] = ()  # of a repository
    packages: tuple[str, ...] = AGENTS
    environment: Mapping[str, str] = field(default_factory=dict)
    replaced: tuple[tuple[str, str], ...] = ()  # what is fixed in a program and differs here


def _rapid(name: str, kind: Literal["pytest", "summary", "exit"], *arguments: str) -> Suite:
    environment = {
        "RAPID_MLX_BASE_URL": "{url}/v1",
        "RAPID_MLX_AGENT_MATRIX_FAMILY": "qwen36",
        "RAPID_MLX_MATRIX_STRICT": "1",  # a cell that the server fails is a failure and no skip
    }
    return Suite(f"rapid-{name}", RAPID, arguments, kind, RAPID_PATHS, AGENTS, environment)


_API: Final = "tests/api_resources"
SUITES: Final = (
    Suite(
        "openai",
        "openai==2.54.0",
        (
            *(*STRICT, f"{_API}/chat/test_completions.py", f"{_API}/test_completions.py"),
            *(f"{_API}/test_responses.py", f"{_API}/responses", f"{_API}/test_embeddings.py"),
            f"{_API}/test_models.py",
        ),
        packages=SDKS,
        environment={"TEST_API_BASE_URL": "{url}/v1"},
    ),
    Suite(
        "anthropic",
        "anthropic==2.14.0",
        (
            *(*STRICT, "-p", "tests._alias_httpx", f"{_API}/test_messages.py"),
            *(f"{_API}/beta/test_messages.py", f"{_API}/test_models.py"),
            f"{_API}/beta/test_models.py",
        ),
        packages=SDKS,
        environment={"TEST_API_BASE_URL": "{url}"},
    ),
    _rapid("anthropic", "summary", "tests/integrations/test_anthropic_sdk.py"),
    _rapid("langchain", "summary", "tests/integrations/test_langchain.py"),
    _rapid("pydantic-ai", "summary", "tests/integrations/test_pydantic_ai_full.py"),
    _rapid("smolagents", "summary", "tests/integrations/test_smolagents_full.py"),
    _rapid(
        *("agents", "pytest", "tests/integrations/test_agents_matrix.py"),
        "tests/integrations/test_frameworks_matrix.py",
    ),
    Suite(
        "rapid-tools",
        RAPID,
        ("tests/test_tool_call_e2e.py",),
        paths=RAPID_PATHS,
        replaced=(("http://localhost:8000", "{url}"),),
    ),
    _rapid("stress", "summary", "scripts/stress_test.py", "--port", "{port}"),
    _rapid(
        *("growing-context", "exit", "scripts/progressive_context_soak.py", "--url", "{url}/v1"),
        *("--model", "default", "--stages", "1000,2000,4000", "--timeout", "60"),
    ),
    _rapid(
        *("soak", "exit", "scripts/agent_soak_test.py", "--url", "{url}/v1", "--duration", "20"),
    ),
    Suite(
        "vllm-mlx",
        "waybarrios/vllm-mlx@4b654c09e61029afa1c061a3684bff0d4c385b3c",
        (
            *("-p", "server_url_option", "-k", "TestServerIntegration", "--noconftest"),
            *("--server-url", "{url}", "tests/test_server.py"),
        ),
        paths=("tests/test_server.py",),
        # The file's other tests need Apple silicon; these ask over HTTP.
        replaced=(('sys.platform != "darwin" or platform.machine() != "arm64"', "False"),),
    ),
)
