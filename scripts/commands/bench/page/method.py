"""Says how the figures were made: the machine, servers, models, remarks, how to repeat a line."""

import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from hearth.commands.bench.page.causes import Causes
from hearth.commands.bench.page.markup import Html, joined, tag, with_code
from hearth.commands.bench.page.meter_check import counted_otherwise
from hearth.commands.bench.page.page_lines import PageLines
from hearth.commands.bench.page.value_format import brief, counted, listed
from hearth.commands.bench.results import HEARTH, Results

PROMPTS_ALIKE: Final = 0.002  # of a prompt's length: that much longer is told
ERRORS_MAX: Final = 3  # of a server and workload
ERROR_CHARS_MAX: Final = 160
WORKLOADS_NAMED_MAX: Final = 4  # where one error was met


def is_cpu(results: Results) -> bool:
    """Return whether MLX computed on the CPU: on Apple Silicon and with CUDA it does not."""
    machine = results.machine.lower()
    return not any(word in machine for word in ("apple m", "apple silicon", "cuda", "nvidia"))


def standing_notice(results: Results) -> Html:
    """Say in plain sight what figures of stand-ins and of a CPU do not tell."""
    small = [each for each in results.models.values() if each.is_stand_in]
    parts = []
    if small:
        which = "The models are" if len(small) == len(results.models) else (
            listed([each.label for each in small]) + (" are" if len(small) > 1 else " is")
        )  # fmt: skip
        largest = brief(max(each.bytes for each in small))
        parts.append(
            f"{which} test fixtures with random weights, of {largest}B at most: their answers mean "
            "nothing."
        )
    if is_cpu(results):
        parts.append("MLX computed on a CPU, not on Apple Silicon.")
    if not parts:
        return joined()
    parts.append(
        "Tokens read mean the same on any machine, but where time decides what is read: of "
        "cancelled prompts, of agents at once, and after a kill."
    )
    if small:
        parts.append("So small a model reads a whole prompt in the 3 s before one is sent again.")
    parts.append("Seconds, energy and memory compare servers here, and foretell nothing of a Mac.")
    return tag("p", tag("strong", "Read this first. "), " ".join(parts), class_="notice")


def method(lines: PageLines, causes: Causes, abouts: Mapping[str, str]) -> Html:
    """Return the end of the page."""
    results = lines.results
    return joined(
        _remarks(lines, causes),
        tag("section", tag("h2", "How to repeat a line", id="repeat"), _repeat(lines, abouts)),
        tag("section", tag("h2", "What was measured where", id="where"), _where(results),
            _servers(results), _models(results)),
        tag("section", tag("h2", "What the figures mean", id="meaning"), _meaning(results)),
    )  # fmt: skip


def _remarks(lines: PageLines, causes: Causes) -> Html:
    found = [*_unmetered(lines.results), *_longer_prompts(lines)]
    found += [*counted_otherwise(lines), *_errors(lines)]
    unused = causes.unused((each.workload, each.measure.name) for each in lines.behind)
    found += [f"A cause was written for {each}, where Hearth is not behind." for each in unused]
    body = tag("ul", *(tag("li", text) for text in found)) if found else tag("p", "None.")
    return tag("section", tag("h2", "Remarks", id="remarks"), body)


def _unmetered(results: Results) -> Iterator[str]:
    names = [name for name, facts in results.servers.items() if not facts.is_metered]
    if names:
        yield (
            f"The tokens of {listed(names)} are what they say themselves (prompt less cached): "
            "their attention could not be entered."
        )


def _longer_prompts(lines: PageLines) -> Iterator[str]:
    """Tell of prompts that a server builds otherwise than Hearth: the ideal is not its own."""
    for server in lines.servers:
        factors: list[float] = []
        for model in lines.models:
            for workload in lines.workloads:
                found = lines.of(model, workload, "prompt_tokens")
                if HEARTH in found and server in found and found[HEARTH].median > 0:
                    factors.append(found[server].median / found[HEARTH].median)
        odd = [each for each in factors if abs(each - 1) > PROMPTS_ALIKE]
        if odd:
            ends = sorted({f"{min(odd):.2f}", f"{max(odd):.2f}"})
            yield (
                f"{server} builds prompts {' to '.join(ends)} times as long as Hearth's in "
                f"{len(odd)} of {len(factors)} pairs of workload and model. The ideal is that of "
                "Hearth's prompts."
            )


