"""Has every chat template in this process end: what one does in a loop is counted as it runs.

A template is a program that came with the weights. transformers renders it in a Jinja sandbox,
which keeps it from files and the network, and from no loop. Importing this module puts the sandbox
below in the place of that one.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sized
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.filters import sync_do_map
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from hearth.shared import written_numbers
from hearth.worker.prompt.awaited_work import joined, stop_unless_it_ends

PRODUCT_SIZE_MAX: Final = 1 << 20  # bits of a number, or elements of a text or a list
VALUE_SIZE_MAX: Final = 1 << 24  # elements of what is put together: more than any context
WIDTH_MAX: Final = 64  # digits, or blanks, that a filter is asked for
_GOES_ON: Final = "goes_on"
_LOOPS: Final = ("map", "reject", "rejectattr", "select", "selectattr", "sum")  # filters
_OF_A_WIDTH: Final = ("indent", "round", "tojson")  # filters
# They loop, or grow by a number, and ask nobody; no chat template needs them.
_NO_FILTERS: Final = (
    *("batch", "center", "filesizeformat", "format", "pprint", "slice", "truncate", "urlize"),
    *("wordcount", "wordwrap", "xmlattr"),
)
_NO_METHODS: Final = (
    *("center", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "to_bytes"),
    *("translate", "zfill"),
)
_WIDE: Final = re.compile(r"\d{5}|[:.]\{|%[^a-z]*\*")  # in a text that is formatted


@pass_context  # so that it is not computed once, when the template is compiled
def _goes_on(_context: Context, _value: Any) -> bool:
    stop_unless_it_ends()
    return True


def _check(size: int, size_max: int = VALUE_SIZE_MAX) -> None:
    if size > size_max:
        raise SecurityError(f"What it makes is unsafe: more than {size_max:,} elements or bits.")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise SecurityError("A width or a precision of five digits, or of a field, is unsafe.")


def _join(values: Iterable[Any], d: Any = "") -> str:
    texts, size = [], 0
    for value in values:
        stop_unless_it_ends()
        texts.append(str(value))
        size += len(texts[-1]) + len(str(d))
        _check(size)
    return str(d).join(texts)


@pass_context
def _joined_by(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = sync_do_map(context, value, attribute=attribute)
    return _join(value, d)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    _check(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _asking(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that asks at each of the values that it goes through."""

    @functools.wraps(loops)
    def asking(context: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        asked = (each for each in values or () if _goes_on(context, each))
        return loops(context, asked, *args, **kwargs)

    return asking


def _narrow(makes: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that takes no number, nor text, beyond WIDTH_MAX beside its value."""

    @functools.wraps(makes)
    def narrow(value: Any, *args: Any, **kwargs: Any) -> Any:
        for each in (*args, *kwargs.values()):
            size = len(each) if isinstance(each, str) else each
            _check(size if isinstance(size, int) else 0, WIDTH_MAX)
        return makes(value, *args, **kwargs)

    return narrow


def _size(operator: str, left: Any, right: Any) -> int:
    """Return how many bits or elements the product or the power has, at most."""
    match left, right:
        case int(), int():
            return left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        case (int() as count, Sized() as value) | (Sized() as value, int() as count):
            return count * _elements(value)
    return 0


def _elements(value: Sized) -> int:
    """Return how many elements there are in `value` and in all that is in it."""
    size, values = 0, [value]
    while values and size <= PRODUCT_SIZE_MAX:
        each = values.pop()
        size += len(each)
        if isinstance(each, list | tuple):
            values += [inner for inner in each if isinstance(inner, Sized)]
    return size


class _LoopsThatAsk(CodeGenerator):
    """Compiles a template with a question in each pass of a loop: whether it is to go on."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.tied(")
        self.visit_Tuple(nodes.Tuple(node.nodes, "load"), frame)
        self.write(")")

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        filters = self.environment.filters  # those of transformers too, which come last
        filters["tojson"] = written_numbers.dumps
        filters |= {name: _narrow(filters[name]) for name in _OF_A_WIDTH}
        for loop in node.find_all(nodes.For):
            asks = nodes.Filter(nodes.Const(True), _GOES_ON, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(asks, lineno=loop.lineno))
            loop.test = loop.test and nodes.And(asks, loop.test)
        super().visit_Template(node, frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders within RENDER_S_MAX, for a client that waits, and makes nothing beyond a size.

    A macro and a block ask in `joined`. Immutable once it is made: any thread may render.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _LoopsThatAsk
    concat = staticmethod(joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, optimized=False)  # all is computed where it is bounded
        self.filters |= {name: _asking(self.filters[name]) for name in _LOOPS}
        self.filters |= {_GOES_ON: _goes_on, "join": _joined_by, "replace": _replace}
        for name in _NO_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return what the operator makes. Raises: SecurityError."""
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+":
            _check(sum(len(side) for side in (left, right) if isinstance(side, Sized)))
        else:
            _check(_size(operator, left, right), PRODUCT_SIZE_MAX)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        if getattr(value, "__name__", "") == "format":
            _check_format(getattr(value, "__self__", None))
        return super().wrap_str_format(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template names. Raises: SecurityError."""
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str) and name in ("join", "replace"):
            for of_the_template in ("_block_vars", "_loop_vars"):  # as within a loop
                kwargs.pop(of_the_template, None)
            return _join(args[0], text) if name == "join" else _replace(text, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    tied = staticmethod(_join)  # what `~` does


def _plain(value: Any) -> Any:
    """Return what a template may see of a value: its digits too, where they were written so."""
    is_plain = type(value) in (written_numbers.WrittenNumber, Undefined)
    return value if is_plain else _of_plain_types(value)


_of_plain_types: Final = chat_template_utils._plain_template_data  # which asks itself by that name
chat_template_utils._plain_template_data = _plain
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
