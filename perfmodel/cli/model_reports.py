"""Models as text for people, from the same documents that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfmodel.cli.model_data import CONVENTIONS
from perfmodel.cli.model_memory import gb, memory_lines
from perfmodel.model.cache import LAYOUTS
from perfmodel.reports import table

#: Pieces of a list of layers that are printed; all are in the JSON document.
_MOST_PIECES = 4
#: What kinds of networks are called in a sentence.
_NETWORK = {"moe": "MoE", "none": "without a network"}
_CONVENTION = {
    "active_params": "all embeddings counted",
    "active_params_without_input_embedding": "without the input embedding",
    "active_params_without_embeddings": "without input embedding and head",
}


def card_text(data: dict[str, Any]) -> str:
    """What ``model show`` prints."""
    parts = [
        f"{data['name']} ({data['family']})",
        *_shape(data["shape"]),
        *_params(data["params"], data["storage"]),
        *_expert_bytes(data["expert_bytes"]),
        *_kv(data["kv"]),
    ]
    if data["memory"] is not None:
        parts += ["", *memory_lines(data["memory"])]
    return "\n".join([*parts, *_assumptions(data["assumptions"])])


def fit_text(data: dict[str, Any]) -> str:
    """What ``model fit`` prints."""
    head = f"{data['name']} ({data['family']})"
    return "\n".join([head, "", *memory_lines(data["memory"]), *_assumptions(data["assumptions"])])


def _assumptions(sentences: Sequence[str]) -> list[str]:
    return ["", "Assumptions", *(f"- {one}" for one in sentences)] if sentences else []


# ---- shape ----


def _shape(shape: dict[str, Any]) -> list[str]:
    kinds = [
        f"{len(kind['layers'])} {_NETWORK.get(kind['name'], kind['name'])} ({layer_ranges(kind['layers'])})"
        for kind in shape["feed_forward"]
    ]
    encoder = f", the first {shape['encoder_layers']} of them an encoder" if shape["encoder_layers"] else ""
    tied = "tied to" if shape["tied_embeddings"] else "apart from"
    attention = [
        [
            kind["name"],
            layer_ranges(kind["layers"]),
            _count(kind["query_heads"]),
            _count(kind["kv_heads"]),
            " + ".join(_cache(cache) for cache in kind["caches"]) or "-",
            _count(kind["state_bytes"] or None),
            _count(kind["params"]),
        ]
        for kind in shape["attention"]
    ]
    networks = [
        [
            kind["name"],
            layer_ranges(kind["layers"]),
            *(_count(kind["experts"] and kind["experts"][key]) for key in ("count", "top_k", "size", "params")),
            _count(kind["shared_size"]),
            _count(kind["shared_params"] or None),
            _count(kind["dense_size"]),
            _count(kind["dense_params"] or None),
        ]
        for kind in shape["feed_forward"]
    ]
    return [
        f"{shape['num_layers']:,} layers: {', '.join(kinds)}{encoder}; hidden size {shape['hidden_size']:,}; vocabulary"
        f" {shape['vocab_size']:,}, head {tied} the embedding",
        "",
        table(
            ("attention", "layers", "heads", "KV heads", "cached numbers a token", "state [B]", "parameters a layer"),
            attention,
            left=2,
        ),
        "",
        table(
            ("network", "layers", "experts", "top-k", "width", "parameters of one", "shared width", "parameters",
             "dense width", "parameters"),
            networks,
            left=2,
        ),
    ]  # fmt: skip


def _cache(cache: dict[str, Any]) -> str:
    """One store of a layer, in short."""
    text = f"{cache['elements']:,}" + ("" if cache["name"] == "keys and values" else f" {cache['name']}")
    if cache["tokens_per_entry"] > 1:
        text += f" for {cache['tokens_per_entry']} tokens"
    if cache["window_tokens"] is not None:
        text += f", window {cache['window_tokens']:,}"
    if cache["read_entries"] is not None:
        text += f", reads {cache['read_entries']:,}"
    return text


def layer_ranges(layers: Sequence[int]) -> str:
    """Layers as ranges, such as ``0-2, 3-60``; equal steps as ``0-34 by 2``; of many pieces the first and the last."""
    pieces: list[str] = []
    i = 0
    while i < len(layers):
        j = i + 1
        if j < len(layers):
            step = layers[j] - layers[i]
            while j + 1 < len(layers) and layers[j + 1] - layers[j] == step:
                j += 1
            if step == 1 or j - i > 1:
                pieces.append(f"{layers[i]}-{layers[j]}" + ("" if step == 1 else f" by {step}"))
                i = j + 1
                continue
        pieces.append(str(layers[i]))
        i += 1
    if len(pieces) > _MOST_PIECES:
        pieces = [*pieces[: _MOST_PIECES - 1], "...", pieces[-1]]
    return ", ".join(pieces) or "none"


def layers_text(rows: Sequence[dict[str, Any]]) -> str:
    """The parameters of every layer; neighbours that are alike share a row."""
    classes = ("attention", "dense", "shared", "router", "expert", "norm", "params")
    runs: list[tuple[list[int], list[str]]] = []
    for row in rows:
        cells = [row["attention_kind"], row["feed_forward_kind"], *(f"{row[name]:,}" for name in classes)]
        if not runs or runs[-1][1] != cells:
            runs.append(([], cells))
        runs[-1][0].append(row["layer"])
    header = ("layers", "mixer", "network", *classes[:-1], "sum")
    body = [[layer_ranges(layers), *cells] for layers, cells in runs]
    return f"Parameters by layer\n{table(header, body, left=3)}"


# ---- parameters and bytes ----


def _params(params: dict[str, Any], storage: dict[str, Any]) -> list[str]:
    total = params["total_params"]
    active = [
        [_CONVENTION[name], f"{params[name]:,}", f"{100 * params[name] / total:.1f} %", who]
        for name, who in CONVENTIONS.items()
    ]
    classes = [
        [
            name,
            f"{count:,}",
            f"{100 * count / total:.1f} %",
            stored["format"],
            _bits(stored["bits"]),
            gb(stored["bytes"]),
        ]
        for name, count in params["by_class"].items()
        for stored in [storage["by_class"][name]]
        if count
    ]
    classes.append(["sum", f"{total:,}", "", "", _bits(storage["mean_bits"]), gb(storage["weight_bytes"])])
    return [
        "",
        table(("parameters", "count", "share", "stored as", "bits", "GB"), classes),
        f"computed in {storage['compute_format']}",
        "",
        _left_last(("active parameters", "count", "share", "counted so by"), active),
    ]


def _expert_bytes(kinds: Sequence[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for one in kinds:
        columns = [
            f"stored ({_bits(row['bits'])})" if row["precision"] == "stored" else row["precision"]
            for row in one["by_bits"]
        ]
        every = one["layers"] * one["experts_per_layer"]
        rows = [
            ["one [MB]", *(f"{row['bytes'] / 1e6:,.3f}" for row in one["by_bits"])],
            [f"all {every:,} [GB]", *(gb(row["bytes_of_all"]) for row in one["by_bits"])],
        ]
        lines += ["", table(("bytes of experts at bits", *columns), rows)]
    return lines


# ---- cache ----


def _kv(kv: dict[str, Any]) -> list[str]:
    chosen, read = kv["layouts"][kv["layout"]], kv["read"]
    title = f"KV cache of {kv['batch']:,} x {kv['context_tokens']:,} tokens, numbers of {_bits(kv['bits'])} bits"
    if not chosen["parts"]:
        return ["", f"{title}: none"]
    rows = [
        _kv_row(name, part["bytes_per_token"], part["bytes_per_sequence"], read["parts"][name], kv["batch"])
        for name, part in chosen["parts"].items()
    ]
    if len(rows) > 1:
        sizes = (chosen["bytes_per_token"], chosen["bytes_per_sequence"], read["bytes_per_sequence"])
        rows.append(_kv_row("sum", *sizes, kv["batch"]))
    header = ("kept", "one more token [B]", "a sequence [MB]", "all [GB]", "read a step: a sequence [MB]", "all [GB]")
    lines = ["", title, table(header, rows), *_layouts(kv)]
    other = kv["other_mla_cache"]
    if other is not None:
        how = "expanded to keys and values" if kv["mla_cache"] == "compressed" else "compressed to the latent"
        lines.append(f"{how}: {other['bytes_per_token']:,.0f} B a token in all, {gb(other['bytes'])} GB")
    return lines


def _layouts(kv: dict[str, Any]) -> list[str]:
    """The ways to allocate windows, where they differ."""
    layouts = kv["layouts"]
    if len({(one["bytes_per_token"], one["bytes"]) for one in layouts.values()}) == 1:
        return []
    rows = [
        [
            name + (" (above)" if name == kv["layout"] else ""),
            f"{one['bytes_per_token']:,.0f}",
            gb(one["bytes"]),
            LAYOUTS[name].meaning,
        ]
        for name, one in layouts.items()
    ]
    return ["", _left_last(("room for windows", "one more token [B]", "all [GB]", "keeps"), rows)]


def _kv_row(name: str, token: float, sequence: float, read: float, batch: int) -> list[str]:
    return [
        name,
        f"{token:,.0f}" if token else "-",
        f"{sequence / 1e6:,.3f}",
        gb(batch * sequence),
        f"{read / 1e6:,.3f}",
        gb(batch * read),
    ]


# ---- numbers ----


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bits(bits: float) -> str:
    return f"{bits:.6g}"


def _left_last(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose last column is a sentence, and so stands to the left."""
    width = max(len(row[-1]) for row in [header, *rows])
    return table([*header[:-1], header[-1].ljust(width)], [[*row[:-1], row[-1].ljust(width)] for row in rows])
