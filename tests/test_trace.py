"""The routing trace: its rules, its file, and how it is replayed."""

import contextlib
import copy
import json
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing import Replay, RoutingTrace
from perfmodel.routing.npz import npz_keys, read_npz
from perfmodel.routing.trace import bundled_traces

MINI = "tiny-mixtral-32l-mini"


class Model(NamedTuple):
    name: str = "other-model"
    num_experts: int = 8
    top_k: int = 2


def parts(**changes: Any) -> dict[str, Any]:
    """Arguments of a correct trace: 2 sequences (2 + 1 and 0 + 3 tokens), 2 layers, 4 experts, top-2."""
    ids = [
        [[0, 1], [2, 3]],
        [[1, 0], [3, 2]],
        [[2, 1], [0, 3]],
        [[3, 0], [1, 2]],
        [[0, 2], [1, 3]],
        [[1, 2], [2, 0]],
    ]
    fields = {
        "topk_ids": np.array(ids, dtype=np.uint8),
        "topk_weights": np.full((6, 2, 2), 0.5, dtype=np.float32),
        "sequence_offsets": np.array([0, 3, 6]),
        "prompt_len": np.array([2, 0]),
        "layer_index": np.array([1, 3]),
        "num_experts": 4,
        "metadata": {"model": "toy", "source": "recorded"},
        "labels": ("a", "b"),
    }
    return {**fields, **changes}


def make(**changes: Any) -> RoutingTrace:
    return RoutingTrace(**parts(**changes))


def same(a: RoutingTrace, b: RoutingTrace) -> bool:
    return a.content_hash() == b.content_hash()


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    """Any small trace: ragged sequences, unassigned picks, with and without weights and labels."""
    top_k = draw(st.integers(1, 3))
    experts = draw(st.integers(top_k, 6) | st.sampled_from([255, 256, 300]))
    layers = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.random((sum(lengths), layers, experts))
    ids = np.argsort(scores, axis=-1)[..., :top_k]
    if draw(st.booleans()):
        ids[rng.random(ids.shape) < 0.3] = -1
    weights = rng.random(ids.shape) if draw(st.booleans()) else None
    return RoutingTrace(
        topk_ids=ids,  # type: ignore[arg-type]
        topk_weights=weights,  # type: ignore[arg-type]
        sequence_offsets=np.cumsum([0, *lengths]),
        prompt_len=np.array([draw(st.integers(0, length)) for length in lengths]),
        layer_index=np.cumsum(1 + rng.integers(0, 3, layers)) - 1,
        num_experts=experts,
        metadata={"model": "toy", "source": "recorded", "free": [1, None, {"x": 0.5}]},
        labels=tuple(f"s{i}" for i in range(len(lengths))) if draw(st.booleans()) else None,
    )


# ---- construction ----


def test_shape_and_phases() -> None:
    trace = make()
    assert (trace.num_tokens, trace.num_layers, trace.num_sequences, trace.top_k) == (6, 2, 2, 2)
    assert trace.topk_ids.dtype == np.uint8
    assert trace.unassigned == 255
    np.testing.assert_array_equal(trace.phase("prefill"), [True, True, False, False, False, False])
    np.testing.assert_array_equal(trace.phase("decode"), ~trace.phase("prefill"))
    assert trace.prefill_slice(0) == slice(0, 2)
    assert trace.decode_slice(0) == slice(2, 3)
    assert trace.prefill_slice(1) == slice(3, 3)
    assert trace.decode_slice(1) == slice(3, 6)
    assert not trace.has_prefill
    assert trace.has_decode
    assert "toy" in repr(trace)
    assert "top-2 of 4" in repr(trace)
    with pytest.raises(TraceError, match="unknown phase"):
        trace.phase("both")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="sequence is 2"):
        trace.decode_slice(2)


@given(traces())
def test_phase_masks_agree_with_slices(trace: RoutingTrace) -> None:
    prefill = np.zeros(trace.num_tokens, dtype=bool)
    decode = prefill.copy()
    for s in range(trace.num_sequences):
        prefill[trace.prefill_slice(s)] = True
        decode[trace.decode_slice(s)] = True
    np.testing.assert_array_equal(trace.phase("prefill"), prefill)
    np.testing.assert_array_equal(trace.phase("decode"), decode)


