"""What a run's record says of each step: bytes, traffic, temperatures; taken on the way, never waited for."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psutil
import torch

from headrace import __version__
from headrace.hardware.sensors import Sensors
from headrace.session.report import usage
from headrace.session.session import Session


class Samples:
    """Counts from one `take` to the next. The fields are those of `headrace.report.record`."""

    def __init__(self, session: Session, sensors: Sensors | None = None) -> None:
        self._session, self._process = session, psutil.Process()
        self.sensors = Sensors(session.device) if sensors is None else sensors
        self._since, self._traffic = time.perf_counter(), self._counted(usage(session))

    def take(self) -> dict[str, Any]:
        """Fields of the step that has just been made."""
        session, now, report = self._session, time.perf_counter(), usage(self._session)
        traffic = self._counted(report)
        device, disk = report["device"], report["disk"]
        in_use = device["peak"]
        if session.device.type == "cuda":
            in_use = torch.cuda.memory_reserved(session.device)
        fields = {
            "seconds": round(now - self._since, 6), "time": round(time.time(), 3),
            "device_bytes": in_use, "device_peak": device["peak"],
            "host_bytes": self._process.memory_info().rss, "disk_bytes": disk["allocated"],
            **{name: traffic[name] - self._traffic[name] for name in traffic if name in self._traffic},
            **self.sensors.read(),
        }  # fmt: skip
        self._since, self._traffic = now, traffic
        return fields

    def facts(self) -> dict[str, Any]:
        """What does not change while a session is open."""
        session = self._session
        device = session.device
        return {
            "headrace": __version__, "torch": torch.__version__, "model": type(session.model).__name__,
            "parameters": sum(parameter.numel() for parameter in session.model.parameters()),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "device_budget": session.budgets.device, "host_budget": session.budgets.host,
        }  # fmt: skip

    def _counted(self, report: dict[str, dict[str, Any]]) -> dict[str, int]:
        counted = {
            "link_up": report["link"]["to_device"], "link_down": report["link"]["to_host"],
            "disk_read": report["disk"]["read"], "disk_written": report["disk"]["written"],
        }  # fmt: skip
        with contextlib.suppress(AttributeError, OSError, psutil.Error):  # not every system counts it
            counted["ssd_written"] = int(self._process.io_counters().write_bytes)
        return counted
