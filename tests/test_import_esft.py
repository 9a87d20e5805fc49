"""ESFT's text files: a round trip, the layer in a file's name, and refusals."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import registry
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.esft import FORMAT, read, recognise
from perfmodel.routing.importers.probe import HEAD, Probe


def line(ids: list[int], weights: list[float]) -> str:
    return "\t".join(map(str, ids)) + "\t\t" + "\t".join(f"{one:.4f}" for one in weights) + "\n"


def write(folder: Path, ids: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], lengths: list[int]) -> list[Path]:
    """One file for each layer of ids [T, L, k], layers 1, 2, ..."""
    bounds = np.append(0, np.cumsum(lengths))
    files = []
    for layer in range(ids.shape[1]):
        text = [
            line(ids[a:b, layer].ravel().tolist(), weights[a:b, layer].ravel().tolist()) for a, b in pairwise(bounds)
        ]
        files.append(folder / f"expert_weights_{layer + 1}.txt")
        files[-1].write_text("".join(text))
    return files


def load(files: list[Path], **options: Any) -> RoutingTrace:
    result = read(files, ImportOptions(**{"top_k": 2, "prompt_len": (1,), **options})).result
    assert isinstance(result, RoutingTrace)
    return result


def small(folder: Path) -> list[Path]:
    """Two sequences of 2 and 1 tokens, 11 layers, top-2."""
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.broadcast_to(np.arange(9), (3, 11, 9)), axis=-1)[..., :2]
    return write(folder, ids, np.full(ids.shape, 0.25), [2, 1])


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), layers=st.integers(1, 3), k=st.integers(1, 3))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], layers: int, k: int) -> None:
    folder = tmp_path_factory.mktemp("esft")
    rng = np.random.default_rng(sum(lengths))
    shape = (sum(lengths), layers, k)
    ids = rng.permuted(np.broadcast_to(np.arange(12), (*shape[:2], 12)), axis=-1)[..., :k]
    weights = rng.integers(1, 10**4, shape) / 1e4
    trace = load(write(folder, ids, weights, lengths), top_k=k, prompt_len=(0,), num_experts=12)
    np.testing.assert_array_equal(trace.topk_ids, ids)
    np.testing.assert_array_equal(trace.topk_weights, weights.astype(np.float32))
    assert trace.sequence_lengths.tolist() == lengths
    assert trace.layer_index.tolist() == list(range(1, layers + 1))
    assert not trace.num_experts_inferred


def test_files_in_any_order_become_layers_in_order(tmp_path: Path) -> None:
    files = small(tmp_path)
    trace = load(sorted(files))  # 1, 10, 11, 2, ...
    assert trace.layer_index.tolist() == list(range(1, 12))
    assert np.array_equal(trace.topk_ids, load(files).topk_ids)
    assert trace.num_experts_inferred
    assert trace.prompt_len.tolist() == [1, 1]
    assert trace.metadata["import_format"] == "esft"
    assert trace.metadata["id_space"] == "logical"
    renamed = load([files[1], files[0]], layers=(7, 3))
    assert renamed.layer_index.tolist() == [3, 7]
    np.testing.assert_array_equal(renamed.topk_ids, trace.topk_ids[:, :2])


def test_the_shared_recording_survives_a_round_trip(tmp_path: Path, shared: Path) -> None:
    recorded = RoutingTrace.load(shared / "traces" / "deepseek-v2-lite" / "esft_law.npz")
    assert recorded.topk_weights is not None
    lengths = recorded.sequence_lengths.tolist()
    files = write(tmp_path, recorded.topk_ids, recorded.topk_weights, lengths)
    assert recognise(Probe.of(files[0])) is not None
    trace = load(files, top_k=6, num_experts=64, prompt_len=tuple(recorded.prompt_len.tolist()))
    assert (trace.num_sequences, trace.num_layers, trace.top_k) == (33, 26, 6)
    np.testing.assert_array_equal(trace.topk_ids, recorded.topk_ids)
    np.testing.assert_array_equal(trace.sequence_offsets, recorded.sequence_offsets)
    np.testing.assert_array_equal(trace.prompt_len, recorded.prompt_len)


def test_recognised_by_content(tmp_path: Path) -> None:
    file = tmp_path / "whatever"
    file.write_text(line([1, 2], [0.5, 0.25]))
    assert recognise(Probe.of(file)) is not None
    file.write_text("\t".join(["17"] * HEAD) + "\t\t0.5\n")  # the gap lies beyond the first bytes
    assert recognise(Probe.of(file)) is not None
    for text in ("1\t2\t0.5\t0.25\n", "1,2\n", "layer_id,expert_ids\n", "1.5\t\t2\n", "a\tb\n"):
        file.write_text(text)
        assert recognise(Probe.of(file)) is None
    assert FORMAT.gives == "trace"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("1\t2\t\t0.5\t0.5\n", {"top_k": None}, "--top-k says it"),
        ("1\t2\t\t0.5\t0.5\n", {"prompt_len": (2,)}, "--prompt-len is 2 for sequence 0, which has 1 rows"),
        ("1\t2\t\t0.5\t0.5\n", {"top_k": 3}, "line 1 has 2 picks, which is no multiple of --top-k 3"),
        ("1\t2\t\t0.5\t0.5\n", {"num_experts": 2}, "is expert 2, allowed are 0..1"),
        ("1\t2\t\t0.5\t0.5\n", {"layers": (1, 2)}, "--layers names 2 layers"),
        ("1\t2\t\t0.5\t0.5\n\n", {}, "line 2 is empty"),
        ("1\t2\t\t0.5\n", {}, "line 1 has 4 columns; expected as many weights as experts"),
        ("1\t2\t0.5\t0.5\n", {}, "line 1 has 4 columns"),
        ("\t\t\n", {}, "line 1 is empty"),
        ("1\t1\t\t0.5\t0.5\n", {}, "picks expert 1 twice"),
        ("1\t-2\t\t0.5\t0.5\n", {}, "line 1, column 2 is '-2', expected an integer in 0"),
        ("1\t2_0\t\t0.5\t0.5\n", {}, "line 1, column 2 is '2_0'"),
        ("1\t99999999999\t\t0.5\t0.5\n", {}, "column 2 is '99999999999'"),
        ("1\t99999\t\t0.5\t0.5\n", {}, "num_experts is 100000, expected an integer in"),
        ("1\t\u0663\t\t0.5\t0.5\n", {}, "line 1, column 2 is"),
        ("1\t2\t\tnan\t0.5\n", {}, "line 1, column 4 is 'nan', expected a finite number"),
        ("1\t2\t\t1e400\t0.5\n", {}, "line 1, column 4 is '1e400'"),
        ("1\t2\t\t0.5.5\t0.5\n", {}, r"line 1, column 4 is '0\.5\.5'"),
        ("1\t2\t\t-0.5\t0.5\n", {}, "topk_weights: .* expected a finite number >= 0"),
        ("1\t2\t\t1e39\t0.5\n", {}, "line 1, column 4 is 1e39, expected a float32"),
        ("1\t2\t\t0.5\t0.5\0\n", {}, "line 1 holds the byte zero"),
        ("1\t" * 600_000 + "\t0.5\n", {}, "line 1: 600,002 columns; allowed: at most 500,000"),
        ("1" * 5_000_000, {}, "line 1 is longer than"),
        ("", {}, "is empty"),
    ],
)
def test_refusals(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    file = tmp_path / "expert_weights_1.txt"
    file.write_text(text)
    with pytest.raises(TraceError, match=rf"expert_weights_1\.txt: .*{message}") as caught:
        load([file], **options)
    assert "\n" not in str(caught.value)


def test_layers_must_agree(tmp_path: Path) -> None:
    files = small(tmp_path)
    files[1].write_text(line([1, 2], [0.5, 0.5]))
    with pytest.raises(TraceError, match=r"_2\.txt: its lines have \[1\] tokens, those of another layer \[2 1\]"):
        load(files)
    (tmp_path / "again_1.txt").write_text(files[0].read_text())
    with pytest.raises(TraceError, match=r"again_1\.txt: is of the same layer as expert_weights_1\.txt"):
        load([files[0], tmp_path / "again_1.txt"])
    (tmp_path / "scores.txt").write_text(files[0].read_text())
    with pytest.raises(TraceError, match=r"scores\.txt: its name tells no layer"):
        load([tmp_path / "scores.txt"])


def test_one_pass_is_all_prefill_unless_told(tmp_path: Path) -> None:
    (tmp_path / "expert_weights_1.txt").write_text("1\t2\t0\t3\t\t0.5\t0.4\t0.3\t0.2\n4\t2\t\t0.5\t0.4\n")
    trace = read([tmp_path / "expert_weights_1.txt"], ImportOptions(top_k=2)).result
    assert isinstance(trace, RoutingTrace)
    assert trace.prompt_len.tolist() == [2, 1]


def test_a_folder_of_files(tmp_path: Path) -> None:
    files = small(tmp_path)
    folder = tmp_path / "scores"
    folder.mkdir()
    for number, file in enumerate(files):
        (folder / f"expert_weights_{number + 3}.txt").write_bytes(file.read_bytes())
    (folder / "notes.txt").write_text("x")
    assert list(registry.recognise(folder)) == ["esft"]
    trace = RoutingTrace.from_esft(folder, top_k=2)
    every = RoutingTrace.from_esft([folder / f"expert_weights_{n + 3}.txt" for n in range(len(files))], top_k=2)
    np.testing.assert_array_equal(trace.topk_ids, every.topk_ids)
    assert trace.layer_index.tolist() == [n + 3 for n in range(len(files))]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="is a folder without files such as expert_weights_7"):
        RoutingTrace.from_esft(tmp_path / "empty", top_k=2)