def test_arrays_are_read_only_copies() -> None:
    fields = parts()
    trace = RoutingTrace(**fields)
    fields["topk_ids"][0, 0, 0] = 3
    fields["metadata"]["model"] = "changed"
    assert trace.topk_ids[0, 0, 0] == 0
    assert trace.metadata["model"] == "toy"
    for other in (trace, pickle.loads(pickle.dumps(trace)), copy.deepcopy(trace)):
        assert same(trace, other)
        for name in ("topk_ids", "topk_weights", "sequence_offsets", "prompt_len", "layer_index"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(other, name)[...] = 0
    with pytest.raises(AttributeError):
        trace.num_experts = 5  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64, np.uint8, np.uint16, np.uint64, ">i4"])
def test_integer_dtypes_are_normalised(dtype: Any) -> None:
    ids = parts()["topk_ids"].astype(dtype)
    mark = -1 if ids.dtype.kind == "i" else np.iinfo(ids.dtype).max
    ids[0, 0, 1] = ids[0, 0, 0] = mark  # unassigned twice is no repeated expert
    trace = make(topk_ids=ids)
    assert trace.topk_ids.dtype == np.uint8
    np.testing.assert_array_equal(trace.topk_ids[0, 0], [255, 255])
    np.testing.assert_array_equal(trace.topk_ids[1:], parts()["topk_ids"][1:])
    assert trace.topk_weights is not None
    np.testing.assert_array_equal(trace.topk_weights[0, 0], [0, 0])


def test_many_experts_take_two_bytes() -> None:
    wide = make(topk_ids=parts()["topk_ids"].astype(np.int64) + 500, num_experts=65535)
    assert wide.topk_ids.dtype == np.uint16
    assert make(num_experts=255).topk_ids.dtype == np.uint8
    assert make(num_experts=256).topk_ids.dtype == np.uint16
    ids = parts()["topk_ids"].copy()
    ids[0, 0, 0] = 255
    assert make(topk_ids=ids, num_experts=255).topk_ids[0, 0, 0] == 255
    with pytest.raises(TraceError, match="255 means unassigned"):
        make(topk_ids=ids, num_experts=256)


def _with(name: str, index: Any, value: Any) -> np.ndarray:
    array = np.array(parts()[name])
    array = array.astype(np.int64) if array.dtype.kind in "iu" else array
    array[index] = value
    return array


nan, inf = math.nan, math.inf
DEEP: list[Any] = []
for _ in range(50_000):  # deeper than any supported Python can print
    DEEP = [DEEP]

BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"topk_ids": _with("topk_ids", (4, 1, 0), 4)},
        r"token 4, layer 3, pick 0 is expert 4, allowed are 0\.\.3",
    ),
    ({"topk_ids": _with("topk_ids", (0, 0, 0), -2)}, "expert -2"),
    ({"topk_ids": _with("topk_ids", (5, 0, 1), 1)}, "token 5, layer 1 picks expert 1 twice"),
    ({"topk_ids": parts()["topk_ids"].astype(float)}, "topk_ids has dtype float64"),
    ({"topk_ids": parts()["topk_ids"] > 0}, "topk_ids has dtype bool"),
    ({"topk_ids": parts()["topk_ids"].astype(object)}, "topk_ids has dtype object"),
    ({"topk_ids": parts()["topk_ids"].astype(str)}, "topk_ids has dtype <U3"),
    ({"topk_ids": parts()["topk_ids"][0]}, "expected 3 axes"),
    ({"topk_ids": parts()["topk_ids"][:0]}, "at least one token"),
    ({"topk_ids": np.zeros((6, 0, 2), np.uint8)}, "at least one token"),
    ({"topk_ids": np.zeros((6, 2, 0), np.uint8)}, "at least one token"),
    ({"topk_ids": [[[1], [2, 3]]]}, "topk_ids is no array"),
    ({"topk_ids": None}, "topk_ids has dtype object"),
    ({"topk_weights": _with("topk_weights", (1, 1, 1), nan)}, "token 1, layer row 1, pick 1 is nan"),
    ({"topk_weights": _with("topk_weights", (2, 0, 1), inf)}, "is inf"),
    ({"topk_weights": _with("topk_weights", (2, 0, 1), -inf)}, "is -inf"),
    ({"topk_weights": _with("topk_weights", (2, 0, 1), -0.25)}, "is -0.25"),
    ({"topk_weights": np.full((6, 2, 2), 1e300)}, "1e[+]300"),
    ({"topk_weights": np.ones((6, 2, 2), int)}, "topk_weights has dtype int64"),
    ({"topk_weights": np.ones((6, 2, 1))}, "topk_weights has shape"),
    ({"topk_weights": [[1.0], [2.0, 3.0]]}, "topk_weights is no array"),
    ({"sequence_offsets": [0, 4, 3, 6], "prompt_len": [0, 0, 0], "labels": None}, "must increase"),
    ({"sequence_offsets": [0, 3, 3, 6], "prompt_len": [0, 0, 0], "labels": None}, "must increase"),
    ({"sequence_offsets": [0, 3]}, "from 0 to the 6 tokens"),
    ({"sequence_offsets": [1, 3, 6]}, "from 0 to the 6 tokens"),
    ({"sequence_offsets": [0, 3, 7]}, "from 0 to the 6 tokens"),
    ({"sequence_offsets": [0]}, "from 0 to the 6 tokens"),
    ({"sequence_offsets": []}, "sequence_offsets has dtype float64"),
    ({"sequence_offsets": np.array([0, 2**64 - 1, 6], np.uint64)}, "too large"),
    ({"sequence_offsets": [0, 10**30, 6]}, "sequence_offsets has dtype object"),
    ({"sequence_offsets": [[0, 6]]}, "expected 1 axes"),
    ({"sequence_offsets": [0.0, 3.0, 6.0]}, "dtype float64"),
    ({"prompt_len": [4, 0]}, r"prompt_len of sequence 0 is 4, allowed are 0\.\.3"),
    ({"prompt_len": [2, -1]}, "prompt_len of sequence 1 is -1"),
    ({"prompt_len": [2]}, "prompt_len has 1 entries, expected 2"),
    ({"prompt_len": [True, False]}, "prompt_len has dtype bool"),
    ({"layer_index": [3, 1]}, "layer_index must be >= 0 and increase"),
    ({"layer_index": [1, 1]}, "layer_index must be >= 0 and increase"),
    ({"layer_index": [-1, 1]}, "layer_index must be >= 0 and increase"),
    ({"layer_index": [1]}, "layer_index has 1 entries, expected 2"),
    ({"num_experts": 3}, "is expert 3, allowed are 0..2"),
    ({"num_experts": 1}, r"num_experts is 1, expected an integer in 2\.\."),
    ({"num_experts": 0}, "num_experts is 0"),
    ({"num_experts": -8}, "num_experts is -8"),
    ({"num_experts": 65536}, "num_experts is 65536"),
    ({"num_experts": 10**5000}, "more than 30 digits"),
    ({"num_experts": True}, "num_experts is True"),
    ({"num_experts": np.True_}, "num_experts is True"),
    ({"num_experts": 8.0}, "num_experts is 8.0"),
    ({"num_experts": nan}, "num_experts is nan"),
    ({"num_experts": "8"}, "num_experts is '8'"),
    ({"num_experts": None}, "num_experts is None"),
    ({"metadata": None}, "metadata is None"),
    ({"metadata": "recorded"}, "metadata is 'recorded'"),
    ({"metadata": DEEP}, "too large to print"),
    ({"metadata": {1: 2}}, "text keys"),
    ({"metadata": {"source": "recorded"}}, "metadata lacks 'model'"),
    ({"metadata": {"model": "toy"}}, "metadata lacks 'source'"),
    ({"metadata": {"model": "toy", "source": "guessed"}}, "allowed are recorded, synthetic, from-counts"),
    ({"metadata": {"model": "", "source": "recorded"}}, "metadata.model is ''"),
    ({"metadata": {"model": "two\nlines", "source": "recorded"}}, "metadata.model"),
    ({"metadata": {"model": "x" * 201, "source": "recorded"}}, "at most 200"),
    ({"metadata": {"model": 7, "source": "recorded"}}, "metadata.model is 7"),
    ({"metadata": {"model": "toy", "source": ["recorded"]}}, "metadata.source"),
    ({"metadata": {"model": "toy", "source": "recorded", "date": 2026}}, "metadata.date is 2026"),
    ({"metadata": {"model": "toy", "source": "recorded", "x": nan}}, "plain JSON"),
    ({"metadata": {"model": "toy", "source": "recorded", "x": {1, 2}}}, "plain JSON"),
    ({"metadata": {"model": "toy", "source": "recorded", "x": DEEP}}, "plain JSON"),
    ({"metadata": {"model": "toy", "source": "recorded", "format": "other/9"}}, "metadata.format"),
    ({"labels": ("a",)}, "labels has 1 entries"),
    ({"labels": "ab"}, "labels is 'ab'"),
    ({"labels": ("a", 3)}, "labels is"),
    ({"labels": ("a", "b\0")}, "labels is"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BROKEN, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(BROKEN)]
)
def test_broken_traces_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


