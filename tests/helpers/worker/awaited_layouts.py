"""Names the layouts whose caches the worker cannot keep yet, and marks the tests of them.

A test of such a layout must fail with UnknownCache. Once LayerMap knows the caches, the test
passes, which is reported as a failure: then the name is removed here.
"""

from typing import Any, Final

import pytest

from hearth.worker.kv.layer_adapters import UnknownCache

AWAITED: Final = {"Qwen3.8-Flash-Next", "DeepSeek-V4.1-Flash", "GLM-5.3-Flash", "Hy4"}


def awaited(name: str, value: object, marks: tuple[pytest.MarkDecorator, ...] = ()) -> Any:
    """Return a test's parameter `value`, marked if the layout of this name is awaited."""
    unknown = pytest.mark.xfail(raises=UnknownCache, strict=True)
    return pytest.param(value, id=name, marks=(*marks, *([unknown] if name in AWAITED else [])))
