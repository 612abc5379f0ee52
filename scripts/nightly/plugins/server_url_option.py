"""Gives pytest the option by which vllm-mlx's integration tests learn their server's address.

Its conftest has that option too, and skips what uses it.
"""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--server-url", action="store", help="address of the server under test")