@given(traces(), st.data())
def test_any_single_bad_pick_is_found(trace: RoutingTrace, data: st.DataObject) -> None:
    ids = trace.topk_ids.astype(np.int64)
    ids[ids == trace.unassigned] = -1
    at = tuple(data.draw(st.integers(0, n - 1)) for n in ids.shape)
    ids[at] = data.draw(st.integers(trace.num_experts, 2**62) | st.integers(-(2**62), -2))
    with pytest.raises(TraceError, match=f"token {at[0]}, layer {trace.layer_index[at[1]]}, pick {at[2]} is"):
        trace._with(topk_ids=ids)


# ---- files ----


@given(trace=traces())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_saved_traces_load_unchanged(trace: RoutingTrace, tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    trace.save(file)
    loaded = RoutingTrace.load(file)
    assert same(trace, loaded)
    assert loaded.metadata == trace.metadata
    assert loaded.labels == trace.labels
    first = file.read_bytes()
    RoutingTrace.load(str(file)).save(file)
    assert file.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["trace.npz"]


def test_hash_sees_every_field() -> None:
    changed = [
        make(),
        make(topk_ids=_with("topk_ids", 0, [[1, 0], [2, 3]])),
        make(topk_weights=_with("topk_weights", (0, 0, 0), 0.25)),
        make(topk_weights=None),
        make(sequence_offsets=[0, 2, 6]),
        make(prompt_len=[2, 1]),
        make(layer_index=[0, 1]),
        make(num_experts=5),
        make(metadata={"model": "toy2", "source": "recorded"}),
        make(labels=None),
    ]
    assert len({trace.content_hash() for trace in changed}) == len(changed)


def test_half_precision_is_used_only_when_exact(tmp_path: Path) -> None:
    for weight, dtype in ((0.5, np.float16), (0.1, np.float32), (1e30, np.float32)):
        make(topk_weights=np.full((6, 2, 2), weight)).save(tmp_path / "t.npz")
        assert read_npz(tmp_path / "t.npz", ["topk_weights"])["topk_weights"].dtype == dtype


def test_bundled_recording() -> None:
    assert MINI in bundled_traces()
    trace = RoutingTrace.load(MINI)
    assert (trace.num_sequences, trace.num_tokens, trace.num_layers) == (6, 2016, 32)
    assert (trace.num_experts, trace.top_k) == (8, 2)
    assert trace.metadata["source"] == "recorded"
    assert trace.labels == ("python", "english", "html", "json", "intl", "c")
    assert trace.has_prefill
    assert trace.has_decode
    assert trace.topk_weights is not None
    assert trace.topk_weights.dtype == np.float32
    np.testing.assert_array_equal(trace.topk_weights.sum(-1), np.ones((2016, 32)))
    np.testing.assert_array_equal(trace.prompt_len, [128, 96, 128, 64, 64, 192])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-mixtral-32l-min", "did you mean tiny-mixtral-32l-mini"),
        ("", "no bundled trace"),
        ("tiny-mixtral-32l-losses", "no bundled trace"),
        ("no/such/file.npz", "no such file"),
        ("nothing.npz", "no such file"),
        ("a\0b.npz", "no such file|cannot be read"),
        ("a\nb.npz", "a b.npz"),
        ("x" * 5000 + ".npz", r"\.\.\."),
        (None, "expected the path"),
        (3, "expected the path"),
        (b"trace.npz", "expected the path"),
    ],
)
def test_missing_files_and_names(name: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        RoutingTrace.load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["trace.txt", "trace", 3, None, b"trace.npz"])
def test_save_needs_a_proper_name(path: Any) -> None:
    with pytest.raises(TraceError, match=r"ends in \.npz"):
        make().save(path)


