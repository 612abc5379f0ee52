"""Imports mlx-lm without letting it set the limit of open files.

mlx_lm.utils sets the limit to (2048, 4096) when it is imported. If the hard limit is lower and may
not be raised, the import fails. A higher hard limit is lowered for good. This process sets its own
limit (shared/process_start.py). A worker of text imports this module before any of mlx-lm; the
embedding worker, with one connection and few files, does not.
"""

import importlib
import resource
from typing import Final

SETTER: Final = "mlx_lm.utils"  # a test fails if this module stops setting the limit

_setrlimit = resource.setrlimit
resource.setrlimit = lambda _which, _limits: None
try:
    importlib.import_module(SETTER)
finally:
    resource.setrlimit = _setrlimit
