"""Writes measured values as a reader of the page takes them in: few digits, and their unit."""

import math
from collections.abc import Sequence

from hearth.commands.bench.measures import Unit

DIGITS = 3  # that mean anything in a measured value


def number(value: float, digits: int = DIGITS) -> str:
    """Return it with that many digits that count, and its thousands apart."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 4)}f}"


def shown(value: float, unit: Unit) -> str:
    """Return the value with its unit, as a cell of a table has it."""
    match unit:
        case Unit.TOKENS | Unit.COUNT:
            return f"{value:,.0f}" if value == round(value) or value >= 100 else number(value)
        case Unit.TIMES:
            return f"{value:,.2f}×" if value < 100 else f"{value:,.0f}×"
        case Unit.SHARE:
            return _percent(value)
        case Unit.SECONDS:
            return _seconds(value)
        case Unit.PER_SECOND:
            return f"{number(value)}/s"
        case Unit.BYTES:
            return _bytes(value)
        case Unit.JOULES:
            return f"{number(value)} J"


def spread(low: float, high: float, unit: Unit) -> str:
    """Return the range of the rounds; nothing where all of them read the same."""
    first, last = shown(low, unit), shown(high, unit)
    if first == last:
        return ""
    (value, first_unit), (_, last_unit) = _apart(first), _apart(last)
    return f"{value}–{last}" if first_unit == last_unit else f"{first}–{last}"


def about(low: float, high: float, middle: float) -> str:
    """Return half the range of the rounds as a share of their median; nothing if they are alike."""
    if low == high or not middle:
        return ""
    share = 50 * (high - low) / abs(middle)
    if share < 0.1:
        return "<\u202f0.1 %"
    return f"±\u202f{share:.1f} %" if share < 9.95 else f"±\u202f{share:.0f} %"


def brief(value: float) -> str:
    """Return a count as an axis or a headline has it: 41.2 k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{number(value / size)} {letter}"
    return number(value) if value < 1 else f"{value:,.0f}"


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them."""
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]


def counted(count: int, one: str, more: str = "") -> str:
    """Return `1 line`, `2 lines`."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def _apart(text: str) -> tuple[str, str]:
    """Part a value from its unit."""
    end = len(text)
    while end and not text[end - 1].isdigit():
        end -= 1
    return text[:end], text[end:]


def _percent(share: float) -> str:
    percent = 100 * share
    if percent in (0, 100) or abs(percent) >= 100:
        return f"{percent:,.0f} %"
    return f"{percent:.1f} %" if percent < 99.95 else "> 99.9 %"


def _seconds(value: float) -> str:
    if abs(value) < 0.1:
        return f"{number(1000 * value)} ms"
    return f"{number(value)} s" if value < 600 else f"{value / 60:,.0f} min"


def _bytes(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:,.0f} B"
