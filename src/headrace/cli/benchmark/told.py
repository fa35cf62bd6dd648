"""The report of `headrace bench` as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.base.units import format_bytes, format_count, plural

Found = Mapping[str, Any]
_UNITS = {"B": ("GB", 1e9), "weights": ("million weights", 1e6), "FLOP": ("TFLOP", 1e12)}


def told(report: Found) -> Iterator[str]:
    """The lines."""
    machine = report["machine"]
    size = f", {format_count(report['parameters'])} parameters" if "parameters" in report else ""
    size += f", LoRA of rank {report['lora']}" if report["lora"] else ""
    compiled = "compiled" if report["compile"] else "not compiled"
    card = f" as a card of {format_bytes(report['card'])}" if report["card"] else ""
    yield (f"{report['model']}{size}, {report['dtype']}, {compiled}, on {machine['device']}{card}, "
           f"{plural(machine['cpus'], 'CPU')}, torch {machine['torch']}, headrace {report['headrace']}")  # fmt: skip
    for number, session in enumerate(report["sessions"], 1):
        yield (f"session {number}: opened in {session['opened']:.1f} s, host peak until then "
               f"{format_bytes(session['opened_peak'])}; {session['placement']}")  # fmt: skip
        if session["not_encoded"]:
            yield (f"  {session['not_encoded']} compressed matrices are random codes and scales, filled in as they are "
                   "stored: no numbers were encoded")  # fmt: skip
    for work in report["works"]:
        yield ""
        if "error" in work:
            yield f"{work['work']}: FAILED: {work['error']}"
            continue
        yield from _work(work, machine["kind"] == "cuda")
        yield from (_peer(peer) for peer in report["against"] if peer.get("work") == work["work"])
    missing = [peer for peer in report["against"] if "left_out" in peer]
    yield from [""] * bool(missing)
    yield from (f"{peer['system']} was left out: {peer['left_out']}" for peer in missing)
    if report["ended"]:
        yield f"\nended before all was measured: {report['ended']}"


def _work(work: Found, gpu: bool) -> Iterator[str]:
    norm = work["max_grad_norm"]
    clipping = "no clipping" if norm is None else f"clipping to {norm:g}"
    yield f"{work['work']}: {work['tokens']} tokens a step, {clipping}"
    yield (f"  {work['seconds']:.3f} s a step ({plural(work['steps'], 'step')} and the wait for the last update), "
           f"{work['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
    if work["utilisation"] is not None:
        yield (f"  {100 * work['utilisation']:.1f} % of the {work['matmul_rate'] / 1e12:.3g} TFLOP/s that its matmuls "
               f"reach alone ({work['model_flops'] / 1e12:.3g} TFLOP a step: 6 for each weight and token, 4 for a "
               "frozen one, and causal attention, without recompute)")  # fmt: skip
    yield (f"  the compute lane{' of the GPU' if gpu else ''} is idle for {100 * work['idle']:.1f} % of the time; the "
           f"first step took {work['first_step_seconds']:.1f} s")  # fmt: skip
    yield f"  {'lane':<9}{'busy':>9}{'share':>9}{'over the link':>16}{'updated':>18}{'in the backward':>18}"
    for name, lane in work["lanes"].items():
        moved = format_bytes(lane["nbytes"]) if lane["nbytes"] else "-"
        updated = f"{lane['elements'] / 1e6:.1f} M" if lane["elements"] else "-"
        early = f"{lane['early'] / 1e6:.1f} M" if lane["early"] else "-"
        yield f"  {name:<9}{lane['busy']:>7.3f} s{100 * lane['share']:>7.1f} %{moved:>16}{updated:>18}{early:>18}"
    yield from _roofline(work)
    if work["clocks"]:
        yield ("  in the last step the GPU ran at {sm:.0f} of {sm_most:.0f} MHz and drew {watts:.0f} of "
               "{watts_most:.0f} W".format(**work["clocks"]))  # fmt: skip
    peaks = work["peaks"]
    card = f" (torch {format_bytes(peaks['device_reserved'])}"
    card += "".join(
        f", NVML's {what} {format_bytes(peaks[key])}"
        for what, key in (("process", "device_process"), ("card", "device_card"))
        if peaks[key]
    )
    yield f"  device peak {format_bytes(peaks['device'])}{card})"
    bound = ""
    if peaks["host_bound"]:
        within = "within" if peaks["host"] <= peaks["host_bound"] else "BEYOND"
        bound = f", {within} the bound of {format_bytes(peaks['host_bound'])}"
    yield f"  host peak {format_bytes(peaks['host'])}{bound}"
    yield from _predicted(work["predicted"])
    losses = work["losses"]
    yield f"  loss {losses[0]:.4f} to {losses[-1]:.4f}, last gradient norm {work['grad_norm']:.4g}"
    if work["trace"]:
        yield f"  trace: {work['trace']}"


def _predicted(found: Found) -> Iterator[str]:
    yield f"  by {found['by']}:"
    yield f"  {'':<16}{'predicted':>14}{'measured':>14}{'error':>10}"
    for key, name in (("seconds", "seconds a step"), ("device_bytes", "device"), ("host_bytes", "host")):
        figure = found[key]
        shown = [format_bytes(value) if key != "seconds" else f"{value:.3f} s"
                 for value in (figure["predicted"], figure["measured"]) if value is not None]  # fmt: skip
        last = shown[1] if len(shown) > 1 else "-"
        error = "-" if figure["error"] is None else f"{100 * figure['error']:+.1f} %"
        yield f"  {name:<16}{shown[0]:>14}{last:>14}{error:>10}"


def _roofline(work: Found) -> Iterator[str]:
    if not work["roofline"]:
        return
    yield f"  {'roofline':<16}{'work of a step':>26}{'rate alone':>26}{'takes':>10}{'beside traffic':>16}"
    for bound in work["roofline"]:
        unit, scale = _UNITS[bound["unit"]]
        beside = bound["seconds_beside"]
        amount, rate = f"{bound['amount'] / scale:.4g} {unit}", f"{bound['rate'] / scale:.4g} {unit}/s"
        last = f"{beside:>14.3f} s" if beside else f"{'-':>16}"
        yield f"  {bound['name']:<16}{amount:>26}{rate:>26}{bound['seconds']:>8.3f} s{last}"
    if work["largest"]:
        yield f"  largest: {work['largest']} bounds the step; measured: {work['over']:.2f} times that"
    if work["floor_seconds"]:
        yield (f"  floor: {work['floor_seconds']:.3f} s, where updates that wait for the norm hide behind the next "
               f"forward only; measured: {work['over_floor']:.2f} times that")  # fmt: skip


def _peer(peer: Found) -> str:
    if "error" in peer:
        return f"  against {peer['system']}: FAILED: {peer['error']}"
    note = f" ({peer['note']})" if peer.get("note") else ""
    return (f"  against {peer['system']}: {peer['seconds']:.3f} s a step, {peer['ratio']:.2f} times as long; device "
            f"{format_bytes(peer['device_peak'])}, host {format_bytes(peer['host_peak'])}{note}")  # fmt: skip
