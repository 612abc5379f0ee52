"""Makes every chat template in this process end, by a check in each pass of a loop.

A template is a program that comes with the weights. transformers renders templates in a Jinja
sandbox that bars files and the network, but no endless loops. An import of this module replaces
that sandbox by BoundedEnvironment.
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
from hearth.worker.prompt.awaited_work import joined, raise_if_stopped

PRODUCT_SIZE_MAX: Final = 1 << 20  # bits of a number, or length of a text or a list
VALUE_SIZE_MAX: Final = 1 << 24  # length of a joined value, longer than any context
WIDTH_MAX: Final = 64  # digits or blanks that a filter may be asked for
_GOES_ON: Final = "goes_on"
_LOOP_FILTERS: Final = ("map", "reject", "rejectattr", "select", "selectattr", "sum")
_WIDTH_FILTERS: Final = ("indent", "round", "tojson")
# Filters that loop, or make long texts from a number, without a check; no template needs them.
_REMOVED_FILTERS: Final = (
    *("batch", "center", "filesizeformat", "format", "pprint", "slice", "truncate", "urlize"),
    *("wordcount", "wordwrap", "xmlattr"),
)
_REFUSED_METHODS: Final = (
    *("center", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "to_bytes"),
    *("translate", "zfill"),
)
_WIDE_FORMAT: Final = re.compile(r"\d{5}|[:.]\{|%[^a-z]*\*")  # refused in format strings


@pass_context  # without a context, Jinja would compute this once, on compilation
def _goes_on(_context: Context, _value: Any) -> bool:
    raise_if_stopped()
    return True


def _check(size: int, size_max: int = VALUE_SIZE_MAX) -> None:
    if size > size_max:
        raise SecurityError(f"What it makes is unsafe: more than {size_max:,} elements or bits.")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise SecurityError("A width or a precision of five digits, or of a field, is unsafe.")


def _join(values: Iterable[Any], d: Any = "") -> str:
    texts, size = [], 0
    for value in values:
        raise_if_stopped()
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


def _with_checks(loop_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks at each value whether the rendering may go on."""

    @functools.wraps(loop_filter)
    def checked_filter(context: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        checked_values = (value for value in values or () if _goes_on(context, value))
        return loop_filter(context, checked_values, *args, **kwargs)

    return checked_filter


def _with_width_limit(width_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose arguments are limited: numbers, and lengths of texts, to WIDTH_MAX."""

    @functools.wraps(width_filter)
    def limited_filter(value: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            size = len(argument) if isinstance(argument, str) else argument
            _check(size if isinstance(size, int) else 0, WIDTH_MAX)
        return width_filter(value, *args, **kwargs)

    return limited_filter


def _size(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound of the bits or the length of a product or a power."""
    match left, right:
        case int(), int():
            return left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        case (int() as count, Sized() as value) | (Sized() as value, int() as count):
            return count * _elements(value)
    return 0


def _elements(value: Sized) -> int:
    """Return the number of items in `value` and in all containers inside."""
    size, values = 0, [value]
    while values and size <= PRODUCT_SIZE_MAX:
        container = values.pop()
        size += len(container)
        if isinstance(container, list | tuple):
            values += [inner for inner in container if isinstance(inner, Sized)]
    return size


class _LoopCheckCompiler(CodeGenerator):
    """Compiles a template with a check in each pass of a loop."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.tied(")
        self.visit_Tuple(nodes.Tuple(node.nodes, "load"), frame)
        self.write(")")

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        filters = self.environment.filters  # includes the filters that transformers has added
        filters["tojson"] = written_numbers.dumps
        filters |= {name: _with_width_limit(filters[name]) for name in _WIDTH_FILTERS}
        for loop in node.find_all(nodes.For):
            check = nodes.Filter(nodes.Const(True), _GOES_ON, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(check, lineno=loop.lineno))
            loop.test = loop.test and nodes.And(check, loop.test)
        super().visit_Template(node, frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders within RENDER_S_MAX for a client that waits, and limits the size of values.

    Macros and blocks call `joined`, which checks. Immutable once built: any thread may render.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _LoopCheckCompiler
    concat = staticmethod(joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, optimized=False)  # else constants have no limit
        self.filters |= {name: _with_checks(self.filters[name]) for name in _LOOP_FILTERS}
        self.filters |= {_GOES_ON: _goes_on, "join": _joined_by, "replace": _replace}
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the operator's result. Raises: SecurityError."""
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+":
            _check(sum(len(side) for side in (left, right) if isinstance(side, Sized)))
        else:
            _check(_size(operator, left, right), PRODUCT_SIZE_MAX)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        if getattr(value, "__name__", "") == "format":
            _check_format(getattr(value, "__self__", None))
        return super().wrap_str_format(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for a template. Raises: SecurityError."""
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str) and name in ("join", "replace"):
            for jinja_argument in ("_block_vars", "_loop_vars"):  # passed inside a loop
                kwargs.pop(jinja_argument, None)
            return _join(args[0], text) if name == "join" else _replace(text, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    tied = staticmethod(_join)  # the `~` operator


def _plain(value: Any) -> Any:
    """Return a value in the form for templates; a number keeps its written digits."""
    is_plain = type(value) in (written_numbers.WrittenNumber, Undefined)
    return value if is_plain else _plain_template_data(value)


# This function calls itself by the module's name, so `_plain` also gets the inner values.
_plain_template_data: Final = chat_template_utils._plain_template_data
chat_template_utils._plain_template_data = _plain
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
