"""Imports mlx-lm without letting it set the limit of open files.

mlx_lm.utils sets the limit to (2048, 4096) when it is imported: where the hard limit is lower, and
the process may not raise it, the import fails, and where it is higher, it falls for good. What
this process needs it takes itself (shared/process_start.py). Imported before all else of mlx-lm.
"""

import importlib
import resource
from typing import Final

SETTER: Final = "mlx_lm.utils"  # a test fails once it sets no limit any more

_setrlimit = resource.setrlimit
resource.setrlimit = lambda _which, _limits: None
try:
    importlib.import_module(SETTER)
finally:
    resource.setrlimit = _setrlimit
