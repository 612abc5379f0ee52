"""A link names all messages up to and with its own, in their order."""

from hearth.shared.wire_messages import START, MessageName, linked

SYSTEM, QUESTION, ANSWER = (MessageName(word, b"x" + word, ["rule"]) for word in (b"s", b"q", b"a"))
REMINDER = MessageName(b"", b"r")  # its canonical form is nothing


def links(*names: MessageName) -> list[bytes]:
    return [name.link for name in linked(names)]


def test_a_link_names_all_messages_up_to_its_own_in_their_order() -> None:
    whole = links(SYSTEM, QUESTION, ANSWER)
    assert START not in whole and len(set(whole)) == 3
    assert links(SYSTEM, QUESTION) == whole[:2]
    assert links(QUESTION, SYSTEM, ANSWER)[-1] != whole[-1]
    assert [name.link for name in linked([ANSWER], whole[1])] == whole[2:], "it goes on anywhere"


def test_a_message_whose_canonical_form_is_nothing_leaves_the_link_as_it_was() -> None:
    reminded = links(REMINDER, SYSTEM, QUESTION, REMINDER, ANSWER)
    system, question, answer = links(SYSTEM, QUESTION, ANSWER)
    assert reminded == [START, system, question, question, answer]


def test_a_name_is_what_it_was_but_for_its_link() -> None:
    (name,) = linked([SYSTEM])
    assert (name.canonical, name.exact, name.rules) == (b"s", b"xs", ["rule"])
