"""Reading traces block by block: the same rows as in memory, every rule checked, nothing heavy loaded before that."""

import io
import itertools
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace, blocks
from perfmodel.routing.blocks import NO_EXPERT, TraceFile, open_trace

Array = np.ndarray[Any, Any]
TOKENS, LAYERS, TOP_K, EXPERTS = 23, 3, 2, 7


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than six rows are read piece by piece."""
    monkeypatch.setattr(blocks, "BLOCK_PICKS", 6 * LAYERS * TOP_K)


def canonical(**changes: Any) -> dict[str, Any]:
    """Arrays of a file with sequences of 1, 14, 5 and 3 rows, some picks of them unassigned."""
    rng = np.random.default_rng(0)
    ids = rng.random((TOKENS, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
    ids[rng.random(ids.shape) < 0.1] = 255
    arrays = {
        "topk_ids": ids,
        "topk_weights": rng.random(ids.shape).astype(np.float16),
        "sequence_offsets": np.array([0, 1, 15, 20, 23]),
        "prompt_len": np.array([0, 4, 5, 1]),
        "layer_index": np.array([1, 2, 5]),
        "num_experts": np.int64(EXPERTS),
        "metadata": np.array(json.dumps({"model": "toy", "source": "recorded"})),
        "labels": np.array(["a", "b", "c", "d"]),
    }
    return {key: value for key, value in {**arrays, **changes}.items() if value is not None}


def write(path: Path, *, stored: bool = False, **changes: Any) -> Path:
    """A canonical file."""
    (np.savez if stored else np.savez_compressed)(path, **canonical(**changes))
    return path


def joined(file: TraceFile) -> tuple[Array, Array | None]:
    """All rows of all blocks."""
    found = list(file.blocks(weights=True))
    weights = [one.weights for one in found if one.weights is not None]
    return np.concatenate([one.ids for one in found]), np.concatenate(weights) if weights else None


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i1", "<i4", ">i8"])
def test_rows_are_those_of_the_trace_in_memory(stored: bool, dtype: str, tmp_path: Path) -> None:
    ids = canonical()["topk_ids"].astype(dtype)
    ids[canonical()["topk_ids"] == 255] = -1 if np.dtype(dtype).kind == "i" else np.iinfo(dtype).max
    path = write(tmp_path / "t.npz", stored=stored, topk_ids=ids)
    file, trace = open_trace(path), RoutingTrace.load(path)
    assert (file.num_tokens, file.num_layers, file.num_sequences) == (TOKENS, LAYERS, 4)
    assert (file.top_k, file.num_experts, file.block_rows) == (TOP_K, EXPERTS, 6)
    assert (file.labels, file.metadata) == (trace.labels, trace.metadata)
    assert repr(file) == repr(trace).replace("RoutingTrace", "TraceFile")
    for name in ("sequence_offsets", "prompt_len", "layer_index", "sequence_lengths"):
        assert_array_equal(getattr(file, name), getattr(trace, name))
    for one in file, open_trace(trace):
        found, weights = joined(one)
        assert found.dtype == np.uint16
        assert_array_equal(np.where(found == NO_EXPERT, trace.unassigned, found), trace.topk_ids)
        assert weights is not None
        assert weights.dtype == np.float32
        assert_array_equal(weights, trace.topk_weights)
    assert all(one.weights is None for one in file.blocks())
    assert open_trace(file) is file


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_blocks_hold_whole_sequences_or_a_piece_of_one(lengths: list[int], rows: int) -> None:
    offsets = np.cumsum([0, *lengths])
    trace = RoutingTrace(
        topk_ids=np.zeros((offsets[-1], 1, 1), np.uint8),
        topk_weights=None,
        sequence_offsets=offsets,
        prompt_len=np.zeros(len(lengths), int),
        layer_index=np.arange(1),
        num_experts=1,
        metadata={"model": "toy", "source": "recorded"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ROWS", rows)
        found = list(open_trace(trace).blocks())
    at = 0
    for one in found:
        assert one.start == at
        assert 1 <= len(one.ids) <= rows
        at += len(one.ids)
        if one.last == one.first + 1 and lengths[one.first] > rows:
            # Pieces are cut at the same rows of a sequence, wherever it stands in the file.
            assert (one.start - offsets[one.first]) % rows == 0
            assert at == min(one.start + rows, offsets[one.last])
        else:
            assert (one.start, at) == (offsets[one.first], offsets[one.last])
    assert at == offsets[-1]
    # No two neighbours would have fitted into one block.
    for one, two in itertools.pairwise(found):
        if one.start == offsets[one.first] and two.start == offsets[two.first]:
            assert offsets[two.first + 1] - one.start > rows


def test_other_recordings_are_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fortran = np.asfortranarray(canonical()["topk_ids"])
    found, _ = joined(open_trace(write(tmp_path / "f.npz", topk_ids=fortran)))
    assert_array_equal(found == NO_EXPERT, canonical()["topk_ids"] == 255)
    path = tmp_path / "rows.npz"
    np.savez(
        path,
        topk_ids=canonical()["topk_ids"],
        seq_id=np.repeat([4, 5, 7, 8], [1, 14, 5, 3]),
        phase=np.ones(TOKENS, int),
        layer_index=np.arange(LAYERS),
    )
    assert open_trace(path).num_sequences == 4
    assert not open_trace(path).has_weights
    monkeypatch.undo()
    assert open_trace("tiny-mixtral-32l-mini").num_tokens == 2016


BAD_IDS, BAD_WEIGHTS = canonical()["topk_ids"].copy(), canonical()["topk_weights"].copy()
BAD_IDS[21, 1, 0] = 9
TWICE = canonical()["topk_ids"].copy()
TWICE[20, 2] = 3
BAD_WEIGHTS[19, 0, 1] = np.nan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_ids": BAD_IDS}, r"token 21, layer 2, pick 0 is expert 9, allowed are 0\.\.6"),
        ({"topk_ids": TWICE}, "token 20, layer 5 picks expert 3 twice"),
        ({"topk_ids": canonical()["topk_ids"].astype(float)}, "topk_ids has dtype float64, expected integers"),
        ({"topk_ids": canonical()["topk_ids"][0]}, "topk_ids has shape"),
        ({"topk_ids": canonical()["topk_ids"][:0]}, "expected at least one token"),
        ({"topk_weights": BAD_WEIGHTS}, "token 19, layer row 0, pick 1 is nan"),
        ({"topk_weights": BAD_WEIGHTS[1:]}, "topk_weights has shape"),
        ({"topk_weights": canonical()["topk_ids"]}, "topk_weights has dtype uint8"),
        ({"sequence_offsets": np.array([0, 15, 1, 20, 23])}, "sequence_offsets must increase"),
        ({"sequence_offsets": np.arange(40)}, "sequence_offsets has dtype int64 and shape .40,., too large for 23"),
        ({"prompt_len": np.array([0, 15, 5, 1])}, "prompt_len of sequence 1 is 15"),
        ({"prompt_len": np.zeros(2**20, np.uint8)}, "prompt_len has dtype uint8 and shape"),
        ({"layer_index": np.array([1, 1, 2])}, "layer_index must be"),
        ({"layer_index": np.arange(2)}, "layer_index has 2 entries"),
        ({"num_experts": np.int64(1)}, "num_experts is 1"),
        ({"num_experts": np.array([7, 8])}, "num_experts has dtype int64 and shape"),
        ({"metadata": np.array("{")}, "metadata is no JSON text"),
        ({"labels": np.array(["a"])}, "labels has 1 entries"),
        ({"metadata": None}, "needs"),
    ],
)
def test_what_a_trace_refuses_is_refused_with_the_files_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "bad.npz", **changes)
    with pytest.raises(TraceError, match=message) as caught:
        open_trace(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).count(str(path)) == 1
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("nothing")
    for path, message in (
        (tmp_path / "none.npz", "no such file"),
        (tmp_path / "text.npz", "cannot be read"),
        (tmp_path, "is a directory"),
        ("no-such-name", "no bundled trace is called"),
        (3, "expected the path"),
    ):
        with pytest.raises(TraceError, match=message):
            open_trace(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", [b"topk_ids.npy", b"topk_weights.npy"])
def test_rows_that_do_not_fit_their_check_sum(name: bytes, stored: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "t.npz", stored=stored)
    data = bytearray(path.read_bytes())
    # In the list of contents at the end, the check sum stands 30 bytes before the name.
    data[data.rindex(name) - 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match="Bad CRC-32"):
        open_trace(path)


def test_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, **canonical(topk_ids=None, topk_weights=None))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 3, 2)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("topk_ids.npy", header.getvalue() + b"\0" * 100)
    with pytest.raises(TraceError, match="declares shape"):
        open_trace(path)


def test_a_row_of_very_many_picks(tmp_path: Path) -> None:
    layers = blocks.MAX_ROW_PICKS + 1
    path = tmp_path / "t.npz"
    wide = np.zeros((1, layers, 1), np.uint8)
    changes = {"topk_ids": wide, "layer_index": np.arange(layers), "topk_weights": None, "labels": None}
    write(path, **changes, sequence_offsets=np.array([0, 1]), prompt_len=np.array([0]))
    with pytest.raises(TraceError, match="expected at most 262144 picks of a token"):
        open_trace(path)


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    file = open_trace(write(tmp_path / "t.npz"))
    write(tmp_path / "t.npz", labels=None)
    with pytest.raises(TraceError, match="was changed"):
        list(file.blocks())


def test_a_file_that_is_removed_meanwhile(tmp_path: Path) -> None:
    file = open_trace(write(tmp_path / "t.npz"))
    (tmp_path / "t.npz").unlink()
    with pytest.raises(TraceError, match=r"t\.npz: cannot be read any more \(No such file or directory\)$"):
        list(file.blocks())


def test_larger_files_than_a_trace_in_memory_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.npz")
    monkeypatch.setattr("perfmodel.routing.npz.MAX_BYTES", 500)
    with pytest.raises(TraceError, match="would expand"):
        RoutingTrace.load(path)
    assert open_trace(path).num_tokens == TOKENS
    monkeypatch.setattr("perfmodel.routing.npz.MAX_STREAMED_BYTES", 500)
    with pytest.raises(TraceError, match="would expand"):
        open_trace(path)


def test_bad_files_are_refused_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.npz", topk_ids=BAD_IDS)
    program = f"""
import sys
from perfmodel.errors import TraceError
from perfmodel.routing import blocks
from perfmodel.routing.statistics import survey
blocks.BLOCK_PICKS = 36
for bad in {str(path)!r}, {str(tmp_path / "none.npz")!r}:
    try:
        survey(bad)
    except TraceError:
        pass
    else:
        sys.exit("not refused")
sys.exit(" ".join({{"numba", "torch", "scipy", "matplotlib"}} & set(sys.modules)) or None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
