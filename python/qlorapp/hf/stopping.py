# SPDX-License-Identifier: Apache-2.0
"""SIGINT, SIGTERM and SIGHUP during train()."""

import os
import signal
import threading
from typing import Any


class Terminated(SystemExit):
    """SIGTERM or SIGHUP during train(). Exits with 128 + the signal's number."""


class StopSignals:
    """Between enter and exit, SIGTERM and SIGHUP raise Terminated and SIGINT raises KeyboardInterrupt.

    A signal that the program handles or ignores keeps its meaning. The second signal has its usual effect, at once. Outside of the main
    thread Python allows no handlers, and nothing changes.
    """

    def __init__(self) -> None:
        #: The number of the first signal.
        self.received: int | None = None
        #: A step is under way: the first signal only sets `received`.
        self.waits = False
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
        for name, handler in usual.items():
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is handler:
                self._before[number] = handler
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> None:
        self._restore()
        if os.getpid() != self._process and number != signal.SIGINT:  # a forked worker, which its parent ends
            os.kill(os.getpid(), number)
            return
        self.received = number
        if not self.waits:
            self.act()

    def act(self) -> None:
        """Raises for the signal that was received, if there was one."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise Terminated(128 + self.received)
