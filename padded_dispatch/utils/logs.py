"""Lines of the package's log that a process writes once."""

import functools
import logging

_log = logging.getLogger("padded_dispatch")


@functools.cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line, unless this process has logged it before."""
    _log.log(level, line)
