"""What a model takes of a system's memory, as text for people."""

from __future__ import annotations

from typing import Any

from perfmodel.reports import table

#: The searches for the most that fits look no further.
_MOST = 10**9


def memory_lines(memory: dict[str, Any]) -> list[str]:
    """Memory by device and use, whether it fits, and the most that does."""
    devices = memory["devices"]
    uses = list(dict.fromkeys(use for device in devices for use in device["bytes_by_use"]))
    assumed = {
        part["use"] for device in devices for part in device["parts"] if part["source"] == "assumed" and part["bytes"]
    }
    rows = [
        [f"{use} (estimate)" if use in assumed else use, *(gb(device["bytes_by_use"].get(use)) for device in devices)]
        for use in uses
        if any(device["bytes_by_use"].get(use) for device in devices)
    ]
    for label, key in (("sum", "use_bytes"), ("capacity", "capacity_bytes"), ("headroom", "headroom_bytes")):
        rows.append([label, *(gb(device[key]) for device in devices)])
    policy = "" if memory["policy"] is None else f", policy {memory['policy']}"
    title = f"Memory on {memory['system']}{_ranks(memory['parallel'])}{policy}"
    header = ("GB", *(_device(device) for device in devices))
    return [title, table(header, rows), _verdict(memory), *_largest(memory), *_loading(memory["load_s"])]


def _device(device: dict[str, Any]) -> str:
    return f"{device['role']} {device['name']}"


def _ranks(parallel: dict[str, Any]) -> str:
    degrees = [f"{name} {parallel[name]}" for name in ("expert", "tensor", "pipeline") if parallel[name] > 1]
    return f", one GPU of {' x '.join(degrees)} parallel" if degrees else ""


def _verdict(memory: dict[str, Any]) -> str:
    short = [one for one in memory["devices"] if one["fits"] is False]
    if short:
        missing = ", ".join(f"{gb(-one['headroom_bytes'])} GB short on {_device(one)}" for one in short)
        return f"Does not fit: {missing}."
    unknown = [_device(one) for one in memory["devices"] if one["fits"] is None]
    return f"Fits, where capacities are stated (not of {', '.join(unknown)})." if unknown else "Fits."


def _largest(memory: dict[str, Any]) -> list[str]:
    largest = memory["largest"]
    lines = [
        f"largest batch at {memory['context']:,} tokens: {_most(largest['batch'])}",
        f"longest context at batch {memory['batch']:,}: {_most(largest['context_tokens'])}",
    ]
    experts = largest["gpu_experts"]
    if experts is not None:
        lines.append(
            f"most experts on the GPU: {experts['per_layer']:,} of every layer, or {experts['total']:,} in all, or all"
            f" of {experts['layers']:,} layers"
        )
    return lines


def _most(count: int) -> str:
    if count == 0:
        return "none fits"
    return f"{count:,} or more" if count >= _MOST else f"{count:,}"


def _loading(times: dict[str, float]) -> list[str]:
    shown = [f"{name} {seconds:,.2f} s" for name, seconds in times.items() if seconds]
    return [f"over the link once: {', '.join(shown)}"] if shown else []


def gb(size: float | None) -> str:
    """Bytes in GB, or a dash for what is not known."""
    return "-" if size is None else f"{size / 1e9 + 0.0:,.3f}"
