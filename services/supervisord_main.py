"""supervisord, with logs that may fail: ``python -P -m decant.services.supervisord_main -c FILE``.

supervisord reports what it cannot write to its log on its stderr; where that is on the same full
disk, the report's own failure ends it, and with it the whole set. Here it drops such lines, and
writes again once there is room.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from supervisor import loggers, supervisord


def forgive() -> None:
    """From now on no logger of supervisord raises for want of room."""
    close, roll = loggers.Handler.close, loggers.RotatingFileHandler.doRollover

    def quiet_close(self: Any) -> None:
        with suppress(OSError):
            close(self)

    def quiet_roll(self: Any) -> None:
        with suppress(OSError):
            if self.stream.closed:  # a rotation failed in the middle
                self.stream = open(self.baseFilename, "ab")  # noqa: SIM115
            roll(self)

    loggers.Handler.handleError = lambda self: None
    loggers.Handler.close = quiet_close
    loggers.RotatingFileHandler.doRollover = quiet_roll


if __name__ == "__main__":
    forgive()
    supervisord.main(sys.argv[1:])
