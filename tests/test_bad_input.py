"""Bad input of every kind: exit code 2, one line on standard error, nothing else, and no output file."""

import io
import itertools
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from commands import Answer, check_refusal, run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import perfmodel
from perfmodel.paths import data_folder

GPU = (data_folder("hardware_specs") / "gpu" / "h100-sxm.toml").read_text(encoding="utf-8")
OVERLAY = """\
kind = "system"
name = "what-if"
description = "a faster link"
base = "h100-cxl2-ndp"

[overrides]
"link.bandwidth_gb_per_s" = 100.0
"ndp.arrays" = 128

[override_sources]
"link.bandwidth_gb_per_s" = { source = "assumed", citation = "what if" }
"ndp.arrays" = { source = "assumed", citation = "what if" }
"""
CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "vocab_size": 1000,
}
METADATA = {"model": "made-up", "source": "synthetic"}


def trace_arrays() -> dict[str, Any]:
    """A good trace of 2 sequences, 3 layers, 8 experts and 2 picks, as the arrays of its file."""
    random = np.random.default_rng(1)
    return {
        "topk_ids": np.argsort(random.random((20, 3, 8)), axis=-1)[..., :2].astype(np.uint8),
        "topk_weights": random.random((20, 3, 2)).astype(np.float16),
        "sequence_offsets": np.array([0, 9, 20]),
        "prompt_len": np.array([4, 5]),
        "layer_index": np.arange(3),
        "num_experts": np.int64(8),
        "metadata": np.array(json.dumps(METADATA)),
    }


