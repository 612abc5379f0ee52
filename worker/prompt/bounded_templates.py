"""Has every chat template in this process end: what one does in a loop is counted as it runs.

A template is a program that came with the weights. transformers renders it in a Jinja sandbox,
which keeps it from files and the network, and from no loop. Importing this module puts the sandbox
below in the place of that one.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from hearth.worker.prompt.awaited_work import joined, stop_unless_it_ends

PRODUCT_SIZE_MAX: Final = 1 << 20  # bits of a number, or elements of a text or a list
_GOES_ON: Final = "goes_on"
_LOOPS: Final = ("map", "reject", "rejectattr", "select", "selectattr", "sum")  # filters


@pass_context  # so that it is not computed once, when the template is compiled
def _goes_on(_context: Context, _value: Any) -> bool:
    stop_unless_it_ends()
    return True


class _LoopsThatAsk(CodeGenerator):
    """Compiles a template with a question in each pass of a loop: whether it is to go on."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        for loop in node.find_all(nodes.For):
            asks = nodes.Filter(nodes.Const(True), _GOES_ON, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(asks, lineno=loop.lineno))
            loop.test = loop.test and nodes.And(asks, loop.test)
        super().visit_Template(node, frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders within RENDER_S_MAX, for a client that waits, and multiplies nothing beyond a size.

    A macro and a block ask in `joined`. Immutable once it is made: any thread may render.
    """

    intercepted_binops = frozenset({"*", "**"})
    code_generator_class = _LoopsThatAsk
    concat = staticmethod(joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters |= {name: _asking(self.filters[name]) for name in _LOOPS}
        self.filters[_GOES_ON] = _goes_on

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return `left * right` or `left ** right`. Raises: SecurityError."""
        size = _size(operator, left, right)
        if size > PRODUCT_SIZE_MAX:
            raise SecurityError(f"{operator} makes {size:,.0f}, more than {PRODUCT_SIZE_MAX:,}.")
        return super().call_binop(context, operator, left, right)


def _asking(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that asks at each of the values that it goes through."""

    @functools.wraps(loops)
    def asking(context: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return loops(context, values and _asked(values), *args, **kwargs)

    return asking


def _asked(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        stop_unless_it_ends()
        yield value


def _size(operator: str, left: Any, right: Any) -> int:
    """Return how many bits or elements the product or the power has, at most."""
    match left, right:
        case int(), int():
            return left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        case (int() as count, Sized() as value) | (Sized() as value, int() as count):
            return count * len(value)
    return 0


chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