def _errors(lines: PageLines) -> Iterator[str]:
    """Tell what failed, once for all workloads in which it did."""
    for server in lines.servers:
        met: dict[str, dict[str, int]] = {}  # by text and workload
        for workload in lines.workloads:
            for model in lines.models:
                for sample in lines.samples(model, server, workload):
                    for error in sample.errors:
                        text = " ".join(error.split())[:ERROR_CHARS_MAX]
                        counts = met.setdefault(text, {})
                        counts[workload] = counts.get(workload, 0) + 1
        told: dict[str, int] = {}  # errors that were told of a workload
        untold = 0
        for text, counts in met.items():
            if all(told.get(workload, 0) >= ERRORS_MAX for workload in counts):
                untold += 1
                continue
            for workload in counts:
                told[workload] = told.get(workload, 0) + 1
            many = len(counts) > WORKLOADS_NAMED_MAX
            where = counted(len(counts), "workload") if many else listed(list(counts))
            yield f"{server}, {where}: {text} ({counted(sum(counts.values()), 'time')})"
        if untold:
            yield f"{server}: {counted(untold, 'more kind')} of errors."


def _repeat(lines: PageLines, abouts: Mapping[str, str]) -> Html:
    results = lines.results
    rows = (
        tag("tr", tag("th", name, scope="row"),
            tag("td", abouts.get(name, "")),
            tag("td", tag("code", _command(lines, name))))
        for name in lines.workloads
    )  # fmt: skip
    heads = (tag("th", name, scope="col") for name in ("workload", "what it does", "command"))
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="repeat")
    box = tag("div", table, class_="box", tabindex=0, role="region", aria_label="commands")
    return joined(
        tag("p", "The whole run, which goes on where it was interrupted:"),
        tag("pre", tag("code", typable(results.command)), tabindex=0),
        tag("p", with_code("One workload of it alone, which finds the servers emptier than in the "
                           "whole run: they take less memory, and restart asks for a session that "
                           "no others have driven out. `hearth bench --compare` says which lines "
                           "moved between two runs:")),
        box,
        tag("p", _where_models_are(results), class_="note"),
    )  # fmt: skip


def _command(lines: PageLines, workload: str) -> str:
    """Return the command that measures one workload; names may be a stranger's, and are quoted."""
    results = lines.results
    by_url = servers_by_url(results.command)
    words = ["hearth", "bench"]
    for model in lines.models:
        words += ["--model", model]
    local = [name for name in lines.servers if name not in by_url]
    words += ["--servers", ",".join(local)] if local else []
    for name in by_url:
        words += ["--server", f"{name}=URL"]
    words += ["--workloads", workload, "--scale", results.scale]
    return shlex.join([*words, "--rounds", str(results.rounds)])


def typable(command: str) -> str:
    """Return the command of a run so that a shell takes it for that one command alone."""
    words = _words(command)
    return shlex.join(words) if words[:2] == ["hearth", "bench"] else "(it is no command of Hearth)"


def servers_by_url(command: str) -> list[str]:
    """Return the names of `--server NAME=URL` in the command of a run."""
    return [
        word.rpartition("=")[0]
        for option, word in pairwise(_words(command))
        if option == "--server" and "=" in word
    ]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote that nobody closed
        return []


def _where_models_are(results: Results) -> Html:
    small = [model.label for model in results.models.values() if model.is_stand_in]
    told = "A model is called by the name of its directory; where Hearth does not find it by that, "
    told += "give the path of yours."
    if small:
        told += " `python -m scripts.fixtures.fixture_cache NAME` makes a fixture in a checkout, "
        told += f"and prints its path; NAME is that of {listed(small)} before the hyphen."
    return with_code(told)


