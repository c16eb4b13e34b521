"""What tests start can be interrupted, also where the tests themselves cannot.

A shell starts a background job with SIGINT ignored, and every program that is started from there inherits
that: tests of Ctrl-C would wait in vain for their children to end. A handler is not inherited. So one that
does nothing stands for "ignored": the run goes on as its user wished, and children begin as in a terminal.
"""

from __future__ import annotations

import signal

__all__ = ["let_children_be_interrupted"]


def let_children_be_interrupted() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


let_children_be_interrupted()
