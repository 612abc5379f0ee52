"""The page shows what was measured, where Hearth is behind and why, and runs nothing."""

from hearth.commands.bench.page import bench_page, parsed_causes
from hearth.commands.bench.results import Results
from tests.helpers.bench.flat_results import flat_results

CAUSES = """# Why Hearth is behind

A word before the first section is nobody's cause.

## linear / cpu_s
Hearth is two processes.
## * / first token, p50
The proxy.
"""
EVIL = "<script>alert(1)</script>"


def compared() -> Results:
    """Return a run in which Hearth reads less than another server, and waits longer."""
    own = {"read_tokens": 1_000.0, "ideal_tokens": 1_000.0, "ttft_p50_s": 0.5, "cpu_s": 2.0}
    other = {"read_tokens": 2_500.0, "ttft_p50_s": 0.1, "cpu_s": 1.0}
    return flat_results(
        {("m", "hearth", "linear"): [own] * 5, ("m", "other", "linear"): [other] * 5}
    )


def test_what_is_behind_stands_there_with_its_cause() -> None:
    page = bench_page(compared(), parsed_causes(CAUSES), {"linear": "One agent works alone."})
    assert "ahead in\n1, can't be told apart in 0, and is" in page and "behind in 2" in page
    behind = page[page.index("Where Hearth is behind") : page.index("All that was measured")]
    assert "2 s, other 1 s" in behind and "Hearth is two processes." in behind
    assert "0.5 s, other 0.1 s" in behind and "The proxy." in behind
    assert "One agent works alone." in page and "--w:83%" in page, "2.5 of 3 times the ideal"
    assert "<td class=w>2,500" in page and "<td class=b>1 s" in page


def test_what_a_stranger_writes_is_text() -> None:
    results = flat_results({(EVIL, EVIL, EVIL): [{"cpu_s": 1.0}]})
    results.machine = results.command = results.version = EVIL
    results.put((EVIL, EVIL, EVIL), 1, {}, errors=[EVIL])
    page = bench_page(results, {(EVIL, "cpu_s"): EVIL}, {EVIL: EVIL})
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
