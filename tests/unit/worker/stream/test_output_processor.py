"""Checks when a token's text is sent, with stop strings and log probabilities."""

from hypothesis import given, strategies as st

from hearth.shared.wire_messages import TokenLogprob
from hearth.worker.stream.output_processor import OutputPiece, OutputProcessor
from scripts.harness.model_families import family
from tests.helpers.worker.output_formats import Pieces


def entry(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, "", b"", -1.0, [])


def text(piece: OutputPiece) -> str:
    return "".join(part.text for part in piece.parts)


def test_a_logprob_waits_with_its_text_for_a_stop_string_that_may_come() -> None:
    output = OutputProcessor(Pieces(["a", "x", "y", "b"]), ["xyz"])
    shown = [output.add(n, entry(n)) for n in range(4)]
    assert [text(piece) for piece in shown] == ["a", "", "", "xyb"]
    assert [[e.token_id for e in piece.logprobs] for piece in shown] == [[0], [], [], [1, 2, 3]]


def test_a_token_swallowed_by_a_stop_string_is_not_reported() -> None:
    output = OutputProcessor(Pieces(["a", "x", "y"]), ["xy"])
    pieces = [output.add(n, entry(n)) for n in range(3)]
    assert pieces[-1].stop == "xy"
    assert [e.token_id for piece in pieces for e in piece.logprobs] == [0]


@given(st.lists(st.text("abx", max_size=3), max_size=12))
def test_without_a_stop_everything_comes_out_once_and_in_order(texts: list[str]) -> None:
    output = OutputProcessor(Pieces(texts), ["xx!"])
    pieces = [output.add(n, entry(n)) for n in range(len(texts))]
    pieces.append(output.finish(is_complete=True))
    assert "".join(map(text, pieces)) == "".join(texts)
    reported = [e.token_id for piece in pieces for e in piece.logprobs]
    whole = max((n + 1 for n, each in enumerate(texts) if each), default=0)
    assert reported == list(range(whole)), "what completes no character at the end is no content"


def test_where_one_call_is_allowed_the_second_ends_the_answer_before_its_first_piece() -> None:
    reader = family("qwen3").reader
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>\n'
    written = list("So.\n" + call % 1 + call % 2 + "Done.")
    output = OutputProcessor(Pieces(written), [], reader.splitter(False, tools), is_parallel=False)
    parts = []
    for number in range(len(written)):
        parts += output.add(number, None).parts
        if output.is_cut:
            break
    assert [part.name for part in parts if part.name] == ["f"]
    assert "".join(part.text for part in parts) == 'So.{"a": 1}'
    assert output.is_cut and len(output.parts.calls) == 1


def test_a_stop_string_acts_on_content_alone() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "END"}}\n</tool_call>'
    for written, said in ((f"END</think>{call}", ""), ("END</think>a\nEND b", "a\n")):
        splitter = family("qwen3").reader.splitter(True, tools)
        output = OutputProcessor(Pieces(list(written)), ["END", "f"], splitter)
        pieces = [output.add(n, None) for n in range(len(written) - 2 * bool(said))]
        pieces.append(output.finish(is_complete=True))
        assert output.parts.reasoning == "END" and output.parts.content == said
        assert [each.stop for each in pieces if each.stop][:1] == (["END"] if said else [])
        assert len(output.parts.calls) == (not said)