def npz(**arrays: Any) -> bytes:
    """Content of an uncompressed ``.npz`` file."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def check_loads_or_refuses(answer: Answer) -> None:
    """Either a result and nothing else, or a refusal."""
    if answer.code == 0:
        assert answer.out
        assert answer.err == ""
    else:
        check_refusal(answer)


class Place(NamedTuple):
    """A folder with good inputs, and what lies in it before a command runs."""

    folder: Path
    config: Path
    trace: Path

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    def compare(self, *more: object) -> Answer:
        """A small comparison that works, changed by further options, which take the place of its own."""
        own = {"--model": self.config, "--trace": self.trace}
        given = [word for option, value in own.items() if option not in more for word in (option, value)]
        return run("compare", *given, "--policy", "monde", "--json", *more)

    def check_refusal(self, words: tuple[str, ...], *more: object) -> None:
        before = sorted(self.folder.rglob("*"))
        figure = self.folder / "figure.png"
        options = more if "--plot" in more else ("--plot", figure, *more)
        check_refusal(self.compare(*options), *words)
        assert sorted(self.folder.rglob("*")) == before


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    config, trace = tmp_path / "config.json", tmp_path / "trace.npz"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    trace.write_bytes(npz(**trace_arrays()))
    return Place(tmp_path, config, trace)


def test_the_good_inputs_are_good(place: Place) -> None:
    answer = place.compare("--policy", "context-aware", "--policy", "hobbit")
    assert answer.code == 0, answer.err
    assert len(json.loads(answer.out)["evaluations"]) == 3
    for name, text in (("gpu.toml", GPU), ("overlay.toml", OVERLAY)):
        assert run("specs", "validate", place.write(name, text)).code == 0
    assert place.compare("--system", place.folder / "overlay.toml").code == 0


# Files of any kind that are no such file

JUNK: dict[str, bytes] = {
    "empty": b"",
    "nothing but zeros": bytes(100),
    "every byte": bytes(range(256)) * 10,
    "random bytes": np.random.default_rng(0).bytes(4096),
    "not UTF-8": 'kind = "gpu" # caf\xe9'.encode("latin-1"),
    "UTF-16": GPU.encode("utf-16"),
    "half a text": GPU.encode()[: len(GPU) // 2],
    "half an object": json.dumps(CONFIG).encode()[:100],
    "deep nesting": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "a number": b"12",
    "null": b"null",
    "a list": b"[1, 2]",
    "a pickle": pickle.dumps({"model_type": "mixtral"}),
    "a lone .npy array": npz(a=np.arange(3))[30:],
    "a zip archive of nothing": b"PK\x05\x06" + bytes(18),
    "other arrays": npz(a=np.arange(3)),
    "half a trace": npz(**trace_arrays())[:2000],
    "a trace without its end": npz(**trace_arrays())[:-30],
}


@pytest.mark.parametrize("content", JUNK.values(), ids=JUNK)
@pytest.mark.parametrize(
    ("option", "suffix"), [("--model", "json"), ("--system", "toml"), ("--trace", "npz"), ("--loss", "npz")]
)
def test_files_that_are_something_else(place: Place, option: str, suffix: str, content: bytes) -> None:
    path = place.write(f"bad-one.{suffix}", content)
    place.check_refusal(("bad-one",), option, path)


@pytest.mark.parametrize(
    ("option", "suffix"), [("--model", "json"), ("--system", "toml"), ("--trace", "npz"), ("--loss", "npz")]
)
def test_files_that_are_not_there_or_no_files(place: Place, option: str, suffix: str) -> None:
    place.check_refusal(("none",), option, place.folder / f"none.{suffix}")
    place.check_refusal(("none",), option, place.folder / "no-folder" / f"none.{suffix}")
    place.check_refusal(("trace.npz",), option, place.trace / f"none.{suffix}")
    folder = place.folder / f"folder.{suffix}"
    folder.mkdir()
    place.check_refusal(("folder",), option, folder)
    (place.folder / f"loop.{suffix}").symlink_to(place.folder / f"loop.{suffix}")
    place.check_refusal(("loop",), option, place.folder / f"loop.{suffix}")
    place.check_refusal((), option, "x" * 5000 + f".{suffix}")
    if hasattr(os, "mkfifo"):  # opening one would wait for ever
        os.mkfifo(place.folder / f"pipe.{suffix}")
        place.check_refusal(("pipe",), option, place.folder / f"pipe.{suffix}")
    locked = place.write(f"locked.{suffix}", b"")
    locked.chmod(0)
    place.check_refusal(("locked",), option, locked)


@pytest.mark.parametrize("option", ["--model", "--system", "--trace", "--loss", "--policy", "--layers"])
@pytest.mark.parametrize("value", ["two\nlines", "\r", "", " ", "no-such-thing", "\udcff", "\u2028", "\x1b[31m"])
def test_names_of_nothing(place: Place, option: str, value: str) -> None:
    place.check_refusal((), option, value)


@pytest.mark.parametrize("value", ["two\nlines.npz", "a\r.npz", "\u2028.npz", "\x85.npz"])
@pytest.mark.parametrize("option", ["--trace", "--loss"])
def test_file_names_of_several_lines(place: Place, option: str, value: str) -> None:
    place.check_refusal((), option, value)
    place.check_refusal((), option, place.write(value, b"junk"))


# Specs


def edited(old: str, new: str, text: str = GPU) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


BANDWIDTH = "memory_bandwidth_gb_per_s = 3350\n"
BAD_GPUS: dict[str, tuple[str, tuple[str, ...]]] = {
    f"bandwidth {value}": (edited(BANDWIDTH, f"memory_bandwidth_gb_per_s = {value}\n"), ("memory_bandwidth_gb_per_s",))
    for value in (
        "-1", "0", "-0.0", "nan", "inf", "-inf", "1e308", "9" * 400, '"3350"', "true", "[3350]", "{ a = 1 }",
        "1979-05-27", "0x7fffffffffffffff", "1e-300",
    )
} | {
    "no bandwidth": (edited(BANDWIDTH, ""), ("memory_bandwidth_gb_per_s", "missing")),
    "unknown key": (edited(BANDWIDTH, BANDWIDTH + "memory_bandwith_gb_per_s = 1\n"), ("memory_bandwidth_gb_per_s",)),
    "key given twice": (edited(BANDWIDTH, BANDWIDTH * 2), ()),
    "efficiency above 1": (edited("memory_efficiency = 0.32\n", "memory_efficiency = 1.2\n"), ("memory_efficiency",)),
    "negative overhead": (edited("launch_overhead_us = 0\n", "launch_overhead_us = -1\n"), ("launch_overhead_us",)),
    "no fp16": (edited("fp16 = 989.4, ", ""), ("fp16",)),
    "unknown dtype": (edited("int8 = 1978.9", "int7 = 1978.9"), ("int7",)),
    "no source": (edited("compute_efficiency = {", "# {"), ("compute_efficiency",)),
    "source of nothing": (edited("[sources]\n", '[sources]\nx = { source = "assumed", citation = "abc" }\n'), ("x",)),
    "unknown source": (edited('derived", citation = "median', 'guessed", citation = "median'), ("guessed",)),
    "empty citation": (edited('"typical share of the dense peak that large matrix products reach"', '""'), ()),
    "unknown kind": (edited('kind = "gpu"', 'kind = "tpu"'), ("kind", "gpu")),
    "no kind": (edited('kind = "gpu"', ""), ("kind",)),
    "name of two lines": (edited('name = "h100-sxm"', 'name = "a\\nb"'), ("name",)),
    "number as name": (edited('name = "h100-sxm"', "name = 5"), ("name",)),
    "broken TOML": (edited(BANDWIDTH, "memory_bandwidth_gb_per_s = = 3\n"), ("TOML",)),
    "key of two lines": (edited(BANDWIDTH, BANDWIDTH + '"a\\nb\\u2028" = 1\n'), ()),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD_GPUS.values(), ids=BAD_GPUS)
def test_bad_gpu_specs(place: Place, text: str, words: tuple[str, ...]) -> None:
    path = place.write("bad.toml", text)
    check_refusal(run("specs", "validate", path), "bad.toml", *words)
    check_refusal(run("specs", "show", path), "bad.toml", *words)
    system = place.write(
        "system.toml", 'kind = "system"\nname = "s"\ndescription = "d"\ngpu = "bad.toml"\nlink = "pcie-4.0-x16"\n'
    )
    place.check_refusal(("bad.toml", *words), "--system", system)


BAD_SYSTEMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown base": (edited('"h100-cxl2-ndp"', '"h100-cxl2-npd"', OVERLAY), ("h100-cxl2-npd", "h100-cxl2-ndp")),
    "missing base": (edited('"h100-cxl2-ndp"', '"none.toml"', OVERLAY), ("none.toml", "base")),
    "no base and no parts": (edited('base = "h100-cxl2-ndp"', "", OVERLAY), ("gpu",)),
    "cyclic base": (edited('"h100-cxl2-ndp"', '"bad.toml"', OVERLAY), ("base", "same file")),
    "base of another kind": (edited('"h100-cxl2-ndp"', '"h100-sxm"', OVERLAY), ("h100-sxm",)),
    "base and a part that does not exist": (edited("base =", 'gpu = "h100-smx"\nbase =', OVERLAY), ("gpu", "h100-smx")),
    "unknown override": (OVERLAY.replace("ndp.arrays", "ndp.arays"), ("arays", "arrays")),
    "override without source": (edited('"ndp.arrays" = {', "# {", OVERLAY), ("ndp.arrays",)),
    "source without override": (edited('"ndp.arrays" = 128', "", OVERLAY), ("ndp.arrays",)),
    "fraction of an array": (edited("= 128", "= 1.5", OVERLAY), ("ndp", "arrays", "whole number")),
    "no array": (edited("= 128", "= 0", OVERLAY), ("ndp", "arrays")),
    "huge array": (edited("= 128", f"= {'9' * 5000}", OVERLAY), ()),
    "huge link": (edited("= 100.0", "= 1e300", OVERLAY), ("link", "bandwidth_gb_per_s")),
    "link of NaN": (edited("= 100.0", "= nan", OVERLAY), ("link", "bandwidth_gb_per_s")),
    "link of a text": (edited("= 100.0", '= "fast"', OVERLAY), ("link", "bandwidth_gb_per_s")),
    "link of a bool": (edited("= 100.0", "= true", OVERLAY), ("link", "bandwidth_gb_per_s")),
    "part that is missing": (OVERLAY.replace("ndp.arrays", "cpu.sockets"), ("cpu",)),
    "unknown part": (OVERLAY.replace("ndp.arrays", "npu.arrays"), ("npu.arrays",)),
}


@pytest.mark.parametrize(("text", "words"), BAD_SYSTEMS.values(), ids=BAD_SYSTEMS)
def test_bad_systems(place: Place, text: str, words: tuple[str, ...]) -> None:
    path = place.write("bad.toml", text)
    place.check_refusal(("bad.toml", *words), "--system", path)
    check_refusal(run("specs", "validate", path), "bad.toml", *words)
    check_refusal(run("reproduce", "--system", path, "--out", place.folder / "out"), "bad.toml", *words)
    assert [entry for entry in (place.folder / "out").rglob("*") if entry.is_file()] == []


def test_bases_in_a_long_circle(place: Place) -> None:
    for number in range(4):
        following = f'"./{(number + 1) % 4}.toml"'
        place.write(f"{number}.toml", edited('"h100-cxl2-ndp"', following, OVERLAY))
    place.check_refusal(("0.toml",), "--system", place.folder / "0.toml")


@pytest.mark.parametrize(
    ("name", "close"), [("h100-sxn", "h100-sxm"), ("cxl-2.0-x61", "cxl-2.0-x16"), ("H100-CXL2-NDP", "h100-cxl2-ndp")]
)
def test_misspelt_specs_get_a_close_match(name: str, close: str) -> None:
    check_refusal(run("specs", "show", name), name, close, "specs list")


def test_specs_of_the_wrong_kind(place: Place) -> None:
    place.check_refusal(("gpu", "system"), "--system", "h100-sxm")
    check_refusal(run("specs", "schema", "gpus"), "gpus", "gpu, link, ndp, cpu, host, engine, dram, system")
    check_refusal(run("reproduce", "--system", "rtx4090-pcie4", "--out", place.folder / "out"), "near-data")


# Models


def config(**changes: Any) -> str:
    return json.dumps({key: value for key, value in (CONFIG | changes).items() if value != "left out"})


BAD_CONFIGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown family": (config(model_type="perceiver"), ("perceiver", "mixtral")),
    "family of a list": (config(model_type=["mixtral"]), ("model_type",)),
    "no family": (config(model_type="left out"), ("model_type",)),
    "broken JSON": (config()[:-1] + ",}", ()),
    "two documents": (config() * 2, ()),
    "NaN": (config().replace("256", "NaN"), ()),
    "huge exponent": (config().replace("256", "1e999"), ()),
    "huge integer": (config().replace("256", "9" * 5000), ()),
    "more picks than experts": (config(num_experts_per_tok=9), ("num_experts_per_tok", "8")),
} | {
    f"{key} {value!r:.20}": (config(**{key: value}), (key,))
    for key, value in itertools.product(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts", "vocab_size"),
        ("left out", -1, 0, 1.5, "8", True, None, [8], 10**30),
    )
}


@pytest.mark.parametrize(("text", "words"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_configs(place: Place, text: str, words: tuple[str, ...]) -> None:
    place.check_refusal(("bad.json", *words), "--model", place.write("bad.json", text))


def test_dense_and_unknown_models(place: Place, shared: Path) -> None:
    for name in ("Qwen__Qwen3-8B", "meta-llama__Meta-Llama-3-8B"):
        place.check_refusal((name,), "--model", shared / "configs" / name / "config.json")


def test_models_that_the_trace_does_not_fit(place: Place) -> None:
    for changes, words in (
        ({"num_hidden_layers": 4}, ("3 MoE layers", "4", "--layers cycle")),
        ({"num_local_experts": 16}, ("8 experts", "16")),
        ({"num_experts_per_tok": 3}, ("2 picks", "3")),
    ):
        path = place.write("other.json", config(**changes))
        place.check_refusal(words, "--model", path)
    # Cycling is for layers alone.
    place.check_refusal(
        ("16",), "--model", place.write("other.json", config(num_local_experts=16)), "--layers", "cycle"
    )


def test_models_that_do_not_fit_in_memory(place: Place) -> None:
    large = config(hidden_size=65536, intermediate_size=262144)
    path = place.write("large.json", large)
    place.check_refusal(("does not fit", "capacity", "GB"), "--model", path, "--policy", "context-aware:gpu_experts=4")


# Traces


def with_arrays(**changes: Any) -> bytes:
    arrays = trace_arrays() | changes
    return npz(**{key: value for key, value in arrays.items() if value is not None})


def changed(name: str, place: Any, value: Any, dtype: Any = None) -> dict[str, Any]:
    array = np.array(trace_arrays()[name], dtype=dtype)
    array[place] = value
    return {name: array}


def zipped(**members: bytes) -> bytes:
    """A zip archive with the good trace's arrays, some of them replaced by bytes as they are."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive, zipfile.ZipFile(io.BytesIO(with_arrays())) as good:
        for name in good.namelist():
            archive.writestr(name, members.get(name.removesuffix(".npy"), good.read(name)))
    return stream.getvalue()


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


