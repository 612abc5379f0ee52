"""The page shows what was measured, where Hearth is behind and why, and runs nothing."""

from hearth.commands.bench.page import bench_page
from tests.helpers.bench.flat_results import flat_results

EVIL = "<script>alert(1)</script>"


def test_what_a_stranger_writes_is_text() -> None:
    results = flat_results({(EVIL, EVIL, EVIL): [{"cpu_s": 1.0}]})
    results.machine = results.command = results.version = EVIL
    results.put((EVIL, EVIL, EVIL), 1, {}, errors=[EVIL])
    page = bench_page(results, {(EVIL, "cpu_s"): EVIL}, {EVIL: EVIL})
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
