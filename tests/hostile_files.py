"""Files that were made to do harm, and small good ones of every format to damage."""

import base64
import io
import json
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf_files import LIST, TEXT, value, whole_file

METADATA = {"model": "made-up", "source": "recorded"}


class Sample(NamedTuple):
    """Good files of one format, and the options with which they are imported."""

    paths: list[Path]
    options: dict[str, Any]


def npz(**arrays: Any) -> bytes:
    """Content of an uncompressed ``.npz`` file."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def picks(tokens: int = 12, layers: int = 3, experts: int = 6, top_k: int = 2) -> np.ndarray:
    """Distinct experts of every token and layer; the last expert occurs."""
    random = np.random.default_rng(5)
    return np.argsort(random.random((tokens, layers, experts)), axis=-1)[..., :top_k].astype(np.int32)


def canonical(**changes: Any) -> dict[str, Any]:
    """The arrays of a trace in the canonical layout."""
    arrays = {
        "topk_ids": picks().astype(np.uint8),
        "topk_weights": np.full((12, 3, 2), 0.5, np.float16),
        "sequence_offsets": np.array([0, 5, 12]),
        "prompt_len": np.array([2, 3]),
        "layer_index": np.arange(3),
        "num_experts": np.int64(6),
        "metadata": np.array(json.dumps(METADATA)),
    }
    return {**arrays, **changes}


def samples(folder: Path) -> dict[str, Sample]:
    """A good recording of every format, written to the folder."""
    ids = picks()
    lines = [
        json.dumps({"type": "meta", "model_id": "toy", "layers_logged": [0, 1, 2], "top_k": 2}),
        *(
            json.dumps(
                {"type": "route", "req_id": 0, "token_idx": t, "layer": layer, "topk_ids": ids[t, layer].tolist(),
                 "topk_weights": [0.75, 0.25]}
            )
            for layer in range(3) for t in range(12)
        ),
    ]  # fmt: skip
    dump = {
        "records": [
            {
                "forward_pass_id": 0, "rank": 0, "gatherer_key": "primary", "input_ids": list(range(12)),
                "positions": list(range(12)), "extend_seq_lens": [12], "forward_mode": 1,
                "topk_ids_of_layer": np.concatenate([ids, np.full((12, 3, 6), -1)], axis=2).transpose(1, 0, 2).tolist(),
            }
        ],
        "last_physical_to_logical_map": [list(range(6))] * 3,
    }  # fmt: skip
    response = {
        "text": "x",
        "meta_info": {
            "routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
            "prompt_tokens": 5,
            "completion_tokens": 7,
        },
    }
    scores = np.zeros((12, 6))
    np.put_along_axis(scores, ids[:, 0].astype(int), [[0.5, 0.25]], axis=1)
    rows = ["layer_id,token_id," + ",".join(f"expert_{e}" for e in range(6))]
    rows += [f"0,{t}," + ",".join(f"{score:.6f}" for score in scores[t]) for t in range(12)]
    flat = ids[:, 0].ravel().tolist()
    selections = {
        "version": 2, "tokens": 12, "layers": 3, "expertsPerLayer": 6, "topK": 2, "seed": 1,
        "source": {"kind": "synthetic", "generator": "toy", "seed": 1}, "selections": ids.tolist(),
    }  # fmt: skip
    counts = np.array([[[3, 1, 0, 4, 2, 2], [2, 2, 2, 2, 2, 2]], [[1, 1, 1, 1, 1, 1], [6, 0, 0, 0, 0, 0]]], np.float32)
    tensors = {
        f"blk.{layer}.ffn_{kind}_exps.weight.{what}": ((width, 4), [float(n) for n in range(1, 4 * width + 1)])
        for layer in (1, 2) for kind in ("gate", "up", "down") for what, width in (("in_sum2", 2), ("counts", 1))
    }  # fmt: skip
    tensors = {name: ((1, 4), [3.0, 1.0, 0.0, 4.0]) if "counts" in name else one for name, one in tensors.items()}
    gguf = whole_file(
        tensors,
        (value("general.type", TEXT, "imatrix"), value("imatrix.datasets", LIST, ["a"], TEXT),
         value("imatrix.chunk_count", 4, 3), value("imatrix.chunk_size", 4, 512)),
    )  # fmt: skip
    row_phase = npz(
        topk_ids=ids.astype(np.uint8), seq_id=np.repeat([0, 1], 6), phase=np.tile([0, 0, 0, 1, 1, 1], 2),
        layer_index=np.arange(3), topk_weights=np.full(ids.shape, 0.5, np.float16),
    )  # fmt: skip
    logits = np.random.default_rng(2).normal(size=(3, 12, 6)).astype(np.float32)
    ranks = "\n".join(f"{layer},{e}" for e in range(4) for layer in range(3))
    whole = {"prompt_len": (5,), "num_experts": 6}
    files: dict[str, tuple[dict[str, bytes], dict[str, Any]]] = {
        "canonical": ({"trace.npz": npz(**canonical())}, {}),
        "row-phase": ({"rows.npz": row_phase}, {"num_experts": 6}),
        "vllm": ({"request.npy": npy(ids)}, whole),
        "vllm-jsonl": ({"log.jsonl": "\n".join(lines).encode()}, whole),
        "sglang": ({"dump.json": json.dumps(dump).encode()}, {}),
        "sglang-response": ({"answer.json": json.dumps(response).encode()}, {"top_k": 2, "layers": (0, 1, 2)}),
        "router-logits": (
            {"logits.npz": npz(router_logits=logits)},
            {"family": "mixtral", "top_k": 2, "prompt_len": (5,), "sequence_len": (12,)},
        ),
        "router-trace-v2": ({"trace.json": json.dumps(selections).encode()}, {"prompt_len": (5,)}),
        "dynande": ({"run_layer1_x.csv": "\n".join(rows).encode()}, {**whole, "sequence_len": (12,), "top_k": 2}),
        "esft": (
            {"expert_weights_1.txt": ("\t".join([*map(str, flat), "", *["0.25"] * 24]) + "\n").encode()},
            {**whole, "top_k": 2},
        ),
        "llamacpp-csv": (
            {"routes.csv": ("layer_id,expert_ids\n" + calls(ids)).encode()},
            {"num_experts": 6},
        ),
        "imatrix": ({"model.gguf": gguf}, {}),
        "ktransformers": ({"table.npy": npy(counts[0])}, {}),
        "moe-infinity": ({"matrices.npy": npy(counts)}, {}),
        "popularity-rank": ({"ranks.csv": ranks.encode()}, {}),
        "sglang-stat": (
            {"stat.json": json.dumps({"rank": 0, "logical_count": counts.astype(int).tolist()}).encode()},
            {},
        ),
        "tensorrt-llm": (
            {
                "statistics/meta_info.json": json.dumps({"num_experts": 6, "num_experts_per_token": 2}).encode(),
                "statistics/rank0.safetensors": safetensors({"0_1": counts[0, 0], "0_2": counts[0, 1]}),
            },
            {},
        ),
    }
    found = {}
    for name, (content, options) in files.items():
        for file, data in content.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        first = folder / name / next(iter(content)).split("/")[0]
        found[name] = Sample([first], options)
    return found


def calls(ids: np.ndarray) -> str:
    """Rows of a prompt of seven tokens and five decode steps, layer after layer in each call."""
    bounds = [(0, 7), *((t, t + 1) for t in range(7, 12))]
    rows = [(layer, ids[t, layer]) for start, stop in bounds for layer in range(3) for t in range(start, stop)]
    return "\n".join(f"{layer},{' '.join(map(str, one.tolist()))}" for layer, one in rows) + "\n"


def npy(array: np.ndarray) -> bytes:
    """Content of a ``.npy`` file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def safetensors(arrays: dict[str, np.ndarray]) -> bytes:
    """Content of a safetensors file of int32 arrays."""
    header, data = {}, b""
    for name, array in arrays.items():
        part = array.astype("<i4").tobytes()
        header[name] = {"dtype": "I32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# ---- generic hostile files ----


class Payload:
    """Writes a file when it is unpickled, which must never happen."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def header(shape: str, kind: str = "|u1", version: int = 1, length: int | None = None) -> bytes:
    """Start of a ``.npy`` file with any shape in it."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    count = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", count) + text


