"""An echo of an assistant turn says what was said, or it does not: excerpts of real sessions.

Excerpts are of sessions that were captured from clients (docs/clients.md); their words are
pseudo-words, all else is as the clients sent it.
"""

import json
from typing import Any

import pytest

from hearth.worker.sessions import echoed_turn_match
from hearth.worker.sessions.echoed_turn_match import (
    SessionFacts,
    TurnContent,
    changes,
    says_the_same,
    turn_content,
    working_directory,
)

HOME = "/home/dev/textkit"
SCHEMAS = {  # as Claude Code declares them, without descriptions
    "Read": {
        "type": "object",
        "properties": {
            "file_path": {"type": "string"},
            "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
            "allow_large": {"type": "boolean"},
            "either": {"type": ["string", "integer"]},
            "ratio": {"type": ["null", "number"]},
        },
    },
    "Bash": {
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    },
    "Edit": {"properties": {"replace_all": {"type": "boolean", "default": False}}},
}
KNOWN = SessionFacts(SCHEMAS, "claude-code", HOME)
THOUGHT = "Mocec zes pal disasosuded, so zuda zoc be read at beco."
ANSWER = "Kug me besal nut humumon — “fuvihe” dubilek nacu… ✓"
WRITTEN = "# Notes\n\n- café → naïve “quotes” & <tags>\n\ttabbed line\n- price: 1.0 / 2.50\n"


