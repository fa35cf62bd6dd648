"""Sessions: open all rooms for one model, close them in reverse."""

from headrace.executor.window import accumulate
from headrace.session.session import Session
from headrace.session.wrap import memory_report, session, unwrap, wrap

__all__ = ["Session", "accumulate", "memory_report", "session", "unwrap", "wrap"]
