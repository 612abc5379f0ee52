"""The comparison's figures are right, and its report says them, with what a reader must know."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st

from hearth.commands.replay.player import Row
from hearth.commands.stream_client import Outcome, Reading, Tokens
from scripts.bench import peers_servers, peers_workload
from scripts.bench.attention_counter.sitecustomize import COUNT, Meter
from scripts.bench.peers import chosen, save
from scripts.bench.peers_figures import Figures, Probe, Step, hit_of, same_answers, steps_of
from scripts.bench.peers_report import LINES, behind, groups, plots, remarks, table, written
from scripts.bench.peers_servers import HEARTH, PEERS, Peer, Running, Target, install
from scripts.bench.peers_workload import Course, metered, salted, speed_of, unit_of
from scripts.bench.servers import SideError
from tests.helpers.clients.captured_events import captured, chat_events

ABOUT = {
    "side": HEARTH,
    "fixture": "qwen3",
    "trace": "pi",
    "limit": 2,
    "command": "python -m scripts.bench peers --quick",
    "server_command": "python -m hearth.proxy.main",
    "version": "mlx-lm 1",
    "machine": "a machine",
    "commit": "abc",
    "started": "today",
    "load": 0.5,
}
STEPS = (Step(100, 0, 100, 100, 100, 2.0), Step(300, 200, 120, 100, 300, 1.0))


def figures(**given: Any) -> Figures:
    return Figures(**{**ABOUT, "steps": STEPS, "is_metered": True, **given})


def row(
    prompt: int = 0, prefilled: int = 0, said: str = "", ids: list[int] | None = None, **told: Any
) -> Row:
    """Return an answered request; one without a prompt failed."""
    tokens = Tokens(prompt, prompt - prefilled, prefilled, 8, "") if prompt else None
    error = "" if prompt else "502 gone"
    outcome = Outcome(200, tokens, 0.5, 1.5, error, Reading([said]))
    return Row(told.get("number", 0), "t", "chat", replace(outcome, **told.get("how", {})), ids)


# ---------------------------------------------------------------- arithmetic


def test_the_hit_is_weighted_by_tokens_and_stands_beside_the_ideal() -> None:
    found = figures()
    assert (found.prompt, found.prefilled, found.ideal) == (400, 220, 200)
    assert found.hit == pytest.approx(1 - 220 / 400)
    assert found.ideal_hit == pytest.approx(1 - 200 / 400)
    assert found.over_ideal == pytest.approx(1.1)
    assert found.claimed_hit == pytest.approx(0.5), "what it says is another matter"
    assert (found.prefilled_p50, found.ttft_s(0.5), found.ttft_s(0.95)) == (120, 2.0, 2.0)


def test_what_is_not_known_is_none_and_never_nought() -> None:
    nothing = figures(steps=())
    assert [nothing.hit, nothing.prefilled, nothing.ideal, nothing.claimed_hit] == [None] * 4
    assert [nothing.over_ideal, nothing.equal_rate, nothing.ttft_s(0.5)] == [None] * 3
    half = figures(steps=(STEPS[0], replace(STEPS[1], ideal=None)))
    assert (half.ideal, half.ideal_hit, half.over_ideal) == (None, None, None)


@given(st.integers(0, 10**6), st.integers(0, 10**7))
def test_a_hit_is_a_share(prompt: int, prefilled: int) -> None:
    assert 0.0 <= hit_of(prompt, prefilled) <= 1.0


NUMBERS = st.integers(0, 10**6)
PROBES = st.none() | st.builds(Probe, NUMBERS, NUMBERS, st.none() | st.floats(0, 99))
ROWS = st.builds(
    figures,
    steps=st.lists(
        st.builds(Step, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.none() | st.floats(0, 9)),
        max_size=3,
    ).map(tuple),
    live=PROBES,
    after_cancel=PROBES,
    after_restart=PROBES,
    errors=st.lists(st.text(), max_size=2).map(tuple),
)


@given(ROWS)
def test_figures_come_back_from_json_as_they_were(found: Figures) -> None:
    assert Figures.of(json.loads(json.dumps(found.as_json()))) == found


def test_only_answered_requests_are_steps_each_held_to_the_ideal_of_its_ids() -> None:
    rows = [row(4, 4, ids=[1, 2, 3, 4]), row(), row(6, 3, ids=[1, 2, 3, 5, 6]), row(9, 9)]
    assert [(step.ideal, step.ideal_prompt) for step in steps_of(rows)] == [
        (4, 4),
        (2, 5),
        (None, None),
    ]


def test_answers_are_compared_only_with_those_of_prompts_read_whole() -> None:
    warm = [row(100, 9, "a"), row(100, 9, "b"), row(100, 9, "c"), row()]
    cold = [row(100, 99, "a"), row(100, 99, "x"), row(100, 60, "c"), row(100, 100, "")]
    assert same_answers(warm, cold) == (1, 2)


def test_the_meter_is_read_in_tokens_of_the_first_answer() -> None:
    rows = [row(number=0), row(1000, 1000, number=1), row(2000, 1500, number=2)]
    unit = unit_of(rows, {0: 77, 1: 3996, 2: 4000})
    assert unit == 4
    tokens = metered(rows[2], 4000, unit).tokens
    assert tokens is not None and (tokens.prefilled, tokens.cached) == (1000, 500)
    assert metered(rows[2], 4000, 0) == rows[2], "without a meter the server is believed"
    assert unit_of(rows, {0: 0, 1: 0, 2: 0}) == 0
    assert unit_of([], {}) == 0


def test_a_speed_is_what_a_longer_answer_takes_longer() -> None:
    def lasting(completion: int, total_s: float) -> Row:
        return row(10, 10, how={"tokens": Tokens(10, 0, 10, completion, ""), "total_s": total_s})

    assert speed_of(lasting(8, 1.5), lasting(136, 3.5)) == pytest.approx(64.0)
    assert speed_of(lasting(8, 1.5), lasting(39, 3.5)) is None, "it ended too soon"
    assert speed_of(lasting(8, 1.5), lasting(136, 1.5)) is None
    assert speed_of(row(), lasting(136, 3.5)) is None and speed_of(lasting(8, 1), row()) is None


BODIES = {
    "chat": {"messages": [{"role": "system", "content": "be"}]},
    "messages": {"system": [{"type": "text", "text": "be"}], "messages": []},
    "responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "be"}]}]},
}


@pytest.mark.parametrize("dialect", BODIES)
def test_a_salted_session_is_new_to_every_server_and_one_in_itself(dialect: str) -> None:
    body = BODIES[dialect] | {"tools": [{"name": "ls", "description": "lists"}, {"name": "cat"}]}
    given = captured(dialect, body)
    before = json.dumps(body)
    one, two = salted([given, given])
    assert one.body == two.body and json.dumps(body) == before
    (other,) = salted([given])
    texts = [json.dumps(each.body) for each in (one, other)]
    assert texts[0] != texts[1] and all(text.count("Session ") == 2 for text in texts)
    first = json.dumps(one.body.get("system") or one.body.get("messages") or one.body["input"])
    assert first.index("Session ") < first.index("be")
    assert one.body["tools"][0]["description"].endswith("lists")
    assert one.body["tools"][1] == {"name": "cat"}


# ---------------------------------------------------------------- the meter


def test_the_meter_counts_what_is_read_and_leaves_out_what_is_decoded(tmp_path: Path) -> None:
    fast = SimpleNamespace(scaled_dot_product_attention=lambda queries, *_, scale: scale)
    Meter(str(tmp_path)).wrap(SimpleNamespace(fast=fast))
    running = Running(Target(""), tmp_path)
    (tmp_path / "meter").symlink_to(tmp_path, target_is_directory=True)
    for rows, tokens in ((1, 256), (2, 10), (1, 1), (4, 1)):
        queries = SimpleNamespace(shape=(rows, 8, tokens, 64))
        assert fast.scaled_dot_product_attention(queries, None, scale=0.5) == 0.5
    (page,) = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    assert COUNT.unpack(page.read_bytes()) == (256 + 20,)
    (tmp_path / "meter").unlink()
    (tmp_path / "meter").mkdir()
    page.rename(tmp_path / "meter" / "1")
    (tmp_path / "meter" / "2").write_bytes(b"")  # of a process that has only begun
    assert running.read_units() == 276


def test_the_meter_waits_for_mlx_and_changes_nothing_else(tmp_path: Path) -> None:
    code = "import sys; assert 'mlx.core' not in sys.modules; import json; import mlx.core as mx\n"
    code += "q = mx.zeros((1, 2, 5, 8)); mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0)"
    environment = {"PYTHONPATH": str(peers_servers.METER_DIR), "METER_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    (page,) = tmp_path.iterdir()
    assert COUNT.unpack(page.read_bytes()) == (5,)


# ---------------------------------------------------------------- the course


def test_sides_are_chosen_by_name_and_url_with_hearth_first() -> None:
    assert [peer.name for peer in chosen("", [])] == list(PEERS)
    sides = chosen("mlx_lm,hearth", ["mine=http://h:1/v1/"])
    assert [(peer.name, peer.url) for peer in sides] == [
        (HEARTH, ""),
        ("mlx_lm", ""),
        ("mine", "http://h:1"),
    ]
    with pytest.raises(SystemExit, match="no side x; there are hearth, mlx_lm"):
        chosen("x", [])
    with pytest.raises(SystemExit, match="NAME=URL"):
        chosen("", ["http://h:1"])


def course_of(peer: Peer, tmp_path: Path) -> Figures:
    bodies = [{"messages": [{"role": "user", "content": wish}]} for wish in ("hi", "hi die")]
    course = Course(peer, tmp_path, [captured("chat", body) for body in bodies], 8)
    asyncio.run(course.run(tmp_path))
    return course.figures(figures(side=peer.name, steps=(), is_metered=False), None)


async def answer(request: web.Request) -> web.Response:
    """Answer all but who asks to die."""
    body = await request.json()
    if body["messages"][0]["content"].endswith("die"):
        return web.Response(status=503, text="busy")
    raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in chat_events())
    return web.Response(body=raw, headers={"content-type": "text/event-stream"})


def test_a_server_of_somebody_else_is_believed_and_never_ended(tmp_path: Path) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served"}]})

    async def run() -> Figures:
        app = web.Application()
        app.router.add_post("/v1/x", answer)
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/v1/models", models)
        async with TestServer(app) as server:
            peer = Peer("mine", url=f"http://127.0.0.1:{server.port}")
            return await asyncio.to_thread(course_of, peer, tmp_path)

    found = asyncio.run(run())
    assert (len(found.steps), found.failed, found.refused) == (1, 1, 0)
    assert not found.is_metered and found.steps[0].prefilled == 12
    assert found.after_restart is None and found.memory_mb is None
    assert found.compared == 0 and found.cold_ttft_p50_s is None, "its cache stays on"
    assert found.live is not None and found.live.prefilled == 12
    assert found.decode_tok_s is None, "its answers are all of one length"
    assert found.errors.count("503 busy") == 2, "of the replay, and of the cancel's prompt"
    assert "mine has no meter: its prefilled tokens are what it says." in remarks([found])


def test_a_peer_that_cannot_be_had_is_a_row_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(peer: Peer) -> None:
        raise SideError(f"{peer.name} cannot be installed: no such package")

    monkeypatch.setattr(peers_workload, "install", refuse)
    found = course_of(PEERS["rapid-mlx"], tmp_path)
    assert found.errors == ("rapid-mlx cannot be installed: no such package",)
    assert remarks([found]) == [
        "rapid-mlx answered nothing here.",
        "rapid-mlx: `rapid-mlx cannot be installed: no such package`",
    ]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no such model')", "no such model"),
        ("print('ValueError: no such model'); print('Exiting.')", "ValueError: no such model"),
    ],
)
def test_a_peer_that_ends_at_once_is_a_row_that_says_why(
    tmp_path: Path, code: str, why: str
) -> None:
    (tmp_path / "broken.py").write_text(code)
    environment = {"PYTHONPATH": str(tmp_path)}
    found = course_of(Peer("broken", ("-m", "broken"), environment), tmp_path)
    assert found.errors == (f"warm: SideError {why}",), "the other stages are not tried"


def test_a_failed_installation_says_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_servers, "VENVS_DIR", tmp_path)
    uv = tmp_path / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text("#!/bin/sh\necho no network >&2; exit 3\n")
    uv.chmod(0o700)
    with pytest.raises(SideError, match="some==1 cannot be installed: no network"):
        install(Peer("some", package="some==1"))
    uv.write_text('#!/bin/sh\n[ "$1" = venv ] && mkdir -p "$5/bin"; exit 0\n')
    install(Peer("some", package="some==1"))
    assert (tmp_path / "some==1" / "bin").is_dir(), "it appears when it is whole"
    assert "torch ;" in (tmp_path / "uv" / "override.txt").read_text()


# ---------------------------------------------------------------- the report


def test_the_columns_stand_in_one_order_whichever_was_measured_last() -> None:
    rows = [figures(side=name) for name in ("mine", "rapid-mlx", "mlx_lm", HEARTH)]
    assert table(groups(rows)[0]).startswith("|  | hearth | mlx_lm | rapid-mlx | mine |")


def test_a_server_that_builds_other_prompts_is_named() -> None:
    other = figures(side="other", steps=(STEPS[0], replace(STEPS[1], prompt=290)))
    (told,) = remarks([figures(), other])
    assert told.startswith("other builds 1 of 2 prompts otherwise than Hearth: 390 tokens")


def test_the_table_has_a_line_a_measure_and_a_column_a_server() -> None:
    other = figures(side="mlx_lm", after_restart=Probe(100, 100, 2.5), equal=1, compared=2)
    lines = table([figures(), other]).splitlines()
    assert lines[0] == "|  | hearth | mlx_lm |" and len(lines) == len(LINES) + 2
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines}
    assert cells["hit, token-weighted"] == [" 0.4500 ", " 0.4500 "]
    assert cells["after restart, read"] == [" \u2013 ", " 100% (100 / 100, 2.50 s) "]
    assert cells["cold = warm"] == [" \u2013 ", " 50% (1 of 2) "]
    assert cells["prefilled tokens"] == [" 220 ", " 220 "]


def test_each_line_on_which_hearth_is_behind_is_named_with_both_values() -> None:
    mine = figures(memory_mb=500.0, decode_tok_s=100.0, equal=2, compared=2)
    light = figures(side="light", memory_mb=120.0, decode_tok_s=104.0, equal=2, compared=2)
    assert behind([light, mine]) == ["qwen3, pi, memory, MB: Hearth 500; light 120"]
    assert behind([mine, replace(light, fixture="gpt_oss")]) == ["On no line."]
    assert behind([mine, replace(light, steps=())]) == ["On no line."], "it answered nothing"
    assert behind([light]) == ["On no line."], "there is nothing of Hearth's to compare"


def test_a_token_or_a_percent_is_no_difference_and_more_is_one() -> None:
    def named(**given: Any) -> list[str]:
        other = figures(**{"side": "other", **given})
        lines = [each for each in behind([figures(), other]) if each.startswith("qwen3")]
        return [each.split(", ")[2].split(":")[0] for each in lines]

    one_less = (STEPS[0], replace(STEPS[1], prefilled=119))
    assert named(steps=one_less) == []
    ten_less = (STEPS[0], replace(STEPS[1], prefilled=110))
    assert named(steps=ten_less) == ["hit"], "the tokens alone depend on how a prompt is built"
    assert named(steps=tuple(replace(step, ttft_s=0.5) for step in STEPS)) == ["first token"] * 2


def test_the_report_has_every_part_and_the_command_of_every_column(tmp_path: Path) -> None:
    rows = [
        figures(
            side="mlx_lm", errors=("a `b`\nc",), command="python -m scripts.bench peers --sides x"
        ),
        figures(),
        figures(fixture="gpt_oss"),
    ]
    drawn = plots(rows, tmp_path)
    text = written(rows, drawn, "Why: because.\n")
    assert "Why: because.\n" in text and "- mlx_lm: `a 'b' c`\n" in text
    assert text.index("## qwen3, pi") < text.index("## gpt_oss, pi") < text.index("## Servers")
    for found in rows:
        assert f"| {found.side} | `{found.command}` |" in text
    assert [path.name for path in drawn] == ["qwen3-pi.svg", "gpt-oss-pi.svg"]
    assert all(f"({tmp_path.name}/{path.name})" in text for path in drawn)
    first = drawn[0].read_bytes()
    assert first.startswith(b"<?xml") and plots(rows, tmp_path)[0].read_bytes() == first


def test_without_matplotlib_the_report_has_no_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots([figures()], tmp_path) == []
    assert "![" not in written([figures()])


def test_the_figures_and_the_report_are_saved_with_the_notes_of_hands(tmp_path: Path) -> None:
    report = tmp_path / "bench" / "REPORT.md"
    report.parent.mkdir()
    (report.parent / "NOTES.md").write_text("It takes a smaller proxy.")
    save([figures()], tmp_path / "a" / "peers.json", report)
    assert "It takes a smaller proxy." in report.read_text()
    (told,) = json.loads((tmp_path / "a" / "peers.json").read_text())
    assert Figures.of(told) == figures()


def test_every_peer_can_be_told_as_a_command() -> None:
    for peer in PEERS.values():
        assert "{model}" in peer.command() and "{port}" in peer.command()
        assert peer.command() != peer.command(is_cold=True), "there is a way to switch it off"