def turn(content: str = "", *calls: tuple[str, Any], thought: str = "") -> dict[str, Any]:
    """An assistant message of `wire.Prompt`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    return message


def bash(command: Any, **more: Any) -> tuple[str, Any]:
    return ("Bash", {"command": command, **more})


def read(**arguments: Any) -> tuple[str, Any]:
    return ("Read", {"file_path": f"{HOME}/README.md", **arguments})


def compared(
    record: dict[str, Any], sent_back: dict[str, Any], known: SessionFacts = KNOWN
) -> list[str]:
    ours, theirs = turn_content(record), turn_content(sent_back)
    names = changes(ours, theirs, known)
    assert says_the_same(ours, theirs, known) is (names != ["unexplained"])
    return names


EDIT = {
    "file_path": f"{HOME}/src/textkit/wrap.py",
    "old_string": "# Copyright (C) 1999-2001 Gregory P. Ward.",
    "new_string": "# Copyright (C) 1999-2001 Gregory P. Ward. (reviewed)",
}
SAME = {
    "claude-code-session-1, 6 to 7: cd into the working directory goes": (
        turn("", bash(f"cd {HOME} && git log --oneline | head -5", description="Seh cd")),
        turn("", bash("git log --oneline | head -5", description="Seh cd")),
        ["cd-stripped"],
    ),
    "the same, the directory in quotes": (
        turn("", bash(f'cd "{HOME}" && ls'), bash(f"cd '{HOME}' && ls")),
        turn("", bash("ls"), bash("ls")),
        ["cd-stripped"],
    ),
    "claude-code-session-1, 9 to 10: replace_all comes, in front": (
        turn("", ("Edit", EDIT)),
        turn("", ("Edit", {"replace_all": False} | EDIT)),
        ["replace-all-added"],
    ),
    "claude-code-session-1, 19 to 20: keys in another order": (
        turn("", ("Write", {"content": WRITTEN, "file_path": f"{HOME}/docs/NOTES.md"})),
        turn("", ("Write", {"file_path": f"{HOME}/docs/NOTES.md", "content": WRITTEN})),
        [],
    ),
    "claude-code quirks (facts): a string becomes the integer that Read declares": (
        turn("", ("Read", {"wrong_name": 7, "offset": "3"})),
        turn("", ("Read", {"wrong_name": 7, "offset": 3})),
        ["value-coerced"],
    ),
    "the same, a boolean and a number of two types": (
        turn("", read(allow_large="true", ratio="2.50")),
        turn("", read(allow_large=True, ratio=2.5)),
        ["value-coerced"],
    ),
    "all but Codex (facts): numbers as JavaScript prints them": (
        turn("", bash("ls", timeout=5000.0), ("does_not_exist", {"b": 1, "a": [1.0, 2.50, 1e3]})),
        turn("", bash("ls", timeout=5000), ("does_not_exist", {"b": 1, "a": [1, 2.5, 1000]})),
        ["number-printed"],
    ),
    "minus zero, a large exponent": (
        turn("", ("f", '{"a": -0.0, "b": 1e21, "c": 1000000000000000000000}')),
        turn("", ("f", '{"a":0,"b":1e+21,"c":1e+21}')),
        ["number-printed"],
    ),
    "cline-session-1, 19 to 20: unicode escapes and white space between tokens": (
        turn("", ("run_commands", json.dumps({"commands": [WRITTEN]}))),
        turn(
            "",
            (
                "run_commands",
                json.dumps({"commands": [WRITTEN]}, ensure_ascii=False, separators=(",", ":")),
            ),
        ),
        [],
    ),
    "qwen-code-session-1, 3 to 4: thinking loses its last newline": (
        turn("", ("read_file", '{"file_path": "/a"}'), thought=THOUGHT + "\n"),
        turn("", ("read_file", '{"file_path":"/a"}'), thought=THOUGHT),
        ["thinking-trimmed"],
    ),
    "PI quirks (facts): blank thinking and a blank text are not sent": (
        turn("\n\n", bash("ls"), thought="   "),
        turn("", bash("ls")),
        ["content-trimmed", "thinking-trimmed"],
    ),
    "openclaw over Responses after a reload (facts): thinking is gone": (
        turn(ANSWER, bash("ls"), thought=THOUGHT),
        turn(ANSWER, bash("ls")),
        ["thinking-stripped"],
    ),
    "thinking that a client put into the content": (
        turn(ANSWER, thought=THOUGHT),
        turn(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"),
        ["thinking-moved"],
    ),
    "thinking that our record has in its content": (
        turn(f"<think>{THOUGHT}</think>{ANSWER}"),
        turn(ANSWER, thought=THOUGHT),
        ["thinking-moved"],
    ),
    "an answer about tags, its thinking stripped": (
        turn("<think> opens and </think> closes.", thought=THOUGHT),
        turn("<think> opens and </think> closes."),
        ["thinking-stripped"],
    ),
    "codex-session-1, 2 to 3: leading newlines are kept": (
        turn(f"\n\n{ANSWER}", thought=THOUGHT),
        turn(f"\n\n{ANSWER}", thought=THOUGHT),
        [],
    ),
    "a call without arguments": (turn("", ("f", "")), turn("", ("f", {})), []),
    "arguments that are no JSON, as they were": (
        turn("", ("f", '{"a": 1')),
        turn("", ("f", '{"a": 1')),
        [],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_clients_do_to_an_answer_leaves_it_the_same(name: str) -> None:
    record, sent_back, rules = SAME[name]
    assert compared(record, sent_back) == rules


def test_every_rule_has_its_example() -> None:
    assert {rule for _, _, rules in SAME.values() for rule in rules} == set(echoed_turn_match.RULES)


def test_call_ids_say_nothing() -> None:
    """OpenClaw over chat completions strips the underscore of each id (openclaw-session-1)."""
    record = turn("", bash("ls"))
    sent_back = turn("", bash("ls"))
    sent_back["tool_calls"][0]["id"] = "call0"
    assert compared(record, sent_back) == []


OTHER = {
    "a letter of the answer": (turn(ANSWER), turn(ANSWER.replace("K", "k"))),
    "white space inside the answer": (turn("a\n\nb"), turn("a\nb")),
    "an answer that was cut": (turn(ANSWER), turn(ANSWER[:-1])),
    "an answer that was removed": (turn(ANSWER), turn("")),
    "an answer where there was none": (turn("", bash("ls")), turn("x", bash("ls"))),
    "texts merged with a neighbour's": (turn("A"), turn("A\nB")),
    "other thinking": (turn(ANSWER, thought="a"), turn(ANSWER, thought="b")),
    "thinking that was cut": (turn(ANSWER, thought="a b"), turn(ANSWER, thought="a")),
    "thinking where there was none": (turn(ANSWER), turn(ANSWER, thought="a")),
    "other thinking, moved": (turn("b", thought="a"), turn("<think>c</think>b")),
    "thinking moved, where there was none": (turn("b"), turn("<think>c</think>b")),
    "thinking moved and the answer changed": (turn("b", thought="a"), turn("<think>a</think>c")),
    "thinking behind text": (turn("b", thought="a"), turn("b<think>a</think>")),
    "a think block that does not close": (turn("b", thought="a"), turn("<think>a b")),
    "a think block that does not close, and no answer": (
        turn("", thought="a"),
        turn("<think>a"),
    ),
    "thinking that does not begin with its tag": (
        turn("b", thought="see <think> a"),
        turn("see <think> a</think>b"),
    ),
    "thinking that only ends with its tag": (turn("b", thought="a"), turn("a</think>b")),
    "a think block beside thinking": (
        turn("b", thought="a"),
        turn("<think>a</think>b", thought="a"),
    ),
    "another call": (turn("", bash("ls")), turn("", bash("ls -l"))),
    "another tool": (turn("", ("a", {"x": 1})), turn("", ("b", {"x": 1}))),
    "calls in another order": (turn("", bash("a"), bash("b")), turn("", bash("b"), bash("a"))),
    "a call dropped": (turn("", bash("a"), bash("b")), turn("", bash("a"))),
    "a call twice": (turn("", bash("a")), turn("", bash("a"), bash("a"))),
    "all calls dropped": (turn("x", bash("a")), turn("x")),
    "a key dropped": (turn("", bash("a", timeout=1)), turn("", bash("a"))),
    "a key added": (turn("", bash("a")), turn("", bash("a", timeout=1))),
    "a key renamed": (turn("", ("f", {"a": 1})), turn("", ("f", {"b": 1}))),
    "a list in another order": (turn("", ("f", {"a": [1, 2]})), turn("", ("f", {"a": [2, 1]}))),
    "a list that is longer": (turn("", ("f", {"a": [1]})), turn("", ("f", {"a": [1, 1]}))),
    "true for 1": (turn("", ("f", {"a": 1})), turn("", ("f", {"a": True}))),
    "1 for true": (turn("", ("f", {"a": [True]})), turn("", ("f", {"a": [1]}))),
    "null for false": (turn("", ("f", {"a": False})), turn("", ("f", {"a": None}))),
    "null for infinity": (turn("", ("f", {"a": 1e999})), turn("", ("f", {"a": None}))),
    "another number": (turn("", ("f", {"a": 5000.0})), turn("", ("f", {"a": 5001}))),
    "a number rounded": (turn("", ("f", {"a": 2.5})), turn("", ("f", {"a": 2}))),
    "digits that JavaScript would keep": (
        turn("", ("f", {"a": 9007199254740992})),
        turn("", ("f", {"a": 9007199254740993})),
    ),
    "digits that JavaScript loses: the tool reads another number": (
        turn("", ("f", {"a": 12345678901234567891})),
        turn("", ("f", {"a": 12345678901234567000})),
    ),
    "a fraction where there was none": (turn("", ("f", {"a": 5})), turn("", ("f", {"a": 5.0}))),
    "an indent that was removed": (turn("    a\n    b"), turn("a\n    b")),
    "an indent that was added": (turn("a\n    b"), turn("    a\n    b")),
    "a blank line that was added": (turn("a"), turn("\na")),
    "a newline behind that was added": (turn("a"), turn("a\n")),
    "a blank that was added": (turn("a"), turn("a\u00a0")),
    "a byte order mark that was added": (turn("a"), turn("\ufeffa")),
    "white space where there was none": (turn("", bash("ls")), turn(" ", bash("ls"))),
    "one of two newlines": (turn("a\n\n"), turn("a\n")),
    "white space added to thinking": (turn("a", thought="b"), turn("a", thought=" b")),
    "a think block cut out of an answer": (turn(f"<think>a</think>{ANSWER}"), turn(ANSWER)),
    "digits that JavaScript would not print": (
        turn("", ("f", {"a": 9007199254740993})),
        turn("", ("f", {"a": 9007199254740994})),
    ),
    "a number past a double's range": (
        turn("", ("f", {"a": 10**400})),
        turn("", ("f", {"a": 10**400 + 1})),
    ),
    "a string for a number that nobody declares": (
        turn("", ("f", {"offset": "3"})),
        turn("", ("f", {"offset": 3})),
    ),
    "a number for a string": (turn("", read(offset=3)), turn("", read(offset="3"))),
    "another number than the string's": (turn("", read(offset="3")), turn("", read(offset=4))),
    "a boolean for a number's string": (turn("", read(offset="1")), turn("", read(offset=True))),
    "a number for a boolean's string": (
        turn("", read(allow_large="1")),
        turn("", read(allow_large=1)),
    ),
    "a boolean that is not declared": (
        turn("", read(offset="true")),
        turn("", read(offset=True)),
    ),
    "a boolean in other words": (
        turn("", read(allow_large="yes")),
        turn("", read(allow_large=True)),
    ),
    "a fraction for an integer": (turn("", read(offset="3.5")), turn("", read(offset=3.5))),
    "a string that is no JSON number": (turn("", read(offset="0x3")), turn("", read(offset=3))),
    "a string where strings are allowed": (turn("", read(either="3")), turn("", read(either=3))),
    "cd into another directory": (turn("", bash("cd /tmp && ls")), turn("", bash("ls"))),
    "cd into a directory inside": (turn("", bash(f"cd {HOME}/src && ls")), turn("", bash("ls"))),
    "cd that the record does not have": (turn("", bash("ls")), turn("", bash(f"cd {HOME} && ls"))),
    "cd and another command": (turn("", bash(f"cd {HOME} && ls")), turn("", bash("ls -l"))),
    "cd and no command": (turn("", bash(f"cd {HOME} && ")), turn("", bash(""))),
    "cd and no command, then one": (turn("", bash(f"cd {HOME} && ")), turn("", bash("rm -r ."))),
    "cd whatever comes of it": (turn("", bash(f"cd {HOME}; ls")), turn("", bash("ls"))),
    "cd that is not in front": (turn("", bash(f"a && cd {HOME} && b")), turn("", bash("a && b"))),
    "cd twice": (turn("", bash(f"cd {HOME} && cd {HOME} && a")), turn("", bash("a"))),
    "cd in another argument": (
        turn("", ("f", {"script": f"cd {HOME} && ls"})),
        turn("", ("f", {"script": "ls"})),
    ),
    "cd deeper down": (
        turn("", ("f", {"a": {"command": f"cd {HOME} && ls"}})),
        turn("", ("f", {"a": {"command": "ls"}})),
    ),
    "replace_all: true": (
        turn("", ("Edit", EDIT)),
        turn("", ("Edit", {"replace_all": True} | EDIT)),
    ),
    "replace_all: 0": (turn("", ("Edit", EDIT)), turn("", ("Edit", {"replace_all": 0} | EDIT))),
    "replace_all changed": (
        turn("", ("Edit", {"replace_all": True} | EDIT)),
        turn("", ("Edit", {"replace_all": False} | EDIT)),
    ),
    "replace_all dropped": (
        turn("", ("Edit", {"replace_all": False} | EDIT)),
        turn("", ("Edit", EDIT)),
    ),
    "replace_all of another tool": (
        turn("", ("Write", EDIT)),
        turn("", ("Write", {"replace_all": False} | EDIT)),
    ),
    "replace_all for another key": (
        turn("", ("Edit", {"old_string": "a", "x": 1})),
        turn("", ("Edit", {"old_string": "a", "replace_all": False})),
    ),
    "replace_all and another key": (
        turn("", ("Edit", EDIT)),
        turn("", ("Edit", {"replace_all": False, "x": 1} | EDIT)),
    ),
    "arguments that are no JSON, tidied": (
        turn("", ("f", '{"a": 1')),
        turn("", ("f", '{"a":1')),
    ),
    "arguments that are no JSON, mended": (turn("", ("f", '{"a": 1')), turn("", ("f", {"a": 1}))),
    "arguments that are no object": (turn("", ("f", "[1, 2]")), turn("", ("f", "[1,2]"))),
    "a constant that is not JSON": (turn("", ("f", '{"a": NaN}')), turn("", ("f", '{"a":NaN}'))),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_no_client_does_of_itself_is_a_change(name: str) -> None:
    record, sent_back = OTHER[name]
    assert compared(record, sent_back) == ["unexplained"]


def test_several_rules_may_be_needed_at_once_and_come_in_one_order() -> None:
    record = turn(
        "\n\nLook.  \n", bash(f"cd {HOME} && ls", timeout=5.0), ("Edit", EDIT), thought="Hm.\n"
    )
    sent_back = turn("Look.", bash("ls", timeout=5), ("Edit", {"replace_all": False} | EDIT))
    assert compared(record, sent_back) == [
        *("content-trimmed", "thinking-stripped", "number-printed"),
        *("cd-stripped", "replace-all-added"),
    ]


@pytest.mark.parametrize(
    "schema",
    [None, [3], "x", {}, {"properties": [3]}, {"properties": {"offset": 3}}]
    + [{"properties": {"offset": {"type": kind}}} for kind in (None, 3, [], [3, {}], {"a": 1})],
)
def test_a_schema_that_declares_nothing_allows_nothing(schema: Any) -> None:
    known = SessionFacts({"Read": schema}, "claude-code")
    assert compared(turn("", read(offset="3")), turn("", read(offset=3)), known) == ["unexplained"]


def test_a_value_that_equals_nothing_is_still_itself() -> None:
    ours, theirs = (TurnContent("", "", (("f", {"a": float(word)}),)) for word in ("nan", "NaN"))
    assert changes(ours, theirs, KNOWN) == []
    assert changes(ours, TurnContent("", "", (("f", {"a": 0.0}),)), KNOWN) == ["unexplained"]


def test_nesting_that_no_parser_takes_stays_text_or_is_compared() -> None:
    deep: Any = {}
    other: Any = {"a": 1}
    for _ in range(5_000):
        deep, other = {"a": deep}, {"a": other}
    text = '{"a":' * 200_000
    assert compared(turn("", ("f", text)), turn("", ("f", text))) == []
    same, changed = TurnContent("", "", (("f", deep),)), TurnContent("", "", (("f", other),))
    assert says_the_same(same, same, KNOWN) and not says_the_same(same, changed, KNOWN)


# ---------------------------------------------------------------- what Claude Code alone does

CLAUDE_CODES = {
    "cd-stripped": (turn("", bash(f"cd {HOME} && ls")), turn("", bash("ls"))),
    "value-coerced": (turn("", read(offset="3")), turn("", read(offset=3))),
}


@pytest.mark.parametrize("rule", CLAUDE_CODES)
def test_what_claude_code_does_is_a_change_where_another_client_does_it(rule: str) -> None:
    record, sent_back = CLAUDE_CODES[rule]
    assert compared(record, sent_back) == [rule]
    assert compared(record, sent_back, SessionFacts(SCHEMAS, "", HOME)) == ["unexplained"]


def test_a_default_that_no_schema_declares_is_a_change() -> None:
    record, sent_back = turn("", ("Edit", EDIT)), turn("", ("Edit", EDIT | {"replace_all": False}))
    assert compared(record, sent_back, SessionFacts(SCHEMAS)) == ["replace-all-added"]
    for declared in ({}, {"default": True}, {"default": 0}, 3):
        schemas = {"Edit": {"properties": {"replace_all": declared}}}
        assert compared(record, sent_back, SessionFacts(schemas)) == ["unexplained"]


def environment(path: str = HOME, is_repository: str = "true") -> str:
    """Claude Code's message, as claude-code-session-1 has it but for the pseudo-words."""
    return (
        "# Environment\nYou have been invoked in the following environment: \n"
        f" - Primary working directory: {path}\n"
        f" - Is a git repository: {is_repository}\n - Platform: linux\n"
    )


def stated(role: str, text: str, *before: dict[str, Any]) -> str:
    return working_directory([*before, {"role": role, "content": text}])


def test_the_directory_is_where_claude_code_states_it() -> None:
    asked = {"role": "user", "content": "x"}
    assert stated("system", environment()) == HOME
    assert stated("system", environment(is_repository="false"), asked) == HOME
    assert stated("system", environment("/home/a b/c  ")) == "/home/a b/c"
    assert stated("system", environment("C:\\work\\kit")) == "C:\\work\\kit"
    assert stated("system", environment("/")) == "/"
    reminder = f"<system-reminder>\n{environment()}</system-reminder>\n"
    assert stated("user", f"{reminder}hello") == HOME
    assert stated("user", f"{reminder}<system-reminder>x</system-reminder>hello") == HOME
    parts = [{"type": "image", "image": "d"}, {"type": "text", "text": environment()}]
    assert working_directory([{"role": "system", "content": parts}]) == HOME
