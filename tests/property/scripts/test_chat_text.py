"""Any text is shown by a chat without loss, and none of it is obeyed by the terminal."""

import unicodedata

from hypothesis import assume, example, given, strategies as st
from rich.console import Console

from hearth.commands.chat.answer_markdown import AnswerMarkdown, finished_chars
from hearth.commands.chat.conversation import word_places
from hearth.commands.terminal_text import shown, shown_name

LINES = st.sampled_from(
    (
        *("", "words", "two words", "# head", "- item", "  more of it", "1. one", "2. two"),
        *("```", "```python", "    code", "> said", "a | b", "--|--", "1 | 2", "---", "===", "1"),
        *("<div>", "~~~", "- ", "* * *", "\t tab", "**bold** and _it_", "[to](http://x.y)"),
    )
)


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the blocks of `text`, each as its type and the text in it."""
    return [(token.type, token.content) for token in AnswerMarkdown(text).parsed]


@given(st.lists(LINES, max_size=12).map("\n".join))
@example("- a\n\n1. b")
@example("1. a\n\n2. b")
def test_what_is_finished_is_drawn_as_the_whole_would_be(text: str) -> None:
    """At every length of a text that grows, the finished part stands as it does in the whole."""
    printed, rest = 0, []
    for length in range(len(text) + 1):
        done = finished_chars(text[printed:length])
        if done:
            rest += blocks(text[printed : printed + done])
            printed += done
    assert rest + blocks(text[printed:]) == blocks(text)


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_shown(text: str) -> None:
    told = shown(text)
    assert not [c for c in told if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    assert shown(told) == told
    told.encode()
    assert "\n" not in shown_name(text) and len(shown_name(text)) <= 200


@given(st.text(), st.text())
def test_it_is_shown_alike_in_pieces(first: str, second: str) -> None:
    assert shown(first) + shown(second) == shown(first + second)


@given(st.text(alphabet=st.characters(exclude_categories=("Cc", "Cs"))))
def test_text_that_no_terminal_obeys_is_shown_whole(text: str) -> None:
    plain = "".join(c for c in text if shown(c) != "")
    assert shown(text) == plain and len(text) - len(plain) == sum(shown(c) == "" for c in text)


@given(st.text(alphabet="<>/abdiv &;*_`\n", max_size=40))
def test_no_letter_of_an_answer_is_lost_in_drawing(text: str) -> None:
    """Tags too: rich's own Markdown leaves them out. A fence's language is not drawn."""
    assume("```" not in text)
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(AnswerMarkdown(text))
    drawn = capture.get()
    assert sorted(c for c in drawn if c in "abdiv<") == sorted(c for c in text if c in "abdiv<")


@given(
    st.sampled_from(["{}", "`{}`", "# {}", "|a{}|\n|-|\n|{}|", "[{}]({})"]), st.integers(0, 0x2FFF)
)
@example("{}", 0x202E)
def test_an_entity_is_no_way_around_it(form: str, code: int) -> None:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(AnswerMarkdown(form.replace("{}", f"x&#{code};&#x{code:x};")))
    drawn = capture.get()
    assert shown(drawn) == drawn


@given(st.lists(st.text(alphabet="ab '\"\\", min_size=1, max_size=5), max_size=5))
def test_words_are_read_as_a_shell_quotes_them(names: list[str]) -> None:
    quoted = " ".join("".join("\\" + c if not c.isalpha() else c for c in name) for name in names)
    assert [plain for _, plain in word_places(quoted)] == names