def _where(results: Results) -> Html:
    loads = [each.load for each in results.samples]
    load = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown"
    rows = (
        ("machine", results.machine),
        ("Hearth", " ".join(filter(None, (results.version, results.commit)))),
        ("scale", f"{results.scale}, {counted(results.rounds, 'round')} wanted, interleaved"),
        ("began", results.began),
        ("load of the machine", f"{load}, one minute's, when a workload began"),
        ("samples", f"{len(results.samples):,}"),
    )
    return tag("dl", *(joined(tag("dt", name), tag("dd", text)) for name, text in rows))


def _servers(results: Results) -> Html:
    names = ("server", "version", "tokens counted", "command", "notes")
    rows = (
        tag("tr", tag("th", facts.name, scope="row"), tag("td", facts.version or "–"),
            tag("td", "in attention" if facts.is_metered else "as it says"),
            tag("td", tag("code", facts.command)),
            tag("td", *(tag("p", with_code(note)) for note in facts.notes)))
        for facts in results.servers.values()
    )  # fmt: skip
    return _facts_table("Servers", names, rows)


def _models(results: Results) -> Html:
    rows = (
        tag("tr", tag("th", facts.label, scope="row"), tag("td", facts.kind),
            tag("td", facts.architecture), tag("td", f"{brief(facts.bytes)}B"),
            tag("td", str(facts.bits) if facts.bits else "not quantised"))
        for facts in results.models.values()
    )  # fmt: skip
    return _facts_table("Models", ("model", "kind", "architecture", "weights", "bits"), rows)


def _facts_table(title: str, names: tuple[str, ...], rows: Iterator[Html]) -> Html:
    heads = (tag("th", name, scope="col") for name in names)
    table = tag("table", tag("caption", title), tag("thead", tag("tr", *heads)),
                tag("tbody", *rows), class_="facts")  # fmt: skip
    return tag("div", table, class_="box", tabindex=0, role="region", aria_label=title)


def _meaning(results: Results) -> Html:
    points: tuple[str, ...] = (
        "Tokens read are rows of the attention layers of all of a server's processes, from the "
        "first request of a workload until the server rests. What is read in idle time, or for a "
        "client that has gone, counts. So does padding between prompts of different lengths that "
        "are read in one batch: it is computed too. What is read one token at a time does not "
        "count, nor what a draft model or the tower of a vision model computes, or a kernel of a "
        "server's own in place of MLX's attention. A decoding step that a server has compiled "
        "counts no forwards.",
        "The ideal are the tokens with which no prompt of the workload began that was sent "
        "earlier, even if that one is still being read: of prompts that come at once it has each "
        "shared token read once, for which all but one must wait. It is by the ids of Hearth's "
        "prompts; a server that builds shorter prompts can read less.",
        "Counted workloads ask for answers of one token, so that nothing is drafted and no step of "
        "decoding is taken for reading. What a cache keeps of long answers is seen in live alone.",
        "The servers run with their own defaults, but for what the table of servers tells.",
        "A value is the median of the rounds, with their range. Two lines are told apart by an "
        "exact Mann-Whitney test (p < 0.05) and by a least difference, which each measure has. The "
        "test is not corrected for the number of comparisons; how many it may find by chance is "
        "told above. The rounds are of one run on one machine.",
        "A line whose requests failed is compared only by what failures do not flatter. Without "
        "Metal a server that answered nothing of a workload is not held to have failed, as it may "
        "need a Mac. Speeds of answers that must obey a schema are compared only where all do. "
        "Read over the ideal, and of the prompt, are compared as tokens read, and counted once.",
        "Memory and CPU are those of all of a server's processes together.",
    )
    if not any(facts.is_metered for facts in results.servers.values()):
        points = points[1:]
    return tag("ul", *(tag("li", text) for text in points))
