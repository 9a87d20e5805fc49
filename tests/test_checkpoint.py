"""Experts out of checkpoints: every layout and type, little read at a time, and damaged files refused."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    CONFIGS,
    EXPERTS,
    FUSED,
    HIDDEN,
    INNER,
    LAYERS,
    LAYOUTS,
    MIXTRAL,
    QWEN,
    Made,
    Stored,
    make,
    names,
    safetensors_bytes,
    stored,
    write,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.losses import shards
from perfmodel.losses.checkpoint import INDEX, SINGLE, Checkpoint

FLOATS = ("F16", "BF16", "F32", "F64")


def check_refused(folder: Any, *words: str, error: type[PerfModelError] = PerfModelError) -> None:
    with pytest.raises(error) as raised:
        Checkpoint(folder)
    check_message(raised.value, *words)


def check_message(error: Exception, *words: str) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message, message


def check_equal(found: Checkpoint, made: Made) -> None:
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for values, expected in zip(found.expert(layer, expert), made[1:4], strict=True):
                assert values.dtype == np.float64
                assert_array_equal(values, expected[layer, expert])


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    file.write_text(json.dumps(values), encoding="utf-8")


# --- what is read ---


@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(layout: str, dtype: str, shard_count: int, tmp_path: Path) -> None:
    made = make(tmp_path, layout, dtype, shard_count)
    found = Checkpoint(tmp_path)
    assert found.model.num_experts == EXPERTS
    check_equal(found, made)


def test_names_may_begin_otherwise_and_other_layers_do_not_matter(tmp_path: Path) -> None:
    made = make(tmp_path, QWEN)
    tensors = {name.replace("model.", "language_model.model.", 1): one for name, one in made.tensors.items()}
    beyond = names(QWEN, LAYERS, 0)[0]  # a layer that predicts further tokens is no part of the network
    write(tmp_path, {**tensors, beyond: stored(np.zeros((3, 3)), "F32")})
    check_equal(Checkpoint(tmp_path), made)


def test_links_are_followed(tmp_path: Path) -> None:
    made = make(tmp_path / "blobs", shards=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in made.folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    check_equal(Checkpoint(snapshot), made)
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    check_equal(Checkpoint(linked), made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_bytes_of_one_expert_are_read(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, layout, "BF16", shards=2)
    read = []
    plain = shards.Shard._bytes

    def counted(self: shards.Shard, start: int, stop: int) -> bytearray:
        read.append(stop - start)
        return plain(self, start, stop)

    monkeypatch.setattr(shards.Shard, "_bytes", counted)
    found = Checkpoint(tmp_path)
    assert read == []
    found.expert(1, 2)
    assert sum(read) == 3 * HIDDEN * INNER * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hashes_tell_weights_apart(layout: str, tmp_path: Path) -> None:
    def hashes() -> list[bytes]:
        weights = Checkpoint(tmp_path)
        found = [weights.expert_hash(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
        assert found[1] == weights.hashed_expert(0, 1)[1]
        return found

    made = make(tmp_path, layout)
    found = hashes()
    assert len(set(found)) == LAYERS * EXPERTS
    edit_config(tmp_path, rms_norm_eps=1e-3)
    write(tmp_path, dict(reversed(made.tensors.items())))
    assert hashes() == found  # neither the place nor the rest of the config counts
    name = [one for one in made.tensors if one.startswith("model.layers.0")][-1]  # a down matrix of the last expert
    data = bytearray(made.tensors[name].data)
    data[-1] ^= 1
    write(tmp_path, {**made.tensors, name: made.tensors[name]._replace(data=bytes(data))})
    assert [i for i, (one, two) in enumerate(zip(found, hashes(), strict=True)) if one != two] == [EXPERTS - 1]


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    make(tmp_path, "mixtral")
    monkeypatch.setattr("safetensors.safe_open", refuse)
    with pytest.raises(PerfModelError, match=r"model.safetensors: cannot be mapped .* 0\.0 GiB \(see ulimit -v\)"):
        Checkpoint(tmp_path)


# --- FP8 in blocks ---


def test_every_8_bit_float() -> None:
    # Sign, four bits of exponent with bias 7, three of fraction; the two codes of all ones are no numbers.
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        expected = np.nan if code & 127 == 127 else -size if code >> 7 else size
        assert_array_equal(shards._e4m3()[code], expected)
    assert np.nanmax(shards._e4m3()) == 448


def make_fp8(folder: Path, block: list[int] | None, scale: str = "F32") -> np.ndarray:
    """All weights 1.5 in 8 bits, with a scale of its own for every 8 x 8 block; the scales of one down matrix."""
    make(folder, QWEN)
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, (rows, columns) in zip(
                names(QWEN, layer, expert), [(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER)], strict=True
            ):
                tensors[name] = Stored("F8_E4M3", (rows, columns), bytes([0b0_0111_100] * (rows * columns)))
                scales = 2.0 ** np.arange(-(-rows // 8) * -(-columns // 8)).reshape(-(-rows // 8), -1)
                tensors[f"{name}_scale_inv"] = stored(scales, scale)
    write(folder, tensors)
    quantised = {"quant_method": "fp8", "weight_block_size": block}
    edit_config(folder, quantization_config=quantised)
    return scales


@pytest.mark.parametrize("scale", ["F32", "BF16"])
def test_blocks_of_8_bit_floats(scale: str, tmp_path: Path) -> None:
    scales = make_fp8(tmp_path, [8, 8], scale)
    down = Checkpoint(tmp_path).expert(0, 0).down
    assert down.shape == (HIDDEN, INNER)
    for row in range(HIDDEN):
        for column in range(INNER):
            assert down[row, column] == 1.5 * scales[row // 8, column // 8]


def test_8_bit_floats_without_blocks_or_scales_are_refused(tmp_path: Path) -> None:
    make_fp8(tmp_path, None)
    check_refused(tmp_path, "F8_E4M3", "weight_block_size")
    make_fp8(tmp_path, [4, 4])
    check_refused(tmp_path, "_scale_inv", "F32 [3, 2]", "[5, 3]")
    make_fp8(tmp_path, [8, 8], "F64")
    check_refused(tmp_path, "_scale_inv", "F64")


# --- configs ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ("model_type", "llama")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ({"hidden_act": None}, ("hidden_act", "None", "'silu'")),
        ({"hidden_size": 0}, ("hidden_size", "0")),
        ({"quantization_config": {"quant_method": "aqlm"}}, ("quant_method", "aqlm")),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
            ("quant_method", "awq", "fp8"),
        ),
        ({"num_local_experts": None}, ("num_local_experts",)),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path)
    edit_config(tmp_path, **changes)
    check_refused(tmp_path, "config.json", *words, error=ModelConfigError)


def test_gpt_oss_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path)
    edit_config(tmp_path, model_type="gpt_oss", layer_types=["full_attention"] * LAYERS, head_dim=6)
    check_refused(tmp_path, "gpt_oss", "clamped", "biases", "MXFP4", error=ModelConfigError)


def test_dense_models_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    dense = {key: value for key, value in CONFIGS[MIXTRAL].items() if "expert" not in key}
    (tmp_path / "config.json").write_text(json.dumps({**dense, "model_type": "llama"}), encoding="utf-8")
    check_refused(tmp_path, "config.json", "dense", error=ModelConfigError)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model_type": 3}'])
def test_damaged_configs_are_refused(content: bytes, tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    check_refused(tmp_path, "config.json", error=ModelConfigError)


# --- files ---


def test_folders_that_are_none(tmp_path: Path) -> None:
    check_refused(tmp_path / "absent", "absent", "no such folder")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    check_refused(tmp_path / "file", "is a file")
    for found in (None, 3, "", b"", "a\0b", "x" * 5000):
        check_refused(found, "checkpoint")
    (tmp_path / "empty").mkdir()
    check_refused(tmp_path / "empty", "config.json", "no such file")


def test_absent_weights(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / SINGLE).unlink()
    check_refused(tmp_path, SINGLE, INDEX)
    (tmp_path / SINGLE).symlink_to(tmp_path / "nowhere")
    check_refused(tmp_path, SINGLE, "leads nowhere")
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    check_refused(tmp_path, SINGLE, "not a regular file")


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    check_refused(tmp_path, "config.json", "not a regular file")


def test_missing_shard(tmp_path: Path) -> None:
    make(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    check_refused(tmp_path, "model-00002-of-00003.safetensors", "no such file", "not complete")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", ("JSON",)),
        ("[]", ("weight_map",)),
        ('{"weight_map": {}}', ("weight_map",)),
        ('{"weight_map": {"a": 3}}', ("'a'", "3")),
        ('{"weight_map": {"a": "../a.safetensors"}}', ("'../a.safetensors'", "same folder")),
        ('{"weight_map": {"a": "/etc/passwd"}}', ("/etc/passwd",)),
        ('{"weight_map": {"a": "a.safetensors"}}', ("no tensor of an expert", "w2.weight", "down_proj")),
    ],
)
def test_other_indices_are_refused(index: str, words: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(index, encoding="utf-8")
    check_refused(tmp_path, *words)


def test_index_that_names_an_absent_tensor_or_lacks_one(tmp_path: Path) -> None:
    made = make(tmp_path, shards=2)
    name = names(MIXTRAL, 1, 3)[1]
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    index["weight_map"][name] = other
    (tmp_path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    check_refused(tmp_path, other, name, "not in this file")
    del index["weight_map"][name]
    (tmp_path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    check_refused(tmp_path, name, "is missing")
    write(tmp_path, made.tensors, 1)  # one file for everything wins, as in Transformers
    check_equal(Checkpoint(tmp_path), made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_shapes_and_types(layout: str, tmp_path: Path) -> None:
    made = make(tmp_path, layout)
    name = list(made.tensors)[-1]
    right = list(made.tensors[name].shape)
    write(tmp_path, {**made.tensors, name: stored(np.zeros((3, HIDDEN)), "F32")})
    check_refused(tmp_path, name, f"[3, {HIDDEN}]", str(right))
    write(tmp_path, {**made.tensors, name: stored(np.zeros(right[::-1]), "F32")})
    check_refused(tmp_path, name, str(right[::-1]), str(right))
    whole = Stored("I8", tuple(right), bytes(int(np.prod(right))))
    write(tmp_path, {**made.tensors, name: whole})
    check_refused(tmp_path, name, "I8", "BF16")
    write(tmp_path, {**made.tensors, name: whole._replace(dtype="F8_E4M3")})
    check_refused(tmp_path, name, "F8_E4M3")


def test_two_sets_of_experts(tmp_path: Path) -> None:
    made = make(tmp_path, QWEN)
    write(tmp_path, {**made.tensors, **{f"mtp.{name}": one for name, one in made.tensors.items()}})
    check_refused(tmp_path, "several names", "mtp.")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(dtype: str, value: float, tmp_path: Path) -> None:
    made = make(tmp_path, dtype=dtype)
    name = names(MIXTRAL, 1, 2)[2]
    values = made.down[1, 2].copy()
    values[3, 4] = value
    write(tmp_path, {**made.tensors, name: stored(values, dtype)})
    found = Checkpoint(tmp_path)
    found.expert(1, 1)
    with pytest.raises(PerfModelError) as raised:
        found.expert(1, 2)
    check_message(raised.value, name, "[3, 4]", "finite", SINGLE)


# --- headers that lie ---


def _lying(made: Made) -> dict[str, bytes]:
    """Files whose header and contents contradict each other, by what is wrong."""
    whole = safetensors_bytes(made.tensors)
    length = struct.unpack("<Q", whole[:8])[0]
    first, second = list(made.tensors)[:2]
    size = len(made.tensors[first].data)

    def changed(**header: Any) -> bytes:
        return safetensors_bytes(made.tensors, **{first: header})

    return {
        "empty": b"",
        "short": whole[:5],
        "header longer than the file": struct.pack("<Q", len(whole)) + whole[8:],
        "huge header": struct.pack("<Q", 2**63 + 5) + whole[8:],
        "header cut": whole[: 8 + length // 2],
        "cut in the last tensor": whole[:-1],
        "cut to the header": whole[: 8 + length],
        "longer than its tensors": whole + b"\0",
        "no JSON": whole[:8] + b"x" + whole[9:],
        "offsets beyond the file": changed(data_offsets=[0, 2**40]),
        "negative offsets": changed(data_offsets=[-4, size]),
        "offsets backwards": changed(data_offsets=[size, 0]),
        "overlap": safetensors_bytes(made.tensors, **{second: {"data_offsets": [0, size]}}),
        "shape larger than the bytes": changed(shape=[2**20, HIDDEN]),
        "shape that wraps around": changed(shape=[2**62, 2**62]),
        "negative shape": changed(shape=[-32, HIDDEN]),
        "unknown type": changed(dtype="F128"),
        "another type": changed(dtype="F64"),
        "no shape": changed(shape=None),
    }


WRONG = (
    "empty", "short", "header longer than the file", "huge header", "header cut", "cut in the last tensor",
    "cut to the header", "longer than its tensors", "no JSON", "offsets beyond the file", "negative offsets",
    "offsets backwards", "overlap", "shape larger than the bytes", "shape that wraps around", "negative shape",
    "unknown type", "another type", "no shape",
)  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_lying_headers_are_refused(what: str, tmp_path: Path) -> None:
    made = make(tmp_path)
    wrong = _lying(made)
    assert set(wrong) == set(WRONG)
    (tmp_path / SINGLE).write_bytes(wrong[what])
    check_refused(tmp_path, SINGLE, "whole safetensors file")


def test_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    make(tmp_path)
    found = Checkpoint(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[: len(content) // 2])
    with pytest.raises(PerfModelError) as raised:
        found.expert(LAYERS - 1, EXPERTS - 1)
    check_message(raised.value, SINGLE, "shorter")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(PerfModelError) as raised:
        found.expert(0, 0)
    check_message(raised.value, SINGLE, "cannot be read")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("whole"), FUSED, "F16")


@given(data=st.data())
def test_changed_bytes_give_a_checkpoint_or_an_error(whole: Made, data: st.DataObject) -> None:
    content = bytearray(safetensors_bytes(whole.tensors))
    length = struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    (whole.folder / SINGLE).write_bytes(content)
    try:
        found = Checkpoint(whole.folder)
        values = found.expert(1, 3)
    except PerfModelError as error:
        check_message(error)
    else:
        assert values.down.shape == (HIDDEN, INNER)
