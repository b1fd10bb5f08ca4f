"""What kvx has to say, in Python's ``logging``."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from . import _kvx

_lock = threading.Lock()
_thread: threading.Thread | None = None


def forward_logs(level: int = logging.INFO) -> None:
    """Hands what kvx has to say from ``level`` on to the loggers ``kvx_core``, ``kvx_connector.rank`` and so on, one for each of its modules.

    May be called again, with another level. Records are handed on by a thread of their own, so nothing of kvx waits for a handler; where
    handlers are too slow, records are lost and counted. With ``logging.DEBUG`` each request's way is told.
    """
    global _thread
    _kvx.log_open(level)
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_forward, name="kvx-log", daemon=True)
            _thread.start()


def _forward() -> None:
    while (taken := _kvx.log_take(1.0)) is not None:
        records, lost = taken
        for level, target, text, created, thread, file, line in records:
            logger = logging.getLogger(target.replace("::", "."))
            if logger.isEnabledFor(level):
                record = logger.makeRecord(logger.name, level, file or "", line or 0, text, (), None)
                record.created = created
                record.threadName = thread or record.threadName
                logger.handle(record)
        if lost:
            logging.getLogger("kvx").warning("%d records were lost: handlers of logging are too slow", lost)


@atexit.register
def _stop() -> None:
    _kvx.log_close()
    if _thread is not None:
        _thread.join(timeout=5.0)


def _forked() -> None:
    global _thread
    _thread = None
    _kvx.log_forked()


os.register_at_fork(after_in_child=_forked)