class Malicious:
    """Unpickling this would leave a mark."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("unpickled",)


def pickled_npz() -> bytes:
    stream = io.BytesIO()
    hostile = np.empty(1, dtype=object)
    hostile[0] = Malicious()
    np.savez(stream, **(trace_arrays() | {"topk_ids": hostile}))
    return stream.getvalue()


BAD_TRACES: dict[str, bytes] = {
    "expert out of range": with_arrays(**changed("topk_ids", (3, 1, 0), 8)),
    "negative expert": with_arrays(**changed("topk_ids", (3, 1, 0), -2, np.int64)),
    "expert twice": with_arrays(**changed("topk_ids", (3, 1), 5)),
    "experts as floats": with_arrays(topk_ids=trace_arrays()["topk_ids"].astype(float)),
    "experts as bools": with_arrays(topk_ids=trace_arrays()["topk_ids"].astype(bool)),
    "experts in two axes": with_arrays(topk_ids=trace_arrays()["topk_ids"][:, :, 0]),
    "no token": with_arrays(topk_ids=np.zeros((0, 3, 2), np.uint8)),
    "NaN weight": with_arrays(**changed("topk_weights", (0, 0, 0), np.nan)),
    "infinite weight": with_arrays(**changed("topk_weights", (0, 0, 0), np.inf)),
    "negative weight": with_arrays(**changed("topk_weights", (0, 0, 0), -0.5)),
    "complex weights": with_arrays(topk_weights=trace_arrays()["topk_weights"] + 1j),
    "weights of another shape": with_arrays(topk_weights=np.ones((20, 3, 1), np.float32)),
    "offsets that fall": with_arrays(sequence_offsets=np.array([0, 21, 20])),
    "offsets beyond the end": with_arrays(sequence_offsets=np.array([0, 9, 21])),
    "offsets that start late": with_arrays(sequence_offsets=np.array([1, 9, 20])),
    "huge offsets": with_arrays(sequence_offsets=np.array([0, 2**63, 20], np.uint64)),
    "prompt longer than its sequence": with_arrays(prompt_len=np.array([10, 5])),
    "negative prompt": with_arrays(prompt_len=np.array([-1, 5])),
    "prompts of other sequences": with_arrays(prompt_len=np.array([1, 2, 3])),
    "no decode step": with_arrays(prompt_len=np.array([9, 11])),
    "layers that fall": with_arrays(layer_index=np.array([0, 2, 1])),
    "fewer layers": with_arrays(layer_index=np.arange(2)),
    "no expert count": with_arrays(num_experts=None),
    "expert count of 1": with_arrays(num_experts=np.int64(1)),
    "negative expert count": with_arrays(num_experts=np.int64(-8)),
    "expert count of a float": with_arrays(num_experts=np.float64(8)),
    "expert count of a bool": with_arrays(num_experts=np.bool_(True)),
    "another expert count": with_arrays(num_experts=np.int64(9)),
    "metadata that is no JSON": with_arrays(metadata=np.array("{")),
    "metadata that is a list": with_arrays(metadata=np.array("[]")),
    "metadata as bytes": with_arrays(metadata=np.array(b"{}")),
    "metadata with NaN": with_arrays(metadata=np.array('{"model": "x", "source": "recorded", "loss": NaN}')),
    "metadata without source": with_arrays(metadata=np.array('{"model": "x"}')),
    "unknown source": with_arrays(metadata=np.array('{"model": "x", "source": "invented"}')),
    "object array": with_arrays(topk_weights=np.array([{}], dtype=object)),
    "pickle that would act": pickled_npz(),
    "shape beyond the data": zipped(topk_ids=npy_header((10**6, 3, 2), "|u1") + b"abc"),
    "shape beyond all memory": zipped(topk_ids=npy_header((2**62, 2**62, 2), "|u1") + b"abc"),
    "unknown dtype": zipped(topk_ids=npy_header((20, 3, 2), "|u1").replace(b"|u1", b"|q1") + bytes(120)),
    "member that is no array": zipped(topk_ids=b"these are no picks"),
}


@pytest.mark.parametrize("content", BAD_TRACES.values(), ids=BAD_TRACES)
def test_bad_traces(place: Place, content: bytes) -> None:
    path = place.write("bad.npz", content)
    for policy in ("monde", "hobbit:split=gates", "context-aware"):
        place.check_refusal((), "--trace", path, "--policy", policy)
    assert not (place.folder / "unpickled").exists()


def test_damaged_traces_name_the_file(place: Place) -> None:
    for name in ("expert out of range", "expert twice", "NaN weight", "object array", "pickle that would act"):
        place.check_refusal(("bad.npz",), "--trace", place.write("bad.npz", BAD_TRACES[name]))


@pytest.mark.parametrize("policy", ["monde", "hobbit", "hobbit:cache_high=2", "context-aware", "static"])
@pytest.mark.parametrize("rows", [np.r_[0:4, 9:14], np.r_[4:9, 14:20], np.r_[0:20]], ids=["prefill", "decode", "all"])
@pytest.mark.parametrize("layers", [slice(1, 2), slice(None)], ids=["one layer", "all layers"])
def test_traces_without_picks_are_priced_or_refused(place: Place, policy: str, rows: Any, layers: slice) -> None:
    ids = trace_arrays()["topk_ids"]
    ids[rows, layers] = 255
    check_loads_or_refuses(
        place.compare("--trace", place.write("holes.npz", with_arrays(topk_ids=ids)), "--policy", policy)
    )


def test_an_archive_that_expands_to_gigabytes(place: Place) -> None:
    path = place.folder / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("topk_ids.npy", "w") as member:
        member.write(npy_header((2**24, 1, 1), "|u1"))
        member.write(bytes(2**24))
    content = path.read_bytes()
    # The list of contents claims far more than it holds.
    forged = content.replace((2**24 + 128).to_bytes(4, "little"), (2**32 - 2).to_bytes(4, "little"))
    assert forged != content
    place.check_refusal(("bomb.npz",), "--trace", place.write("bomb.npz", forged))


@pytest.mark.parametrize(
    "losses",
    [
        np.ones((3, 8, 3)), np.ones((3, 8)), np.ones((0, 8, 4)), np.ones((3, 7, 4)), -np.ones((3, 8, 4)),
        np.full((3, 8, 4), np.nan), np.full((3, 8, 4), np.inf), np.ones((3, 8, 4), complex),
        np.full((3, 8, 4), "1"), np.full((3, 8, 4), None), np.ones((3, 8, 4), bool),
    ],
    ids=lambda losses: f"{losses.dtype} {losses.shape} {losses.ravel()[:1]}",
)  # fmt: skip
def test_bad_loss_tables(place: Place, losses: Any) -> None:
    place.check_refusal((), "--policy", "context-aware", "--loss", place.write("bad.npz", npz(losses=losses)))


# Options


@pytest.mark.parametrize("option", ["--prompt", "--output"])
@pytest.mark.parametrize(
    "value",
    ["0", "-1", "1.5", "1e3", "nan", "inf", "", "ten", str(10**12), str(10**18), str(2**63), "9" * 30, "9" * 5000],
)
def test_lengths(place: Place, option: str, value: str) -> None:
    place.check_refusal((), option, value)


@pytest.mark.parametrize(
    "policy",
    [
        "moe", "monde:", "Monde", ":", "monde:reading", "monde:reading=", "monde:reading=two", "monde:reeding=one",
        "monde:reading=one,reading=one", "monde:resident=-1", "monde:resident=9", "monde:resident=1.5",
        "monde:resident=nan", "context-aware:mean_bits=0.9", "context-aware:mean_bits=4.1",
        "context-aware:mean_bits=nan", "context-aware:mean_bits=inf", "context-aware:mean_bits=1e999",
        "context-aware:gpu_experts=9", "context-aware:gpu_experts=-1", f"context-aware:gpu_experts={10**40}",
        "context-aware:alpha=1.1", "context-aware:alpha=-0.1", "context-aware:selector=none",
        "context-aware:selector=uniform,mean_bits=2.5", "hobbit:t1=0.9,t2=0.1", "hobbit:low_bits=0",
        "hobbit:low_bits=64", "hobbit:cache_high=9", "hobbit:prefetch_accuracy=2", "monde:reading=one;resident=1",
    ],
)  # fmt: skip
def test_policies(place: Place, policy: str) -> None:
    if policy == "monde:":
        assert place.compare("--policy", policy).code == 0  # no options are no mistake
    else:
        place.check_refusal(("policy",), "--policy", policy)


def test_policies_that_the_system_cannot_run(place: Place) -> None:
    words = ("near-data", "rtx4090-pcie4", "perfmodel policies")
    place.check_refusal(words, "--system", "rtx4090-pcie4", "--policy", "monde")


@pytest.mark.parametrize("name", ["figure.txt", "figure", "figure.jpg", ".png", "figure.png.", "figure.svg.gz", ""])
def test_figures_without_a_known_format(place: Place, name: str) -> None:
    place.check_refusal((".png",), "--plot", place.folder / "new" / name)


def test_an_empty_name_is_not_the_default(place: Place) -> None:
    place.check_refusal((), "--plot", "")
    check_refusal(run("reproduce", "--trace", "", "--out", place.folder / "out"))


def test_figures_that_cannot_be_written(place: Place) -> None:
    (place.folder / "folder.png").mkdir()
    place.check_refusal(("folder.png",), "--plot", place.folder / "folder.png")
    place.check_refusal(("trace.npz",), "--plot", place.trace / "figure.png")
    place.check_refusal((), "--plot", place.folder / ("x" * 300 + ".png"))


def test_an_output_folder_that_is_a_file(place: Place) -> None:
    for out in (place.trace, place.trace / "folder", "/dev/null/folder", "x" * 5000):
        check_refusal(run("reproduce", "--out", out))
    assert sorted(entry.name for entry in place.folder.iterdir()) == ["config.json", "trace.npz"]


def test_an_output_folder_with_a_folder_in_the_way(place: Place) -> None:
    (place.folder / "out" / "reproduce.csv").mkdir(parents=True)
    check_refusal(run("reproduce", "--out", place.folder / "out", "--trace", place.trace), "reproduce.csv")
    assert list((place.folder / "out").rglob(".*")) == []


@pytest.mark.parametrize("trace", ["none.npz", "no-such-name", "bad.npz", "other.npz"])
def test_reproduce_refuses_before_it_writes(place: Place, trace: str) -> None:
    place.write("bad.npz", BAD_TRACES["expert twice"])
    place.write("other.npz", with_arrays(num_experts=np.int64(9)))
    check_refusal(run("reproduce", "--trace", trace, "--out", place.folder / "out", "--json"))
    assert [entry for entry in (place.folder / "out").rglob("*") if entry.is_file()] == []


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("--nope",), ("no-such-command",), ("compare",), ("compare", "--model"), ("specs",), ("specs", "nothing"),
        ("specs", "show"), ("specs", "validate"), ("policies", "monde"), ("reproduce", "now"), ("two\nlines",),
        ("reproduce", "two\nlines"), ("compare", "--model", "mixtral-8x7b", "--no\nsuch"), ("\u2028",),
        ("compare", "--model", "mixtral-8x7b", "--layers", "repeat"),
        ("compare", "--model", "mixtral-8x7b", "--check=1"),
    ],
    ids=repr,
)  # fmt: skip
def test_command_lines(arguments: tuple[str, ...]) -> None:
    check_refusal(run(*arguments))


def test_a_terminal_that_knows_ascii_alone(place: Place) -> None:
    path = place.write("accents.toml", edited('"a faster link"', '"un lien plus rapide, à 100 Go/s → ß"', OVERLAY))
    for arguments in (("specs", "show", str(path)), ("compare", "--model", "modèle→")):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "perfmodel", *arguments],
            cwd=place.folder,
            capture_output=True,
            timeout=120,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(perfmodel.__file__).resolve().parent.parent),
                "PYTHONIOENCODING": "ascii",
                "PYTHONUTF8": "0",
            },
            check=False,
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode in (0, 2)
        assert len(done.stderr.splitlines()) <= 1


# Random damage


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Good inputs that many random examples share."""
    folder = tmp_path_factory.mktemp("desk")
    config_file, trace_file = folder / "config.json", folder / "trace.npz"
    config_file.write_text(json.dumps(CONFIG), encoding="utf-8")
    trace_file.write_bytes(npz(**trace_arrays()))
    return Place(folder, config_file, trace_file)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with some flipped, cut out, repeated or put in, or the end missing."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["flip", "set", "cut", "end", "insert", "repeat"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "end":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**7, 10**12, 10**30, -(10**400), 10**400]),
    st.floats(),
)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
CONFIG_KEYS = st.one_of(
    st.sampled_from(
        [
            *CONFIG, "head_dim", "quantization_config", "torch_dtype", "rope_parameters", "text_config", "layer_types",
            "n_routed_experts", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "moe_intermediate_size",
            "num_experts", "n_shared_experts", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers",
            "attention_bias", "use_sliding_window", "shared_expert_intermediate_size",
        ]
    ),
    TEXTS,
)  # fmt: skip
FAMILIES = st.sampled_from(["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "mixtra"])


def json_text(value: Any) -> str:
    """A value as JSON, even if it is an integer of more than 4,300 digits."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value)
    finally:
        sys.set_int_max_str_digits(limit)


def toml_value(value: Any) -> str:
    """A value as TOML would have it, or nearly so."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value)


@st.composite
def edited_lines(draw: st.DrawFn, text: str) -> bytes:
    """A TOML text with the values or the keys of some lines replaced, or lines dropped, doubled or moved."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[at].partition(" = ")
        match draw(st.sampled_from(["value", "value", "value", "key", "drop", "double", "move"])):
            case "value" if equals:
                lines[at] = f"{key} = {toml_value(draw(JSON_VALUES))}"
            case "key" if equals:
                lines[at] = json.dumps(draw(TEXTS)) + lines[at].removeprefix(key)
            case "drop" if len(lines) > 1:
                del lines[at]
            case "double":
                lines.insert(at, lines[at])
            case "move":
                lines.append(lines[at])
    return "\n".join(lines).encode("utf-8", "replace")


SPEC_TEXTS = {"gpu": GPU, "overlay": OVERLAY} | {
    name: (data_folder("hardware_specs") / f"{name}.toml").read_text(encoding="utf-8")
    for name in ("ndp/monde-ndp", "link/cxl-2.0-x16", "dram/lpddr5-6400")
}
MANY = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@MANY
@given(st.sampled_from(sorted(SPEC_TEXTS)).flatmap(lambda name: damaged(SPEC_TEXTS[name].encode())))
def test_damaged_specs(desk: Place, content: bytes) -> None:
    check_loads_or_refuses(run("specs", "show", desk.write("damaged.toml", content), "--json"))


@MANY
@given(st.sampled_from(sorted(SPEC_TEXTS)).flatmap(lambda name: edited_lines(SPEC_TEXTS[name])))
def test_edited_specs(desk: Place, content: bytes) -> None:
    check_loads_or_refuses(run("specs", "show", desk.write("edited.toml", content), "--json"))


@MANY
@given(edited_lines(OVERLAY))
def test_edited_systems_are_priced_or_refused(desk: Place, content: bytes) -> None:
    check_loads_or_refuses(desk.compare("--system", desk.write("system.toml", content)))


@MANY
@given(damaged(json.dumps(CONFIG).encode()))
def test_damaged_configs(desk: Place, content: bytes) -> None:
    check_loads_or_refuses(desk.compare("--model", desk.write("damaged.json", content), "--layers", "cycle"))


@MANY
@given(FAMILIES, st.dictionaries(CONFIG_KEYS, JSON_VALUES, min_size=1, max_size=4), st.lists(CONFIG_KEYS, max_size=2))
@example("mixtral", {"hidden_size": 10**7, "intermediate_size": 10**7}, [])
@example("mixtral", {"num_hidden_layers": 10**4}, [])
@example("mixtral", {"sliding_window": 10**400}, [])
def test_edited_configs(desk: Place, family: str, changes: dict[str, Any], dropped: list[str]) -> None:
    content = {**CONFIG, "model_type": family, **changes}
    content = {key: value for key, value in content.items() if key not in dropped}
    path = desk.write("edited.json", json_text(content))
    answer = desk.compare("--model", path, "--layers", "cycle", "--prompt", "2", "--output", "2", "--policy", "hobbit")
    check_loads_or_refuses(answer)


@MANY
@given(damaged(npz(**trace_arrays())), st.sampled_from(["hobbit", "context-aware", "static"]))
def test_damaged_traces(desk: Place, content: bytes, policy: str) -> None:
    check_loads_or_refuses(desk.compare("--trace", desk.write("damaged.npz", content), "--policy", policy))


@MANY
@given(damaged(npz(losses=np.ones((3, 8, 4)))))
def test_damaged_loss_tables(desk: Place, content: bytes) -> None:
    check_loads_or_refuses(desk.compare("--loss", desk.write("losses.npz", content), "--policy", "context-aware"))


ARRAY_VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.lists(st.integers(-2, 25), max_size=6).map(lambda values: np.array(values, dtype=np.int64)),
    st.lists(st.floats(), max_size=6).map(np.array),
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3)).map(lambda shape: np.zeros(shape, np.uint8)),
    TEXTS.map(lambda text: np.array(text.rstrip("\0"))),
    JSON_VALUES.map(lambda value: np.array(json_text(value))),
)


@MANY
@given(st.dictionaries(st.sampled_from([*trace_arrays(), "labels", "seq_id", "phase"]), ARRAY_VALUES, max_size=3))
def test_edited_traces(desk: Place, changes: dict[str, Any]) -> None:
    path = desk.write("edited.npz", npz(**(trace_arrays() | changes)))
    check_loads_or_refuses(desk.compare("--trace", path, "--policy", "context-aware", "--layers", "cycle"))


@MANY
@given(
    st.sampled_from(["monde", "hobbit", "context-aware", "static", "mond"]),
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "reading", "resident", "rounding", "prefill", "split", "t1", "t2", "low_bits", "cache_high",
                    "cache_low", "prefetch_accuracy", "mean_bits", "gpu_experts", "selector", "alpha", "norm",
                    "overlap",
                ]
            ),
            st.one_of(NUMBERS.filter(lambda n: abs(n) < 10**300 or isinstance(n, float)).map(str), TEXTS),
        ),
        max_size=3,
    ),
)  # fmt: skip
def test_random_policies(desk: Place, name: str, options: list[tuple[str, str]]) -> None:
    text = f"{name}:{','.join(f'{key}={value}' for key, value in options)}"
    check_loads_or_refuses(desk.compare(f"--policy={text}"))
