# SPDX-License-Identifier: Apache-2.0
"""Sends the log lines of C++ to the logger "qlorapp"."""

import atexit
import logging
from typing import SupportsInt

from . import _C

_log = logging.getLogger("qlorapp")


def _say(level: SupportsInt, line: str) -> None:
    _log.log(int(level), "%s", line)


_C.set_log_sink(_say)
atexit.register(_C.set_log_sink, None)
