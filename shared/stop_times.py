"""Names how long the parts of a stop may take, for all who wait for one."""

from typing import Final

CHUNK_WAIT_S: Final = 15.0  # a worker ends the chunk that its GPU computes before it goes
FLUSH_WAIT_S: Final = 2.0  # then it writes what is not on disk yet
END_WAIT_S: Final = 2.0  # for what a worker does then, beside writing what it keeps
