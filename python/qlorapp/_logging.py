# SPDX-License-Identifier: Apache-2.0
"""What the C++ side has to say goes to the logger "qlorapp"."""

import atexit
import logging

from . import _C

_log = logging.getLogger("qlorapp")


def _say(level: int, line: str) -> None:
    _log.log(level, "%s", line)


_C.set_log_sink(_say)
atexit.register(_C.set_log_sink, None)
