"""Has the threads of a process take short turns in the interpreter.

A thread that waits for a socket or for the model gives its turn up, and waits for its next one as
long as a thread that computes may keep it. An answer needs some hundred turns: of Python's 5 ms
each, beside a long prompt, it would be late by half a second.
"""

import sys
from typing import Final

TURN_S: Final = 0.0005  # costs the thread that computes 1 %, and one that is alone nothing


def take_short_turns() -> None:
    """Set the longest turn of a thread, for the whole process."""
    sys.setswitchinterval(TURN_S)
