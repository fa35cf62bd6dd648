"""Pauses between steps while the GPU is hotter than a run allows, each of them an event."""

from __future__ import annotations

import time

from headrace.base.events import EventLog
from headrace.cli.progress import Display
from headrace.cli.signals import Stop
from headrace.hardware.sensors import Sensors

SECONDS = 1.0
"""Between two looks at the temperature."""


class Cooling:
    """`limit`: degrees Celsius; None: no pauses. A GPU whose temperature is not known is not waited for."""

    def __init__(self, limit: float | None, sensors: Sensors, events: EventLog, stop: Stop) -> None:
        self._limit, self._sensors, self._events, self._stop = limit, sensors, events, stop

    def passed(self, step: int, display: Display) -> bool:
        """True once the GPU is no hotter than the limit, False when a signal ended the pause. `step`: steps done."""
        if self._limit is None:
            return True
        celsius = self._sensors.gpu_celsius()
        if celsius is None:
            text = "max_temperature cannot be kept: no GPU tells its temperature"
            self._events.once("no temperature", "temperature", text, max_temperature=self._limit)
            return True
        if celsius <= self._limit:
            return True
        hottest, told, began = celsius, "", time.monotonic()
        while celsius is not None and celsius > self._limit and self._stop.number is None:
            hottest = max(hottest, celsius)
            text = f"paused after step {step}: the GPU has {celsius:.0f} C, more than {self._limit:g} C"
            if text != told:
                display.busy(text)
            told = text
            time.sleep(SECONDS)
            celsius = self._sensors.gpu_celsius()
        self._events.add(
            "temperature", "paused between steps: the GPU was too hot", step=step, celsius=hottest,
            max_temperature=self._limit, seconds=round(time.monotonic() - began, 1), after=celsius,
        )  # fmt: skip
        return self._stop.number is None