def test_save_to_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TraceError, match="cannot be written"):
        make().save(tmp_path / "file" / "t.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        make().save(tmp_path / "folder.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.npz"]


def canonical(**changes: Any) -> dict[str, Any]:
    arrays = parts(metadata=json.dumps({"model": "toy", "source": "recorded"}), labels=np.array(["a", "b"]))
    return {key: np.asarray(value) for key, value in {**arrays, **changes}.items() if value is not None}


def test_unknown_arrays_are_ignored_even_if_pickled(tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    np.savez(file, **canonical(extra=np.arange(3), pickled=np.array([{}], dtype=object)))
    assert RoutingTrace.load(file).num_tokens == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_ids": np.array([{}], dtype=object)}, "topk_ids holds pickled Python objects"),
        ({"metadata": np.array({"model": "toy"}, dtype=object)}, "metadata holds pickled"),
        ({"metadata": "{"}, "metadata is no JSON text"),
        ({"metadata": "[1]"}, "metadata is"),
        ({"metadata": '{"x": NaN}'}, "NaN, which is not JSON"),
        ({"metadata": "[" * 100000}, "no JSON text"),
        ({"metadata": '{"x": ' + "9" * 5000 + "}"}, "no JSON text"),
        ({"metadata": np.array(b"{}")}, "expected one JSON text"),
        ({"metadata": ["{}", "{}"]}, "expected one JSON text"),
        ({"metadata": 3}, "expected one JSON text"),
        ({"num_experts": [4, 4]}, "num_experts has shape"),
        ({"num_experts": 4.0}, "num_experts is"),
        ({"num_experts": True}, "num_experts is True"),
        ({"labels": [1, 2]}, "labels has dtype int64"),
        ({"labels": "a"}, "labels has dtype"),
        ({"labels": np.array([0x7FFFFFFF, 1], np.uint32).view("<U1")}, "no text"),
        ({"labels": None, "domain": ["x"]}, "labels has 1 entries"),
        ({"num_experts": None}, "canonical layout also needs num_experts"),
        (
            {"sequence_offsets": None, "metadata": None},
            "canonical layout also needs metadata, sequence_offsets",
        ),
    ],
)
def test_bad_arrays_in_a_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    np.savez(file, **canonical(**changes))
    with pytest.raises(TraceError, match=message) as caught:
        RoutingTrace.load(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    make().save(file)
    whole = file.read_bytes()
    np.save(tmp_path / "plain.npy", np.arange(3))
    with zipfile.ZipFile(tmp_path / "text.zip", "w") as archive:
        archive.writestr("readme.txt", "no arrays")
    cases = {
        b"": "cannot be read",
        b"not a zip": "is no .npz file .perfmodel trace import reads",
        pickle.dumps({"topk_ids": [1]}): "cannot be read",
        whole[: len(whole) // 2]: "cannot be read",
        whole[:-30]: "cannot be read",
        (tmp_path / "plain.npy").read_bytes(): "cannot be read",
        (tmp_path / "text.zip").read_bytes(): "holds no arrays",
    }
    for content, message in cases.items():
        file.write_bytes(content)
        with pytest.raises(TraceError, match=message):
            RoutingTrace.load(file)
    with pytest.raises(TraceError, match="is a directory"):
        RoutingTrace.load(tmp_path)


def _header(shape: str, descr: str = "|u1") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = text.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (_header("(1000000000000,)") + b"abc", "declares shape"),
        (_header("(-2, -2)") + b"abcd", "which no array has"),
        (_header("(0, 10000000000000000000000)"), "which no array has"),
        (_header("(2,)", "|O") + b"ab", "pickled"),
        (_header("(((((((1,)"), "cannot be read"),
        (_header("(2,)", "nonsense") + b"ab", "cannot be read"),
        (b"\x93NUMPY\x03\x00" + bytes(30), "version"),
        (b"\x93NUMPY", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_lying_array_headers(member: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    np.savez(file, **{key: value for key, value in canonical().items() if key != "topk_ids"})
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("topk_ids.npy", member)
    with pytest.raises(TraceError, match=message):
        RoutingTrace.load(file)


def test_archives_that_would_expand_too_far_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bomb.npz"
    zeros = np.zeros((200_000, 2, 2), np.uint8)
    np.savez_compressed(file, **canonical(topk_ids=zeros))
    assert file.stat().st_size < 10_000
    monkeypatch.setattr("perfmodel.routing.npz.MAX_BYTES", 500_000)
    monkeypatch.setattr("perfmodel.routing.npz._read", lambda *_: pytest.fail("was read"))
    with pytest.raises(TraceError, match="would expand to"):
        RoutingTrace.load(file)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    np.savez(file, **canonical())
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("topk_ids.npy", b"")
    with pytest.raises(TraceError, match="two arrays of the same name"):
        npz_keys(file)


@given(position=st.integers(0, 10**6), byte=st.integers(1, 255), cut=st.booleans())
@example(position=0, byte=255, cut=False)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_never_leak_other_errors(position: int, byte: int, cut: bool, tmp_path: Path) -> None:
    whole = tmp_path / "whole.npz"
    if not whole.exists():
        make().save(whole)
    content = bytearray(whole.read_bytes())
    position %= len(content)
    content[position] ^= byte
    broken = tmp_path / "broken.npz"
    broken.write_bytes(content[:position] if cut else content)
    with contextlib.suppress(TraceError):  # some bytes, such as time stamps, carry no meaning
        assert same(RoutingTrace.load(broken), make())


@given(content=st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    file.write_bytes(content)
    with pytest.raises(TraceError):
        RoutingTrace.load(file)


# ---- other views ----


@given(traces(), st.data())
def test_chosen_sequences(trace: RoutingTrace, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, trace.num_sequences - 1), min_size=1, max_size=5))
    part = trace.sequences(chosen)
    assert part.num_sequences == len(chosen)
    for new, old in enumerate(chosen):
        for a, b in (
            (part.prefill_slice(new), trace.prefill_slice(old)),
            (part.decode_slice(new), trace.decode_slice(old)),
        ):
            np.testing.assert_array_equal(part.topk_ids[a], trace.topk_ids[b])
        if trace.labels is not None:
            assert part.labels is not None
            assert part.labels[new] == trace.labels[old]
    assert same(trace.sequences(range(trace.num_sequences)), trace)


@pytest.mark.parametrize("indices", [[], [2], [-1], [True], [0.0], ["a"], 3, None])
def test_bad_choice_of_sequences(indices: Any) -> None:
    with pytest.raises(TraceError):
        make().sequences(indices)


def test_map_layers() -> None:
    trace = make()
    mapped = trace.map_layers([1, 0, 1])
    np.testing.assert_array_equal(mapped.topk_ids, trace.topk_ids[:, [1, 0, 1]])
    np.testing.assert_array_equal(mapped.layer_index, [0, 1, 2])
    np.testing.assert_array_equal(trace.map_layers([0], [7]).layer_index, [7])
    for rows in ([], [2], [-1], [0.5], [[0]], None):
        with pytest.raises(TraceError):
            trace.map_layers(rows)  # type: ignore[arg-type]


@given(traces(), st.integers(0, 300))
def test_more_experts_change_no_pick(trace: RoutingTrace, extra: int) -> None:
    wide = trace.with_num_experts(trace.num_experts + extra)
    assert wide.num_experts == trace.num_experts + extra
    np.testing.assert_array_equal(wide.topk_ids == wide.unassigned, trace.topk_ids == trace.unassigned)
    assigned = trace.topk_ids != trace.unassigned
    np.testing.assert_array_equal(wide.topk_ids[assigned], trace.topk_ids[assigned])
    assert same(wide.with_num_experts(trace.num_experts), trace)


def test_fewer_experts_than_used() -> None:
    with pytest.raises(TraceError, match=r"allowed are 0\.\.2"):
        make().with_num_experts(3)


def test_check_model() -> None:
    trace = RoutingTrace.load(MINI)
    trace.check_model(Model())
    with pytest.raises(TraceError, match="has 8 experts a layer, other-model has 64"):
        trace.check_model(Model(num_experts=64))
    with pytest.raises(TraceError, match="has 2 picks a token, other-model has 8"):
        trace.check_model(Model(top_k=8))
    with pytest.raises(TraceError, match="at least 8"):
        trace.with_metadata(num_experts_inferred=True).check_model(Model(num_experts=64))


# ---- replay ----


def test_replay_without_a_workload_is_the_trace_itself() -> None:
    trace = RoutingTrace.load(MINI)
    for replay in (
        trace.replay(),
        trace.replay(model_moe_layers=32),
        trace.replay(model_moe_layers=range(32), model_name="tiny-mixtral-32l"),
    ):
        assert replay.trace is trace
        assert replay.notes == ()
        np.testing.assert_array_equal(replay.context_start, trace.prompt_len)
        assert not replay.context_start.flags.writeable


@given(traces(), st.none() | st.integers(1, 15), st.none() | st.integers(1, 15))
def test_replay_truncates_or_cycles_each_phase(trace: RoutingTrace, prompt: int | None, output: int | None) -> None:
    if output is not None and not trace.has_decode:
        with pytest.raises(TraceError, match="no decode steps"):
            trace.replay(prompt, output)
        return
    replay = trace.replay(prompt, output)
    new = replay.trace
    assert new.labels == trace.labels
    for s in range(trace.num_sequences):
        own_prompt, own_output = (
            int(trace.prompt_len[s]),
            int(trace.sequence_lengths[s] - trace.prompt_len[s]),
        )
        prefill, decode = new.prefill_slice(s), new.decode_slice(s)
        assert prefill.stop - prefill.start == (own_prompt if prompt is None else prompt if own_prompt else 0)
        assert decode.stop - decode.start == (own_output if output is None else output)
        assert replay.context_start[s] == (own_prompt if prompt is None else prompt)
        for got, source, length in (
            (prefill, trace.prefill_slice(s), own_prompt),
            (decode, trace.decode_slice(s), own_output),
        ):
            for i in range(got.stop - got.start):
                old = source.start + i % length
                np.testing.assert_array_equal(new.topk_ids[got.start + i], trace.topk_ids[old])
                if trace.topk_weights is not None:
                    assert new.topk_weights is not None
                    np.testing.assert_array_equal(new.topk_weights[got.start + i], trace.topk_weights[old])
    altered = prompt is not None or output is not None or not trace.has_prefill
    assert altered or replay.notes == ()


def test_replay_on_a_larger_model() -> None:
    trace = RoutingTrace.load(MINI)
    layers = tuple(range(3, 59))
    replay = trace.replay(128, 2048, model_moe_layers=layers, layers="cycle", model_name="mixtral-8x22b")
    assert isinstance(replay, Replay)
    new = replay.trace
    assert new.num_tokens == 6 * 2176
    np.testing.assert_array_equal(new.layer_index, layers)
    np.testing.assert_array_equal(new.topk_ids[:, 32:], new.topk_ids[:, :24])
    np.testing.assert_array_equal(new.topk_ids[new.prefill_slice(1)][:96, :32], trace.topk_ids[trace.prefill_slice(1)])
    np.testing.assert_array_equal(
        new.topk_ids[new.prefill_slice(1)][96:, :32], trace.topk_ids[trace.prefill_slice(1)][:32]
    )
    np.testing.assert_array_equal(replay.context_start, np.full(6, 128))
    assert replay.notes == (
        "model layers 3-58 replay recorded layers 0-31 cycled",
        "the routing is of tiny-mixtral-32l, not of mixtral-8x22b",
        "prompts set to 128 tokens: 3 of 6 sequences cycled, 1 truncated",
        "outputs set to 2048 tokens: 6 of 6 sequences cycled, 0 truncated",
    )
    assert new.metadata["replay"] == list(replay.notes)


def test_replay_layers_must_be_asked_for() -> None:
    trace = RoutingTrace.load(MINI)
    with pytest.raises(TraceError, match=r"has 32 MoE layers, the model has 56.*--layers cycle"):
        trace.replay(model_moe_layers=56)
    fewer = trace.replay(model_moe_layers=16, layers="cycle")
    assert fewer.notes == ("model layers 0-15 replay recorded layers 0-15",)
    np.testing.assert_array_equal(fewer.trace.topk_ids, trace.topk_ids[:, :16])
    shifted = trace.replay(model_moe_layers=range(1, 33))
    assert shifted.notes == ("model layers 1-32 replay recorded layers 0-31",)
    odd = trace.replay(model_moe_layers=range(1, 64, 2))
    assert odd.notes == ("model layers 1..63 (32 of them) replay recorded layers 0-31",)
    one = trace.replay(model_moe_layers=[5], layers="cycle")
    assert one.notes == ("model layers 5 replay recorded layers 0",)


def test_replay_without_recorded_prompts() -> None:
    trace = make(prompt_len=[0, 0])
    replay = trace.replay(prompt=100, output=5)
    assert not replay.trace.has_prefill
    assert replay.trace.num_tokens == 10
    np.testing.assert_array_equal(replay.context_start, [100, 100])
    assert "2 of 2 sequences have no recorded prompt: 100 tokens count as context" in replay.notes[-1]
    unknown = trace.replay()
    np.testing.assert_array_equal(unknown.context_start, [0, 0])
    assert "taken as 0 tokens" in unknown.notes[-1]


def test_replay_without_recorded_decode_steps() -> None:
    trace = make(prompt_len=[3, 3])
    assert trace.replay(prompt=4).trace.num_tokens == 8
    with pytest.raises(TraceError, match="7 output tokens cannot be replayed: 2 of 2"):
        trace.replay(output=7)


def test_replay_says_what_is_no_recording() -> None:
    trace = make(metadata={"model": "toy", "source": "synthetic"})
    assert "the routing is synthetic, not a recording" in trace.replay().notes


BAD_LENGTHS = [0, -1, 1.5, True, "9", nan, inf, [4], 10**12, 2**63, 10**5000]


@pytest.mark.parametrize("length", BAD_LENGTHS, ids=[str(i) for i in range(len(BAD_LENGTHS))])
def test_bad_lengths(length: Any) -> None:
    trace = make(prompt_len=[2, 2])
    with pytest.raises(TraceError):
        trace.replay(prompt=length)
    with pytest.raises(TraceError):
        trace.replay(output=length)


@pytest.mark.parametrize("layers", [0, -1, True, 2.0, 10**9, [], [1, 1], [2, 1], [-1, 0], [0.5, 1], "ab"])
def test_bad_model_layers(layers: Any) -> None:
    with pytest.raises(TraceError):
        make().replay(model_moe_layers=layers, layers="cycle")


def test_too_many_layers_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.routing.replay.MAX_BYTES", 10_000)
    assert make().replay(model_moe_layers=100, layers="cycle").trace.num_layers == 100
    with pytest.raises(TraceError, match="at most 5 tokens of 200 layers"):
        make().replay(model_moe_layers=200, layers="cycle")


@pytest.mark.parametrize("how", ["repeat", "", 3, True, ["cycle"]])
def test_bad_layer_mapping(how: Any) -> None:
    with pytest.raises(TraceError, match="allowed is 'cycle'"):
        make().replay(layers=how)