def zeros(size: int) -> bytes:
    """``size`` bytes of zero as a deflate stream, made without making them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (size >> 24) + zlib.compressobj(9, zlib.DEFLATED, -15).flush()


def archive(members: dict[str, bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as target:
        for name, data in members.items():
            target.writestr(name, data)
    return stream.getvalue()


def packed(name: str, start: bytes, size: int, declared: int) -> bytes:
    """An archive with one member: ``start`` and then zeros, ``size`` bytes that are said to be ``declared``."""
    stored = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = stored.compress(start) + stored.flush(zlib.Z_FULL_FLUSH) + zeros(size - len(start) & ~(2**24 - 1))
    whole = len(start) + (size - len(start) & ~(2**24 - 1))
    told = declared or whole
    fields = (20, 0, 8, 0, 33, 0, len(stream), told, len(name), 0)
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, *fields) + name.encode() + stream
    central = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, *fields[:9], 0, 0, 0, 0, 0, 0) + name.encode()
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + end


def outsized_rows(megabytes: int) -> tuple[bytes, int]:
    """Header of picks that fill so many MiB with zeros, and their bytes."""
    tokens = (megabytes >> 4 << 24) // 64
    return header(f"({tokens}, 32, 2)"), tokens * 64


def generic(marker: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of files that no reader may accept."""
    payload = pickle.dumps(Payload(marker))
    pickled = np.empty(1, object)
    pickled[0] = Payload(marker)
    nested = b"[" * 100_000
    yield "empty.npz", b""
    yield "nul.txt", b"0,1 2\n\0\0\0,1 2\n"
    yield "bytes.bin", bytes(range(256)) * 8
    yield "surrogate.csv", b"layer_id,expert_ids\n0,1 2\n\xed\xa0\x80,3 4\n"
    yield "latin.csv", b"layer_id,expert_ids\n\xe9,3 4\n"
    # pickles
    yield "payload.pt", payload
    yield "payload.npy", npy(pickled)
    yield "payload.npz", npz(**canonical(topk_ids=pickled))
    yield "payload-zip.pt", archive({"a/data.pkl": payload, "a/version": b"3\n", "a/byteorder": b"little"})
    yield "payload-old.pt", pickle.dumps(0x1950A86A20F9469CFC6C) + pickle.dumps(1001) + payload
    yield "packed.pt", archive({"a/data.pkl": payload * 9}, method=zipfile.ZIP_DEFLATED)
    # sizes that are not there
    yield "shape.npy", header("(1099511627776, 2, 2)")
    yield "shapes.npy", header("(1048576, 1048576)", "<f8") + bytes(64)
    yield "negative.npy", header("(-2, -2, 1)") + bytes(4)
    yield "digits.npy", header("(" + "9" * 4000 + ",)")
    yield "nothing.npy", header("(1099511627776, 2, 2)", "<U0")
    yield "header.npy", header("(2,)", version=2, length=2**32 - 1)
    yield "deep.npy", header("(" * 4000)
    yield "cut.npy", npy(picks())[:-9]
    yield "shape.npz", archive({"topk_ids.npy": header("(1099511627776, 2, 2)"), "metadata.npy": npy(np.array("{}"))})
    for key in ("topk_ids", "sequence_offsets", "metadata", "num_experts"):
        arrays = {f"{name}.npy": npy(np.asarray(array)) for name, array in canonical().items()}
        yield f"{key}.npz", archive({**arrays, f"{key}.npy": header("(1099511627776,)", "<i8") + bytes(8)})
    yield (
        "shape.safetensors",
        _tensors('{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'),
    )
    yield "length.safetensors", struct.pack("<Q", 2**60) + b"{}"
    yield "deep.safetensors", _tensors("[" * 100_000)
    yield "twice.safetensors", _tensors('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + '"b":1}')
    yield "counts.gguf", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)
    yield "text.gguf", b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**60) + b"abc"
    yield "list.gguf", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 2**61)
    yield "lists.gguf", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1) * 9000
    yield "turned.gguf", b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64)
    yield "entries.dat", struct.pack("<ii", 2**31 - 1, 2**31 - 1) + b"abc" * 9
    # files that grow
    start, size = outsized_rows(1024)
    yield "bomb.npz", packed("topk_ids.npy", start, size + len(start), 0)
    start, size = outsized_rows(64)
    yield "small-bomb.npz", packed("topk_ids.npy", start, size + len(start), 0)
    yield "lying-bomb.npz", packed("topk_ids.npy", header("(4, 1, 2)"), 2**29, len(header("(4, 1, 2)")) + 8)
    yield "header-bomb.npz", packed("topk_ids.npy", header("(2,)", version=2, length=2**28), 2**28 + 200, 0)
    yield "members.pt", archive({**{f"a/{i}": b"" for i in range(12_000)}, "a/data.pkl": b"N."})
    yield "members.npz", archive({f"{i}.npy": b"" for i in range(12_000)})
    yield "lzma.npz", archive({"topk_ids.npy": npy(picks())}, method=zipfile.ZIP_LZMA)
    yield "bzip2.npz", archive({"topk_ids.npy": npy(picks())}, method=zipfile.ZIP_BZIP2)
    # documents
    yield "deep.json", nested
    yield "deep-object.json", b'{"records":' * 100_000
    yield "deep.jsonl", b'{"type": "meta", "a": ' + nested + b"\n{}\n"
    yield "large.json", b'{"records": 1e400}'
    yield "digits.json", b'{"version": ' + b"9" * 100_000 + b"}"
    yield "nan.json", b'{"logical_count": [[[NaN, Infinity]]]}'
    yield "twice.json", b'{"version": 2, "version": 2, "selections": [], "expertsPerLayer": 1, "topK": 1}'
    yield "surrogate.json", b'{"records": "\\ud800", "logical_count": "\\udfff"}'
    yield "nul.json", b'{"records": [1,\0 2]}'
    yield "cut.json", b'[{"meta_info": {"routed_experts": "AAAA'
    yield "lists.json", b'{"records": [' + b"[]," * 4_000_000 + b"[]]}"
    yield "numbers.json", b'{"logical_count": [[[' + b"1.5," * 8_000_000 + b"1.5]]]}"
    yield "base64.json", b'{"meta_info": {"routed_experts": "AAAAAAA", "prompt_tokens": 1}}'
    # lines
    columns = b",".join([b"1"] * 1_000_000)
    yield "columns.csv", b"layer_id,token_id," + columns + b"\n" + columns
    yield "columns.txt", b"\t".join([b"1"] * 1_000_000) + b"\t\t0.5\n"
    yield "columns-rank.csv", columns + b"\n"
    yield "columns-list.csv", b"layer_id,expert_ids\n0," + b" ".join([b"1"] * 1_000_000) + b"\n"
    yield "line.csv", b"layer_id,expert_ids\n" + b"7" * 20_000_000
    yield "line.jsonl", b'{"token_idx": 0, "layer": 0, "topk_ids": [0]}\n{"token_idx": "' + b"7" * 20_000_000


