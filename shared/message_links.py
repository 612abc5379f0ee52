"""Makes the link of each message: the digest that a conversation is known by up to there.

The proxy makes it once, where a request is parsed; whoever asks which conversation it is compares
links. An archive's reader makes those of what it kept.
"""

import hashlib
from collections.abc import Iterable
from typing import Final

from hearth.shared.wire_messages import MessageName

START: Final = b""  # before the first message


def linked(names: Iterable[MessageName], link: bytes = START) -> list[MessageName]:
    """Return `names` with their links, behind messages that end in `link`.

    A message whose canonical form is nothing leaves the link as it is.
    """
    found = []
    for name in names:
        if name.canonical:
            link = hashlib.blake2b(link + name.canonical, digest_size=16).digest()
        found.append(MessageName(name.canonical, name.exact, name.rules, link))
    return found
