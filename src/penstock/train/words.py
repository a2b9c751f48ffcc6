"""Events in words. Room: show."""

from __future__ import annotations

from penstock.train.events import Event
from penstock.units import format_bytes, format_seconds


def line_of(event: Event, steps: int) -> str:
    """One line; "" for what needs none."""
    match event["event"]:
        case "step":
            return f"step {event['step']}/{steps}  {numbers(event)}"
        case "skipped":
            return (
                f"step {event['step']}/{steps} left out: not finite; "
                f"loss scale {event['loss_scale']:g} now"
            )
        case "eval":
            return f"held-out loss {event['loss']:.4f} at step {event['step']}"
        case "sample":
            return f"sample at step {event['step']}: {event['prompt']!r} -> {event['text']!r}"
        case "save":
            size = format_bytes(event["bytes"])
            return f"saved {event['path']} ({size}, {format_seconds(event['seconds'])})"
        case "stopped":
            return f"stopped after step {event['step']}/{steps}; --resume goes on from there"
        case "done":
            return (
                f"done: {event['steps']} steps; the model is in {event['out']}; "
                f"most host memory {format_bytes(event['peak_host_bytes'])}"
            )
        case "note":
            return str(event["text"])
    return ""


def numbers(event: Event) -> str:
    return (
        f"loss {event['loss']:.4f}  norm {event['grad_norm']:.3g}  lr {event['lr']:.3g}  "
        f"{event['tokens_per_second']:,.0f} tokens/s"
    )


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s`, `14 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"