def nearly_too_large() -> Iterator[tuple[str, bytes]]:
    """Documents of no format that are just small enough to be looked at."""
    yield "many-lists.json", b'{"records": [' + b"[1,1]," * 720_000 + b"[]]}"
    yield "many-objects.json", b'{"records": [' + b'{"a":1},' * 370_000 + b"0]}"
    yield "many-texts.json", b'{"records": [' + b'"ab",' * 1_200_000 + b"0]}"
    yield "many-numbers.json", b'{"logical_count": [[[' + b"1.5," * 3_000_000 + b"1.5]]]}"
    yield "long-text.json", b'{"meta_info": {"routed_experts": "' + b"A" * 48_000_001 + b'"}}'


def _tensors(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + bytes(8)


def special(folder: Path) -> dict[str, Path]:
    """Paths that are no regular files."""
    found = {name: folder / name for name in ("folder", "pipe", "device", "lost", "missing", "line\nbreak")}
    found["folder"].mkdir()
    os.mkfifo(found["pipe"])
    found["device"].symlink_to("/dev/zero")
    found["lost"].symlink_to(folder / "nowhere")
    found["cut"] = folder / ("a" * 300)
    return found


# ---- damaged good files ----

TOKENS: tuple[bytes, ...] = (
    b"1e400", b"9" * 5000, b"NaN", b"-1", b"4294967296", b"-9223372036854775809", b"Infinity", b"\0", b"\xed\xa0\x80",
    b'"\\ud800"', b"[" * 100_000, b"null", b"1.5", b"true", b"", b"1" * 19, b"1_0", b"0x1", b"\xd9\xa1",
)  # fmt: skip


def damaged(data: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    """A good file with one number replaced, cut short, with bits turned or parts twice; each may still be good."""
    random = np.random.default_rng(seed)
    numbers = [one.span() for one in re.finditer(rb"[0-9]+", data)] if data[:1] != b"P" else []
    for i, token in enumerate(TOKENS if b"\0" not in data else ()):
        for j, (start, stop) in enumerate({numbers[k] for k in random.integers(len(numbers), size=3)}):
            yield f"token-{i}-{j}", data[:start] + token + data[stop:]
    for i in range(8):
        yield f"cut-{i}", data[: int(random.integers(len(data)))]
    for i in range(24):
        turned = bytearray(data)
        for place in random.integers(len(data), size=1 + i % 3):
            turned[place] ^= 1 << int(random.integers(8))
        yield f"turned-{i}", bytes(turned)
    for i in range(6):
        start, stop = np.sort(random.integers(len(data), size=2))
        yield f"twice-{i}", data[:stop] + data[start:]
    yield "longer", data + b"\0"


def damaged_archive(data: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    """A good archive with one member damaged, check sums as they should be."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        members = {name: source.read(name) for name in source.namelist()}
    for name, content in members.items():
        for kind, changed in damaged(content, seed):
            yield f"{name}-{kind}", archive({**members, name: changed})


def targeted(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Damage of the good file of one format that its reader has to notice."""
    far, nan = picks(), np.full((3, 12, 6), 0.5)
    far[7, 1, 0] = 2**31 - 1
    nan[1, 2, 3] = np.nan
    counts = np.ones((2, 2, 6))
    if name == "vllm":
        yield "expert out of range", npy(far)
        yield "expert beyond 32 bits", npy(far.astype(np.int64) << 31)
        yield "other byte order untold", npy(picks().byteswap())
        yield "numbers that are no integers", npy(picks().astype(float))
        yield "pick twice", npy(np.ones_like(picks()))
    elif name == "vllm-jsonl":
        yield "expert out of range", data.replace(b'"topk_ids": [', b'"topk_ids": [99, ', 1)
        yield "NaN weight", data.replace(b"0.75", b"NaN", 1)
        yield "negative weight", data.replace(b"0.75", b"-0.75", 1)
        yield "large weight", data.replace(b"0.75", b"1e400", 1)
    elif name == "sglang":
        yield "map out of range", data.replace(b"[0, 1, 2, 3, 4, 5]]", b"[0, 1, 2, 3, 4, 70000]]", 1)
        yield "one position less", data.replace(b'"positions": [0, ', b'"positions": [', 1)
        yield "other lengths", data.replace(b'"extend_seq_lens": [12]', b'"extend_seq_lens": [99999999999]', 1)
    elif name == "sglang-response":
        text = json.loads(data)["meta_info"]["routed_experts"].encode()
        yield "cut text", data.replace(text, text[:-3], 1)
        yield "cut item", data.replace(text, text[:-4], 1)
        yield "letters of no base64", data.replace(text, text[:9] + b"!" + text[10:], 1)
        yield "spaces", data.replace(text, text[:8] + b"    " + text[8:], 1)
        yield "other byte order", data.replace(text, base64.b64encode(picks().astype(">i4").tobytes()), 1)
    elif name == "router-logits":
        yield "NaN", npz(router_logits=nan.astype(np.float32))
        yield "infinite", npz(router_logits=np.where(np.isnan(nan), np.inf, nan))
        yield "integers", npz(router_logits=picks())
    elif name == "row-phase":
        fields = {"seq_id": np.zeros(12, int), "phase": np.repeat([0, 1], 6), "layer_index": np.arange(3)}
        yield "expert out of range", npz(topk_ids=far, **fields)
        yield "NaN weight", npz(topk_ids=picks(), topk_weights=np.full((12, 3, 2), np.nan), **fields)
    elif name in ("dynande", "esft"):
        for word in (b"nan", b"1e400", b"inf", b"-0.25", b"0x1p-2"):
            yield word.decode(), data.replace(b"0.250000" if name == "dynande" else b"0.25", word, 1)
    elif name == "llamacpp-csv":
        yield "expert out of range", data.replace(b"\n0,", b"\n0,99 ", 1)
        yield "pick twice", data.replace(b"\n0,", b"\n0,5 5 ", 1)
    elif name == "imatrix":
        for number in (np.nan, np.inf, -3.0):
            yield str(number), data.replace(struct.pack("<f", 3.0) + struct.pack("<f", 1.0),
                                            struct.pack("<f", number) + struct.pack("<f", 1.0))  # fmt: skip
    elif name in ("ktransformers", "moe-infinity"):
        for number in (np.nan, np.inf, -3.0):
            counts[1, 1, 4] = number
            yield str(number), npy(counts if name == "moe-infinity" else counts[1])
    elif name == "sglang-stat":
        yield "negative count", data.replace(b"[3, 1,", b"[-3, 1,", 1)
        yield "count beyond 64 bits", data.replace(b"[3, 1,", b"[9223372036854775808, 1,", 1)
    elif name == "popularity-rank":
        yield "expert twice", data.replace(b"0,0", b"1,0", 1)
        yield "large expert", data.replace(b"0,0", b"0,65000", 1)
    elif name == "router-trace-v2":
        yield "expert out of range", data.replace(b"[[[", b"[[[6, ", 1)
        yield "other top k", data.replace(b'"topK": 2', b'"topK": 3', 1)
        yield "many tokens", data.replace(b'"tokens": 12', b'"tokens": 1099511627776', 1)


def hostile_arrays() -> dict[str, dict[str, Any]]:
    """Changes of the arrays of a good canonical trace, each of which makes it bad."""
    nan, twice = np.full((12, 3, 2), 0.5), picks()
    nan[7, 1, 0] = np.nan
    twice[3, 0] = 4
    deep = "[" * 100_000 + "]" * 100_000

    def text(body: str) -> dict[str, Any]:
        return {"metadata": np.array(f'{{"model": "made-up", "source": "recorded", "x": {body}}}')}

    return {
        "nan weight": {"topk_weights": nan},
        "infinite weight": {"topk_weights": nan * np.inf},
        "expert out of range": {"topk_ids": picks() + 1},
        "negative expert": {"topk_ids": picks() - 2},
        "expert twice": {"topk_ids": twice},
        "wrapped offsets": {"sequence_offsets": np.array([0, -(2**63), 12])},
        "large prompt": {"prompt_len": np.array([2, 2**62])},
        "unsigned prompt": {"prompt_len": np.array([2, 2**64 - 1], np.uint64)},
        "many experts": {"num_experts": np.int64(2**40)},
        "deep metadata": text(deep),
        "large number in metadata": text("1e400"),
        "many digits in metadata": text("9" * 100_000),
        "NaN in metadata": text("NaN"),
        "key twice in metadata": text('{"a": 1, "a": 2}'),
        "surrogate model": {"metadata": np.array(r'{"model": "\ud800", "source": "recorded"}')},
        "surrogate label": {"labels": np.array(["a", "\ud800"])},
        "letters beyond text": {"labels": np.array([2**31 - 1, 2**31 - 1], np.uint32).view("<U1")},
        "long metadata": text("[" + "[]," * 3_000_000 + "[]]"),
        "many labels": {"labels": np.zeros(2**22, "<U1")},
        "records": {"topk_ids": np.zeros(12, [("a", "i4"), ("b", "f8")])},
        "complex weights": {"topk_weights": nan.astype(complex)},
    }
