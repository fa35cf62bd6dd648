"""What a session uses: bytes by tier and region, peaks, traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.hardware.limits import peak_rss

if TYPE_CHECKING:
    from headrace.session.session import Session


def memory_report(session: Session) -> dict[str, Any]:
    """See Session.memory_report."""
    return {**usage(session), "events": [str(event) for event in session.events]}


def usage(session: Session) -> dict[str, dict[str, Any]]:
    """Bytes by tier, peaks and traffic: what a memory report says without its events."""
    stream = session._stream
    need = stream.regions.allocated
    inputs, slots = stream.inputs.host_bytes, stream.inputs.device_bytes
    device = session.device
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else need.device_bytes + slots
    disk = stream.regions.disk
    return {
        "device": {**need.device, "activations": slots, "peak": peak, "budget": session.budgets.device},
        "host": {**need.host, "activations": inputs, "peak_rss": peak_rss()},
        "disk": {
            "weights": need.disk["weights"], "state": need.disk["state"],
            "allocated": disk.nbytes if disk else 0,
            "read": (disk.bytes_read if disk else 0) + stream.regions.files.bytes_read,
            "written": disk.bytes_written if disk else 0,
        },
        "link": {
            "to_device": stream.actions.traffic.to_device + stream.actions.on_device.to_device,
            "to_host": stream.actions.traffic.to_host + stream.actions.on_device.to_host,
        },
    }  # fmt: skip
