"""DynaNDE's files: dense rows of scores, tensors, positions put into sequences, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.dynande import read, recognise
from perfmodel.routing.importers.probe import Probe

EXPERTS = 6


def csv(scores: np.ndarray[Any, Any], layer: int = 0) -> str:
    header = ",".join(["layer_id", "token_id", *(f"expert_{e}" for e in range(scores.shape[1]))])
    rows = [f"{layer},{t}," + ",".join(f"{one:.6f}" for one in row) for t, row in enumerate(scores)]
    return "\n".join([header, *rows]) + "\n"


def dense(tokens: int = 4, k: int = 2, seed: int = 0) -> np.ndarray[Any, Any]:
    """Scores [T, E] with k picks a row, no two alike."""
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.broadcast_to(np.arange(EXPERTS), (tokens, EXPERTS)), axis=1)[:, :k]
    scores = np.zeros((tokens, EXPERTS))
    np.put_along_axis(scores, ids, rng.permutation(tokens * k).reshape(tokens, k) / 1000 + 0.1, 1)
    return scores


def write(folder: Path, layers: dict[int, np.ndarray[Any, Any]]) -> list[Path]:
    files = []
    for layer, scores in layers.items():
        files.append(folder / f"some-moe_runid3_epoch54_layer{layer}_shard0-0_to_0-1.csv")
        files[-1].write_text(csv(scores))
    return files


def load(files: list[Path], **options: Any) -> RoutingTrace:
    result = read(files, ImportOptions(**{"sequence_len": (2,), "prompt_len": (1,), **options})).result
    assert isinstance(result, RoutingTrace)
    return result


@given(tokens=st.integers(1, 6), layers=st.integers(1, 3), k=st.integers(1, EXPERTS))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tokens: int, layers: int, k: int) -> None:
    scores = {layer: dense(tokens, k, layer) for layer in range(2, 2 + layers)}
    files = write(tmp_path_factory.mktemp("dynande"), scores)
    trace = load(files[::-1], sequence_len=(tokens,), prompt_len=(0,))
    assert trace.layer_index.tolist() == list(scores)
    assert trace.num_experts == EXPERTS
    assert not trace.num_experts_inferred
    assert trace.topk_weights is not None
    for at, wanted in enumerate(scores.values()):
        found = np.zeros_like(wanted, np.float32)
        np.put_along_axis(found, trace.topk_ids[:, at].astype(int), trace.topk_weights[:, at], 1)
        np.testing.assert_array_equal(found, wanted.round(6).astype(np.float32))
    assert (np.diff(trace.topk_weights, axis=2) < 0).all()


def test_a_score_that_rounds_to_zero_is_a_lost_pick(tmp_path: Path) -> None:
    scores = dense()
    scores[2, scores[2].argmax()] = 4e-7
    trace = load(write(tmp_path, {3: scores}))
    assert (trace.topk_ids == trace.unassigned).sum() == 1
    assert trace.topk_ids[2, 0, 1] == trace.unassigned
    assert trace.metadata["lost_picks"] == 1
    assert "lost_picks" not in load(write(tmp_path, {3: dense()})).metadata


def test_files_of_one_layer_follow_one_another(tmp_path: Path) -> None:
    files = []
    for name, seed in (("0", 1), ("1", 2)):
        (tmp_path / name).mkdir()
        files += write(tmp_path / name, {2: dense(4, 2, seed), 3: dense(4, 2, seed + 10)})
    trace = load(files)
    assert trace.num_tokens == 8
    assert trace.layer_index.tolist() == [2, 3]
    first = load([files[0], files[1]])
    np.testing.assert_array_equal(trace.topk_ids[:4], first.topk_ids)


def test_a_layer_in_the_rows_is_checked_against_the_name(tmp_path: Path) -> None:
    file = tmp_path / "x_layer7.csv"
    file.write_text(csv(dense(), layer=7))
    assert load([file]).layer_index.tolist() == [7]
    file.rename(tmp_path / "x_layer8.csv")
    assert load([tmp_path / "x_layer8.csv"]).layer_index.tolist() == [7]  # the rows speak for themselves
    plain = tmp_path / "y_layer9.csv"
    plain.write_text(csv(dense()))
    with pytest.raises(TraceError, match=r"x_layer8\.csv: holds layer 7, expected layer 8"):
        load([tmp_path / "x_layer8.csv", plain])
    with pytest.raises(TraceError, match=r"x_layer8\.csv: holds layer 7, expected layer 3"):
        load([tmp_path / "x_layer8.csv"], layers=(3,))


# ---- tensors, as .npz and JSON (tests/test_record_dynande.py reads a .pt file) ----


def tensors(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "layer": 5,
        "samples": np.arange(4),
        "indices": np.array([[1, 0], [2, 3], [5, 4], [0, 2]]),
        "scores": np.full((4, 2), 0.5, np.float32),
        "num_sequences": 2,
        "sequence_length": 2,
    }
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def test_tensors_as_arrays_and_as_json(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **tensors())
    listed = {key: getattr(value, "tolist", lambda value=value: value)() for key, value in tensors().items()}
    (tmp_path / "a.json").write_text(json.dumps({**listed, "model": "some-moe"}))
    for name in ("a.npz", "a.json"):
        assert recognise(Probe.of(tmp_path / name)) == "holds samples, scores and indices"
        trace = load([tmp_path / name], sequence_len=None)
        np.testing.assert_array_equal(trace.topk_ids[:, 0], tensors()["indices"])
        assert trace.layer_index.tolist() == [5]
        assert trace.sequence_offsets.tolist() == [0, 2, 4]
        assert trace.num_experts_inferred
    assert trace.metadata["model"] == "some-moe"


def test_positions_become_sequences(tmp_path: Path) -> None:
    files = []
    for layer in (2, 3):
        for position in (1, 0, 2):
            ids = np.array([[position, 3 + layer], [position + 1, 9]])
            files.append(tmp_path / f"{layer}-{position}.npz")
            changes = {"layer": layer, "token_position": position, "indices": ids, "scores": np.full((2, 2), 0.5)}
            np.savez(files[-1], **tensors(**changes, num_sequences=None, sequence_length=None))
    trace = load(files, sequence_len=None)
    assert trace.sequence_offsets.tolist() == [0, 3, 6]
    assert trace.topk_ids[:, 0].tolist() == [[0, 5], [1, 5], [2, 5], [1, 9], [2, 9], [3, 9]]
    assert trace.topk_ids[:3, 1].tolist() == [[0, 6], [1, 6], [2, 6]]
    with pytest.raises(TraceError, match="has 3 positions of each sequence; --sequence-len says otherwise"):
        load(files, sequence_len=(2,))
    with pytest.raises(TraceError, match=r"files of its layer are of positions \[0, 2\]"):
        load([files[1], files[2]], sequence_len=None)
    with pytest.raises(TraceError, match="its layer has 2 rows, layer 2 has 6"):
        load(files[:4], sequence_len=None)
    np.savez(tmp_path / "bare.npz", **tensors(layer=2, num_sequences=None, sequence_length=None))
    with pytest.raises(TraceError, match="some files of its layer say their token_position and others do not"):
        load([files[0], tmp_path / "bare.npz"])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"indices": np.zeros((4, 2))}, {}, "indices has dtype float64, expected integers"),
        ({"indices": None}, {}, "lacks 'indices'"),
        ({"scores": None}, {}, "lacks 'scores'"),
        ({"scores": np.zeros((4, 3))}, {}, r"scores has shape \(4, 3\)"),
        ({"scores": np.zeros((4, 2), int)}, {}, "scores has shape .* dtype int64"),
        ({"scores": np.full((4, 2), np.nan)}, {}, "topk_weights: .* expected a finite number"),
        ({"indices": np.full((4, 2), 3)}, {}, "picks expert 3 twice"),
        ({"indices": np.zeros((0, 2), int), "scores": np.zeros((0, 2))}, {}, "scores has shape"),
        ({"layer": -1}, {}, "layer is -1, expected an integer >= 0"),
        ({"layer": 1.5}, {}, "layer is"),
        ({"sequence_length": 3}, {"sequence_len": None}, "has 4 rows, expected 2 sequences of 3"),
        ({"sequence_length": 3, "num_sequences": None}, {"sequence_len": None}, "no multiple of its sequence_length 3"),
        ({"sequence_length": None}, {"sequence_len": None}, "does not say where a sequence ends"),
        ({}, {"top_k": 3}, "indices has 2 picks a token, --top-k is 3"),
        ({}, {"prompt_len": None}, "does not say which rows are prefill"),
        ({}, {"num_experts": 5}, "is expert 5, allowed are 0..4"),
    ],
)
def test_tensors_are_refused(tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a_layer5.npz", **tensors(**changes))
    with pytest.raises(TraceError, match=rf"a_layer5\.npz: .*{message}") as caught:
        load([tmp_path / "a_layer5.npz"], **options)
    assert "\n" not in str(caught.value)


GOOD = csv(dense())


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (GOOD, {"prompt_len": None}, "does not say which rows are prefill"),
        (GOOD, {"sequence_len": None}, r"does not say where a sequence ends; .* \(4 if there is only one\)"),
        (GOOD, {"sequence_len": (3,)}, "--sequence-len adds up to 3 rows"),
        (GOOD, {"top_k": 1}, "line 2 has 2 picks, --top-k is 1"),
        (GOOD, {"top_k": 7}, "has 6 experts, --top-k is 7"),
        (GOOD, {"num_experts": 1}, "num_experts is 1, expected"),
        (GOOD.splitlines()[0], {}, "has a header and no rows"),
        (GOOD.replace("expert_3", "expert_4"), {}, "line 1 is .*expected layer_id,token_id,expert_0"),
        ("layer_id,token_id\n0,0\n", {}, "line 1 is layer_id,token_id, expected"),
        (GOOD.replace("\n0,1,", "\n0,2,"), {}, r"line 3, token_id is '2', expected an integer in 1\.\.1"),
        (GOOD.replace("\n0,1,", "\n4,1,"), {}, r"line 3, layer_id is '4', expected an integer in 0\.\.0"),
        (GOOD + "0,4,1\n", {}, "line 6 has 3 columns, expected 8"),
        (GOOD.replace("0.1", "nan", 1), {}, "line 2, column . is 'nan"),
        (GOOD.replace("0.1", "-0.1", 1), {}, "expected a score >= 0"),
        (GOOD.replace("0.1", "1e400", 1), {}, "expected a finite number"),
        ("layer_id,token_id,expert_0" + "," * 10**6 + "\n", {}, "columns; allowed|longer than"),
        (GOOD.replace("0.1", "\0", 1), {}, "holds the byte zero|is a binary file"),
    ],
)
def test_rows_are_refused(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    file = tmp_path / "a_layer5.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=rf"a_layer5\.csv: .*({message})") as caught:
        load([file], **options)
    assert "\n" not in str(caught.value)


def test_files_must_fit_together(tmp_path: Path) -> None:
    files = write(tmp_path, {2: dense(4), 3: dense(5)})
    with pytest.raises(TraceError, match="its layer has 5 rows, layer 2 has 4; expected the same tokens"):
        load(files)
    other = tmp_path / "x_layer4.csv"
    other.write_text(csv(dense()[:, :4] + 0.1))
    with pytest.raises(TraceError, match="expected one model"):
        load([files[0], other])
    (tmp_path / "x.csv").write_text(csv(dense()))
    with pytest.raises(TraceError, match=r"x\.csv: its name tells no layer"):
        load([tmp_path / "x.csv"])


def test_recognised_by_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for text, found in ((GOOD, True), ("layer_id,expert_ids\n", False), ("Expert_ID,Token_Count\n", False)):
        file.write_text(text)
        assert (recognise(Probe.of(file)) is not None) == found


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
def test_indices_of_unsigned_types(tmp_path: Path, dtype: str) -> None:
    ids = np.array([[255, 0], [3, 255], [1, 2], [255, 9]])
    scores = np.tile(np.float32([0.6, 0.4]), (4, 1))
    np.savez(
        tmp_path / "a.npz", indices=ids.astype(dtype), scores=scores, samples=np.arange(4), layer=3,
        num_sequences=2, sequence_length=2,
    )  # fmt: skip
    trace = load([tmp_path / "a.npz"], sequence_len=None)
    np.testing.assert_array_equal(trace.topk_ids[:, 0], ids)
    assert trace.num_experts == 256


def test_titles_in_other_cases_with_blanks_and_quotes(tmp_path: Path) -> None:
    header, _, rows = csv(dense()).partition("\n")
    titles = header.split(",")
    files = []
    for name, other in (
        ("a_layer1.csv", ", ".join(titles).upper()),
        ("b_layer1.csv", ",".join(f'"{t}"' for t in titles)),
    ):
        (tmp_path / name).write_text(f"{other}\n{rows}")
        assert recognise(Probe.of(tmp_path / name)) is not None
        files.append(read([tmp_path / name], ImportOptions(prompt_len=(2,), sequence_len=(4,))).result)
    np.testing.assert_array_equal(files[0].topk_ids, files[1].topk_ids)
