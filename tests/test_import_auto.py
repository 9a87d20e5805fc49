"""Which layout a file has, the options that each takes, the commands, and the bounded readers beneath them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import arrays, files, find_format, formats, import_files, recognise
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.options import options_of
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.profile import FrequencyProfile

NAMES = {
    "canonical", "row-phase", "vllm", "vllm-jsonl", "sglang", "sglang-stat", "sglang-response", "router-logits",
    "llamacpp-csv", "esft", "dynande", "router-trace-v2", "imatrix", "moe-infinity", "tensorrt-llm", "ktransformers",
    "popularity-rank",
}  # fmt: skip


def made(tokens: int = 9) -> RoutingTrace:
    """Two sequences of a small model."""
    ids = np.argsort(np.random.default_rng(0).random((tokens, 3, 6)), axis=2)[:, :, :2]
    return RoutingTrace(
        topk_ids=ids,
        topk_weights=None,
        sequence_offsets=np.array([0, 5, tokens]),
        prompt_len=np.array([3, 2]),
        layer_index=np.arange(3),
        num_experts=6,
        metadata={"model": "toy", "source": "recorded"},
    )


# ---- layouts ----


def test_every_layout_is_known_by_its_name() -> None:
    assert set(formats()) == NAMES
    for name, one in formats().items():
        assert one.name == name
        assert one.takes <= {"num_experts", "top_k", "prompt_len", "sequence_len", "layers", "family", "config"} | {
            "expert_map"
        }
    with pytest.raises(TraceError, match="did you mean vllm"):
        find_format("vlm")


def test_a_saved_trace_is_recognised_and_may_be_renamed(tmp_path: Path) -> None:
    made().save(tmp_path / "a.npz")
    assert list(recognise(tmp_path / "a.npz")) == ["canonical"]
    trace = import_files("auto", [tmp_path / "a.npz"], ImportOptions(model="other", num_experts=8)).result
    assert isinstance(trace, RoutingTrace)
    assert trace.metadata["model"] == "other"
    assert trace.num_experts == 8
    np.testing.assert_array_equal(trace.topk_ids, made().topk_ids)
    with pytest.raises(TraceError, match="a second file"):
        import_files("canonical", [tmp_path / "a.npz"] * 2)


def test_defects_are_told_and_mended_on_request(tmp_path: Path) -> None:
    trace = made(tokens=400).map_layers([0, 1, 0], [0, 1, 2])
    trace.save(tmp_path / "a.npz")
    found = import_files("canonical", [tmp_path / "a.npz"])
    assert [(one.defect, one.mended) for one in found.findings] == [("repeated-layers", False)]
    mended = import_files("canonical", [tmp_path / "a.npz"], ImportOptions(mend=frozenset({"repeated-layers"})))
    assert isinstance(mended.result, RoutingTrace)
    assert mended.result.num_layers == 2
    with pytest.raises(TraceError, match="did you mean looping"):
        import_files("canonical", [tmp_path / "a.npz"], ImportOptions(mend=frozenset({"loping"})))


def test_what_may_be_two_things_is_refused_with_both(tmp_path: Path) -> None:
    # A file with the arrays of two layouts.
    trace = made()
    trace.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as held:
        np.savez(tmp_path / "b.npz", **dict(held), trace_collection=np.ones((2, 3, 4)))
    assert set(recognise(tmp_path / "b.npz")) == {"canonical", "moe-infinity"}
    with pytest.raises(TraceError, match=r"may be of 2 formats.*canonical \(.*moe-infinity \("):
        import_files("auto", [tmp_path / "b.npz"])
    # Three picks of three experts, or counts: nothing tells them apart, and neither is taken.
    np.save(tmp_path / "a.npy", np.array([[[0, 1, 2], [1, 0, 2]], [[1, 2, 0], [0, 1, 2]]]))
    assert recognise(tmp_path / "a.npy") == {}
    with pytest.raises(TraceError, match=r"looks like vllm, but .*; or it looks like moe-infinity, but"):
        import_files("auto", [tmp_path / "a.npy"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x01\x02\x00", "is of no known format .a binary file"),
        ("a.txt", b"hello\n", "is of no known format .a text file"),
        ("a.json", b'{"a": 1}', "is of no known format .a json file"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2}\n', "is of no known format .a jsonl file"),
        ("a.pkl", b"\x80\x04K\x01.", "is of no known format .a pickle file"),
        ("a.json", b'{"a": 1, "a": 2}', "key 'a' occurs twice"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.json", b'{"a": "\xff"}', "is not UTF-8"),
        ("a.npy", b"\x93NUMPY\x01\x00", "cannot be read as a .npy file"),
        ("a.npz", b"PK\x03\x04", "cannot be read as an .npz file"),
        ("a.gguf", b"GGUF" + b"\xff" * 40, "a.gguf"),
        ("a", b"", "is empty"),
    ],
)
def test_what_is_nothing_known_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        import_files("auto", [tmp_path / name])
    assert "\n" not in str(caught.value)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no files to import"):
        import_files("auto", [])
    with pytest.raises(TraceError, match="expected the path of a file"):
        import_files("auto", [3])  # type: ignore[list-item]
    with pytest.raises(TraceError, match="no such file"):
        import_files("auto", [tmp_path / "none"])
    with pytest.raises(TraceError, match="expected ImportOptions"):
        import_files("auto", [tmp_path / "none"], {"model": "x"})  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="--prompt-len is 'x'"):
        import_files("auto", [tmp_path / "none"], ImportOptions(prompt_len="x"))  # type: ignore[arg-type]
    made().save(tmp_path / "a.npz")
    with pytest.raises(TraceError, match="--family, --prompt-len: has no meaning for the format canonical; allowed"):
        import_files("canonical", [tmp_path / "a.npz"], ImportOptions(family="x", prompt_len=(1,)))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is not a regular file"):
        import_files("auto", [tmp_path / "pipe"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match=r"is of no known format \(a folder"):
        import_files("auto", [tmp_path / "folder"])
    with pytest.raises(TraceError, match="is a folder"):
        import_files("vllm", [tmp_path / "folder"])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model": ""}, "--model is ''"),
        ({"model": 3}, "--model is 3"),
        ({"num_experts": 0}, "--num-experts is 0"),
        ({"top_k": True}, "--top-k is True"),
        ({"top_k": 10**40}, "--top-k is a number of more than 30 digits"),
        ({"prompt_len": -1}, "--prompt-len is -1"),
        ({"prompt_len": "3"}, "--prompt-len is '3'"),
        ({"prompt_len": []}, "--prompt-len has 0 numbers"),
        ({"prompt_len": 2**40}, "--prompt-len is 1099511627776"),
        ({"sequence_len": [3, 0]}, "--sequence-len is 0"),
        ({"layers": [3, 3]}, "expected layers that increase"),
        ({"config": 3}, "--config is 3"),
        ({"mend": ["x"]}, "no defect is called 'x'"),
        ({"speed": 1}, "no import option is called 'speed'"),
    ],
)
def test_options_are_checked(said: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        options_of(said)


def test_options_that_are_not_said() -> None:
    assert options_of({"model": None, "top_k": None}).given() == frozenset()
    assert options_of({"prompt_len": np.array([1, 2])}).prompt_len == (1, 2)


# ---- commands ----


def test_import_prints_what_it_found_and_writes_it(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(1).random((8, 4, 6)), axis=2)[:, :, :2]
    ids[:, 0] = 0
    np.save(tmp_path / "r.npy", ids)
    out = tmp_path / "out.npz"
    given_options = ("--prompt-len", "5,1", "--sequence-len", "6,2", "--layers", "0-2,5", "--num-experts", "6")
    answer = commands.run("trace", "import", "vllm", tmp_path / "r.npy", "-o", out, *given_options)
    assert answer.code == 0, answer.err
    assert "2 sequences: 6 prefill and 2 decode rows" in answer.out
    assert "3 layers (1-2, 5), top-2 of 6 experts" in answer.out
    assert "padding: layers without a pick" in answer.out
    trace = RoutingTrace.load(out)
    np.testing.assert_array_equal(trace.topk_ids, ids[:, 1:])
    commands.check_refusal(commands.run("trace", "import", "vllm", tmp_path / "r.npy", "-o", out), "--overwrite")
    (tmp_path / "lengths").write_text("5\n1\n")
    answer = commands.run(
        "trace", "import", "vllm", tmp_path / "r.npy", "-o", out, "--overwrite", "--json", "--model", "toy",
        "--prompt-len", tmp_path / "lengths", "--sequence-len", "6,2",
    )  # fmt: skip
    found = answer.document
    assert (found["kind"], found["sequences"], found["prefill_tokens"]) == ("trace", 2, 6)
    assert found["metadata"]["model"] == "toy"
    assert found["findings"][0]["defect"] == "padding"
    assert RoutingTrace.load(out).prompt_len.tolist() == [5, 1]


def test_counts_become_a_profile(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"logical_count": [[[1, 2, 3], [3, 2, 1]]]}))
    out = tmp_path / "out.npz"
    answer = commands.run("trace", "import", "auto", tmp_path / "c.json", "-o", out, "--top-k", 2)
    assert "frequency profile" in answer.out
    assert "cannot be replayed" in answer.out
    np.testing.assert_array_equal(FrequencyProfile.load(out).counts, [[1, 2, 3], [3, 2, 1]])
    answer = commands.run("trace", "import", "auto", tmp_path / "c.json", "-o", out, "--overwrite", "--json")
    assert (answer.document["kind"], answer.document["scale"]) == ("profile", "counts")
    refused = commands.run(
        "trace", "import", "auto", tmp_path / "c.json", "-o", tmp_path / "m.npz", "--mend", "looping"
    )
    commands.check_refusal(refused, "counts have no rows to mend")
    assert not (tmp_path / "m.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("auto", "r.npy"), ("-o",)),
        (("vlm", "r.npy", "-o", "o.npz"), ("did you mean vllm",)),
        (("vllm", "none.npy", "-o", "o.npz"), ("none.npy", "no such file")),
        (("vllm", "r.npy", "-o", "o.txt"), ("o.txt",)),
        (("vllm", "r.npy", "-o", "o.npz"), ("r.npy", "--prompt-len")),
        (
            ("vllm", "r.npy", "-o", "o.npz", "--prompt-len", "x"),
            ("--prompt-len: 'x': no such file", "or a file of them"),
        ),
        (("vllm", "r.npy", "-o", "o.npz", "--prompt-len", "1,,2"), ("--prompt-len",)),
        (("vllm", "r.npy", "-o", "o.npz", "--prompt-len", "bad.txt"), ("--prompt-len: bad.txt: line 1", "x")),
        (("vllm", "r.npy", "-o", "o.npz", "--prompt-len", "9" * 30), ("--prompt-len",)),
        (("vllm", "r.npy", "-o", "o.npz", "--layers", "0-2000000000"), ("--layers", "1,000,000")),
        (("vllm", "r.npy", "-o", "o.npz", "--layers", "3-1"), ("--layers: the range 3-1 falls",)),
        (("vllm", "r.npy", "-o", "o.npz", "--num-experts", "x"), ("--num-experts is 'x'", "1..65535")),
        (("vllm", "r.npy", "-o", "o.npz", "--num-experts", "0"), ("--num-experts is '0'", "1..65535")),
        (("vllm", "r.npy", "-o", "o.npz", "--num-experts", "2,3"), ("--num-experts", "allowed one")),
        (("vllm", "r.npy", "-o", "o.npz", "--family", "mixtral"), ("--family", "no meaning")),
        (("vllm", "r.npy", "-o", "o.npz", "--mend", "x"), ("--mend", "'x'")),
        (("auto", "folder", "-o", "o.npz"), ("folder", "no known format")),
    ],
)
def test_bad_commands_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.txt").write_text("1 x\n")
    np.save("r.npy", np.argsort(np.random.default_rng(1).random((8, 4, 6)), axis=2)[:, :, :2])
    commands.check_refusal(commands.run("trace", "import", *arguments), *words)
    assert not (tmp_path / "o.npz").exists()


def test_options_are_named_as_they_are_said(tmp_path: Path) -> None:
    """By keywords where Python says them; a path that looks like an option stays."""
    folder = tmp_path / "--layers"
    folder.mkdir()
    np.save(folder / "r.npy", np.argsort(np.random.default_rng(1).random((8, 4, 6)), axis=2)[:, :, :2])
    with pytest.raises(TraceError, match=r"/--layers/r\.npy: does not say which rows are prefill; prompt_len says it"):
        RoutingTrace.from_vllm(folder / "r.npy")
    with pytest.raises(TraceError, match=r"^layers is 'x', expected"):
        FrequencyProfile.from_ktransformers(np.ones((2, 2)), layers="x")
    with pytest.raises(TraceError, match="; --prompt-len says it"):
        import_files("vllm", [folder / "r.npy"])


def test_import_says_what_was_not_there_to_mend(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", np.argsort(np.random.default_rng(1).random((8, 4, 6)), axis=2)[:, :, :2])
    words = ("trace", "import", "vllm", tmp_path / "r.npy", "-o", tmp_path / "o.npz", "--prompt-len", "4")
    answer = commands.run(*words, "--mend", "physical-ids,missing-phase", "--json")
    assert answer.code == 0
    assert answer.err.startswith("nothing to mend: no missing-phase, physical-ids found\n")


def test_formats_are_listed() -> None:
    text = commands.run("trace", "formats").out
    assert all(f"  {name}: " in text for name in NAMES)
    found = commands.run("trace", "formats", "--json").document
    assert {one["name"] for one in found} == NAMES
    assert next(one for one in found if one["name"] == "vllm")["options"] == [
        "--layers",
        "--num-experts",
        "--prompt-len",
        "--sequence-len",
    ]


def test_recordings_that_others_published(shared: Path) -> None:
    expected = {
        "deepseek-v2-lite/esft_law.npz": ("row-phase", (26, 64, 6)),
        "gpt-oss-20b/gptoss20b_decode.npz": ("row-phase", (24, 32, 4)),
        "mixtral-counts/mixtral-8x7b-popularity-rank.csv": ("popularity-rank", (32, 8, None)),
    }
    for name, (layout, shape) in expected.items():
        assert list(recognise(shared / "traces" / name)) == [layout]
        result = import_files("auto", [shared / "traces" / name]).result
        assert (result.num_layers, result.num_experts, result.top_k) == shape


def test_looking_at_files_imports_neither_numba_nor_torch(tmp_path: Path) -> None:
    made().save(tmp_path / "a.npz")
    script = (
        "import sys; from perfmodel.routing.importers import import_files, formats; formats();"
        f"import_files('auto', [{str(tmp_path / 'a.npz')!r}]);"
        "print(sorted({'numba', 'torch', 'scipy', 'pandas', 'pydantic'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# ---- bounded readers ----


def test_lines_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert list(files.read_lines(file)) == [(1, "one"), (2, "two")]
    file.write_bytes(b"x" * 11 + b"\n")
    with pytest.raises(TraceError, match="line 1 is longer than 10 bytes"):
        list(files.read_lines(file, longest=10))
    file.write_bytes(b"ok\n\xff\n")
    with pytest.raises(TraceError, match="line 2, byte 0 is not UTF-8"):
        list(files.read_lines(file))
    with pytest.raises(TraceError, match="w: 4 columns; allowed: at most 3"):
        files.columns("a,b,c,d", ",", "w", 3)


@pytest.mark.parametrize("text", ["1e400", "nan", "inf", "1_000", "", "0x10", "१", "1" * 500, "--1"])
def test_what_is_no_number_in_text(text: str) -> None:
    with pytest.raises(TraceError, match="expected a finite number"):
        files.real(text, "w")
    with pytest.raises(TraceError, match="expected an integer"):
        files.integer(text, "w")


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**31 - 1))
def test_numbers_in_text_come_back(value: float, count: int) -> None:
    assert files.real(repr(value), "w") == value
    assert files.integer(str(count), "w") == count


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)  # fmt: skip
def test_json_comes_back(value: Any) -> None:
    assert files.parse_json(json.dumps(value), "w") == value
    assert files.parse_json(json.dumps(value).encode(), "w") == value


def test_tensors_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    stored = {name: rng.integers(0, 2, (2, 3)).astype(name) for name in kinds}
    save_file(stored, tmp_path / "a.safetensors", metadata={"k": "v"})
    probe = Probe.of(tmp_path / "a.safetensors")
    assert probe.kind == "safetensors"
    for name, array in arrays.read_safetensors(tmp_path / "a.safetensors").items():
        np.testing.assert_array_equal(array, stored[name])
        assert probe.shapes[name][0] == (2, 3)
    assert arrays.safetensors_note(tmp_path / "a.safetensors") == {"k": "v"}


def tensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            tensors({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}, b"1234"),
            "has 4 bytes, which is not",
        ),
        (tensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12"), "its tensors end at byte"),
        (tensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"), "starts at byte"),
        (tensors({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), "sizes and offsets >= 0"),
        (tensors({"a": 3}), "expected dtype, shape and data_offsets"),
        (tensors([]), "its header is no object"),
        (tensors(b"{" * 50), "is no JSON"),
        ((2**40).to_bytes(8, "little") + b"{}", "is no safetensors file"),
    ],
)
def test_broken_tensors_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        arrays.safetensors_declared(tmp_path / "a.safetensors")


def test_a_declared_shape_must_be_there(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3), np.int32))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(content.replace(b"(2, 3)", b"(2, 9)"))
    with pytest.raises(TraceError, match=r"declares shape \(2, 9\) \(72 bytes\) but holds 24 bytes"):
        arrays.read_npy(tmp_path / "b.npy")
    np.save(tmp_path / "big.npy", np.arange(6, dtype=">i4").reshape(2, 3).T)
    np.testing.assert_array_equal(arrays.read_npy(tmp_path / "big.npy"), np.arange(6).reshape(2, 3).T)


# ---- what is nearly of a format ----


def test_what_keeps_a_file_from_being_recognised_is_said(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(0).random((12, 3, 8)), axis=2)[:, :, :4]
    twice, far = ids.copy(), ids.copy()
    twice[5, 1, 1] = twice[5, 1, 0]
    far[2, 0, 0] = 2**30
    counts = np.random.default_rng(0).multinomial(60, np.ones(8) / 8, size=(5, 3)).astype(float)
    damaged, negative = counts.copy(), counts.copy()
    damaged[0, 1, 2], negative[0, 1, 2] = np.nan, -1
    for array, message in (
        (twice, r"looks like vllm, but token 5, layer row 1 picks expert \d twice$"),
        (ids.astype(np.float32), "looks like vllm, but has dtype float32, expected integers"),
        (far, "looks like vllm, but holds 0 to 1073741824, expected experts"),
        (ids[:, 0], r"looks like vllm, but has shape \(12, 4\), expected \[tokens, layers, picks\]"),
        (damaged, r"looks like moe-infinity, but \[0, 1, 2\] is nan, expected whole numbers >= 0"),
        (negative, r"looks like moe-infinity, but \[0, 1, 2\] is -1.0, expected whole numbers >= 0"),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(TraceError, match=rf"a\.npy: is of no known format.*{message}"):
            import_files("auto", [tmp_path / "a.npy"])
    for document in ({"routed_experts": None, "prompt_len": 1}, [{"routed_experts": None}]):
        (tmp_path / "a.json").write_text(json.dumps(document))
        with pytest.raises(TraceError, match="request 0 is an object with routed_experts"):
            import_files("auto", [tmp_path / "a.json"])


def test_a_profile_is_none_already(tmp_path: Path) -> None:
    FrequencyProfile.from_ktransformers([[3, 1, 2], [1, 1, 4]]).save(tmp_path / "p.npz")
    with pytest.raises(TraceError, match=r"is a frequency profile already, .*static:profile=FILE, trace synth"):
        import_files("auto", [tmp_path / "p.npz"])


def test_what_is_done_about_a_finding_reads_on_after_would(tmp_path: Path) -> None:
    table = np.array([[0, 0, 0], [3, 1, 2], [2, 2, 2]])
    np.save(tmp_path / "a.npy", table)
    (finding,) = import_files("ktransformers", [tmp_path / "a.npy"]).findings
    assert finding.mend == "leave them out, for they hold no routing"


def test_one_sequence_is_one(tmp_path: Path) -> None:
    made().sequences([0]).save(tmp_path / "a.npz")
    out = commands.run("trace", "import", "auto", tmp_path / "a.npz", "-o", tmp_path / "b.npz").out
    assert "1 sequence: 3 prefill" in out


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.95])
def test_a_cut_file_of_tensors_is_called_one(tmp_path: Path, keep: float) -> None:
    import io
    import zipfile

    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02]q\x00." + bytes(2000))
        archive.writestr("archive/version", b"3\n")
    (tmp_path / "a.pt").write_bytes(whole.getvalue()[: int(keep * len(whole.getvalue()))])
    with pytest.raises(TraceError, match=r"a\.pt: cannot be read as a \.pt file"):
        import_files("auto", [tmp_path / "a.pt"])
