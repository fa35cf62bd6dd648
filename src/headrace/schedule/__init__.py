"""Schedules as data: ops, programs, the passes that build them, their check."""
