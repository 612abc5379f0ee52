"""Runs a real worker that does not keep API keys apart, to show what then could be told by time."""

import os
import sys
from unittest import mock

from hearth.shared import wire_messages
from hearth.worker import main as real
from hearth.worker.threads import request_builder

if __name__ == "__main__":
    with (
        mock.patch.object(wire_messages, "_owner", lambda _message: ""),
        mock.patch.object(request_builder, "root_of", lambda _message, root, *_: root),
    ):
        code = real.main()
    sys.stderr.flush()
    os._exit(code)
