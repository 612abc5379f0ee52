"""A conversation that goes on with another adapter is told what that costs, and goes on right."""

from pathlib import Path

from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.cache.block_hash import adapter_root
from hearth.worker.setup.prompt_and_session_setup import make_sessions
from hearth.worker.stream.answer_parts import AnswerParts
from hearth.worker.threads.request_builder import predict_next_prompt
from scripts.harness.agent_worker import Desk, Reply
from scripts.harness.lora_files import adapted
from scripts.harness.model_families import FAMILIES
from scripts.harness.store_builders import ROOT

SPEAKER = Speaker("", "s1")
TEXT = "The harbor lies in the north. Boats come at seven and leave at nine. " * 12


def desk(tmp_path: Path, family: str = "qwen3") -> Desk:
    return Desk("qwen3", FAMILIES[family], tmp_path, chunk=64, model=adapted("qwen3"))


def ask(worker: Desk, messages: list[dict[str, str]], adapter: str) -> Reply:
    worker.adapter = adapter
    said = AnswerParts("", "All boats have left.", ())
    return worker.ask(worker.named(Prompt(list(messages), speaker=SPEAKER)), said)


def talk(worker: Desk, *adapters: str) -> list[str | None]:
    """Lead a conversation, each turn with an adapter; return the cause of each loss."""
    messages = [{"role": "user", "content": TEXT}]
    causes: list[str | None] = []
    for adapter in adapters:
        reply = ask(worker, messages, adapter)
        causes.append(reply.divergence["cause"] if reply.divergence else None)
        answer = {"role": "assistant", "content": reply.given.content}
        messages += [answer, {"role": "user", "content": TEXT}]
    return causes


def test_a_switch_of_adapters_is_the_cause_of_what_is_read_again(tmp_path: Path) -> None:
    causes = talk(desk(tmp_path), "", "one", "one", "", "two", "two")
    assert causes == [None, "other adapter", None, "other adapter", "other adapter", None]


def test_a_line_has_its_adapter_behind_a_restart_too(tmp_path: Path) -> None:
    worker, directory = desk(tmp_path), tmp_path / "turns"
    prompt = worker.named(Prompt([{"role": "user", "content": TEXT}], speaker=SPEAKER))
    for worker.adapter in ("one", ""):
        worker.sessions = worker.prompts.sessions = make_sessions(
            worker.settings, 64, directory=directory
        )
        found = [line.adapter for line in worker.sessions.lines.lines]
        assert found == ([] if worker.adapter else ["one"])
        worker.pretend(worker.request(prompt), AnswerParts("", "All boats have left.", ()))
        worker.sessions.close()


def test_the_prompt_that_is_foreseen_is_of_the_same_adapter(tmp_path: Path) -> None:
    worker = desk(tmp_path, "harmony")
    ask(worker, [{"role": "user", "content": TEXT}], "one")
    (job,) = worker.foreseen
    query = predict_next_prompt(job.request, worker.prompts)
    assert query is not None and query.adapter == "one"
    assert query.root == adapter_root(ROOT, worker.facts.adapters["one"])


def test_a_prompt_that_a_worker_died_with_is_suspected_by_its_adapter_too(tmp_path: Path) -> None:
    worker = desk(tmp_path)
    prompt = worker.named(Prompt([{"role": "user", "content": TEXT}], speaker=SPEAKER))
    names = []
    for worker.adapter in ("", "one", "two"):
        request = worker.request(prompt)
        names.append({*request.query.names, request.suspicion.prompt_name})
        assert request.query.adapter == worker.adapter
    assert names[0].isdisjoint(names[1] | names[2]) and names[1].isdisjoint(names[2])
