"""Importing recordings in other layouts, and recognising a file's layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import from_row_phase, load_any


def rows(**changes: Any) -> dict[str, Any]:
    """Three sequences: one of prompt and answer, one of unknown phase, one of answer only."""
    ids = np.array([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1], [1, 4]], dtype=np.uint8)[:, None, :]
    fields = {
        "topk_ids": ids,
        "topk_weights": np.full((7, 1, 2), 0.25, dtype=np.float16),
        "seq_id": np.array([7, 7, 7, 9, 9, 2, 2], dtype=np.uint16),
        "phase": np.array([0, 0, 1, 0, 2, 1, 1], dtype=np.uint8),
        "layer_index": np.array([4], dtype=np.uint8),
    }
    return {key: value for key, value in {**fields, **changes}.items() if value is not None}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "rows.npz"
    np.savez(file, **rows(**changes))
    return file


def test_rows_become_sequences(tmp_path: Path) -> None:
    trace = load_any(write(tmp_path))
    np.testing.assert_array_equal(trace.sequence_offsets, [0, 3, 5])
    np.testing.assert_array_equal(trace.prompt_len, [2, 0])
    np.testing.assert_array_equal(trace.topk_ids[:, 0], [[0, 1], [1, 2], [2, 0], [2, 1], [1, 4]])
    np.testing.assert_array_equal(trace.layer_index, [4])
    assert trace.num_experts == 5
    assert trace.num_experts_inferred
    assert trace.metadata["left_out"] == 1
    assert trace.metadata["source"] == "recorded"
    assert trace.metadata["model"] == "an unknown model"
    assert "rows.npz" in trace.metadata["how"]
    assert RoutingTrace.load(tmp_path / "rows.npz").content_hash() == trace.content_hash()


def test_what_the_file_does_not_say_can_be_given(tmp_path: Path) -> None:
    trace = from_row_phase(write(tmp_path, topk_weights=None), num_experts=64, model="gpt-oss-20b")
    assert trace.num_experts == 64
    assert not trace.num_experts_inferred
    assert trace.metadata["model"] == "gpt-oss-20b"
    assert trace.topk_weights is None
    with pytest.raises(TraceError, match=r"rows\.npz: topk_ids: .* is expert 4"):
        from_row_phase(tmp_path / "rows.npz", num_experts=4)


def test_inferred_experts_can_be_widened(tmp_path: Path) -> None:
    trace = load_any(write(tmp_path)).with_num_experts(64)
    assert trace.num_experts == 64
    assert not trace.num_experts_inferred


def test_inferred_experts_with_unassigned_picks(tmp_path: Path) -> None:
    signed = rows()["topk_ids"].astype(np.int16)
    signed[-1] = -1
    assert load_any(write(tmp_path, topk_ids=signed)).num_experts == 3
    unsigned = rows()["topk_ids"].copy()
    unsigned[-1] = 255
    assert load_any(write(tmp_path, topk_ids=unsigned)).num_experts == 3
    assert load_any(write(tmp_path, topk_ids=np.full((7, 1, 2), -1))).num_experts == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase": [0, 1, 0, 0, 2, 1, 1]}, r"phase goes back from answer to prompt at row 2 \(seq_id 7\)"),
        ({"phase": [0, 0, 1, 0, 3, 1, 1]}, "phase holds 3"),
        ({"phase": [0, 0, 1, 0, -1, 1, 1]}, "phase holds -1"),
        ({"phase": [2] * 7}, "every sequence has rows of unknown phase"),
        ({"phase": [0.0] * 7}, "phase has dtype float64"),
        ({"phase": [0, 0, 1]}, r"phase has shape \(3,\), expected one row for each of 7 tokens"),
        ({"phase": [[0]] * 7}, "phase has shape"),
        ({"seq_id": [7, 7, 9, 9, 7, 2, 2]}, "seq_id 7 returns after another sequence"),
        ({"seq_id": [7] * 6}, "seq_id has shape"),
        ({"seq_id": list("aaabbcc")}, "seq_id has dtype <U1"),
        ({"topk_ids": np.zeros((7, 2), np.uint8)}, "topk_ids has shape"),
        ({"topk_ids": np.zeros((0, 1, 2), np.uint8)}, "no tokens"),
        ({"topk_ids": np.zeros((7, 1, 2), np.uint8)}, "picks expert 0 twice"),
        ({"topk_ids": np.ones((7, 1, 2))}, "topk_ids has dtype float64"),
        ({"topk_ids": rows()["topk_ids"] + np.uint32(70000)}, "num_experts is 70005"),
        ({"topk_weights": np.full((7, 1, 2), np.nan)}, "is nan"),
        ({"topk_weights": np.ones((6, 1, 2))}, "topk_weights has shape"),
        ({"topk_weights": 1.0}, "topk_weights has shape"),
        ({"layer_index": [1, 2]}, "layer_index has 2 entries"),
        ({"layer_index": np.array([{}], dtype=object)}, "pickled"),
    ],
)
def test_broken_rows_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(TraceError, match=message) as caught:
        load_any(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_unknown_layouts_are_explained(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds .*the row-phase layout also needs seq_id"):
        load_any(write(tmp_path, seq_id=None))
    with pytest.raises(TraceError, match="row-phase layout also needs phase"):
        from_row_phase(write(tmp_path, phase=None))
    np.savez(tmp_path / "other.npz", gains=np.zeros(3))
    with pytest.raises(TraceError, match="no known trace layout; holds gains"):
        load_any(tmp_path / "other.npz")
    np.savez(tmp_path / "losses.npz", losses=np.zeros(3))
    with pytest.raises(TraceError, match="is a loss table"):
        load_any(tmp_path / "losses.npz")
    with pytest.raises(TraceError, match="no such file"):
        from_row_phase(tmp_path / "missing.npz")


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_known_sequence_survives(lengths: list[tuple[int, int, bool]], seed: int, tmp_path: Path) -> None:
    lengths = [(p, n, unknown) for p, n, unknown in lengths if p + n] or [(1, 1, False)]
    rng = np.random.default_rng(seed)
    tokens = sum(p + n for p, n, _ in lengths)
    phase = np.concatenate([[0] * p + [1] * n for p, n, _ in lengths]).astype(np.uint8)
    start = 0
    for p, n, unknown in lengths:
        if unknown:
            phase[start + rng.integers(p + n)] = 2
        start += p + n
    file = tmp_path / "any.npz"
    np.savez(
        file,
        topk_ids=rng.random((tokens, 2, 6)).argsort(-1)[..., :2],
        seq_id=np.repeat(rng.permutation(len(lengths)), [p + n for p, n, _ in lengths]),
        phase=phase,
        layer_index=[0, 1],
    )
    known = [(p, n) for p, n, unknown in lengths if not unknown]
    if not known:
        with pytest.raises(TraceError, match="nothing is left"):
            load_any(file)
        return
    trace = load_any(file)
    assert trace.metadata["left_out"] == len(lengths) - len(known)
    np.testing.assert_array_equal(trace.prompt_len, [p for p, _ in known])
    np.testing.assert_array_equal(trace.sequence_lengths, [p + n for p, n in known])


@pytest.mark.parametrize(
    ("name", "shape", "experts", "prompts"),
    [
        ("deepseek-v2-lite/esft_law", (8327, 26, 6), 64, 5915),
        ("deepseek-v2-lite/esft_translation", (8251, 26, 6), 64, 7258),
        ("gpt-oss-20b/gptoss20b_decode", (9686, 24, 4), 32, 0),
    ],
)
def test_public_recordings(name: str, shape: tuple[int, ...], experts: int, prompts: int, shared: Path) -> None:
    trace = RoutingTrace.load(shared / "traces" / f"{name}.npz")
    assert trace.topk_ids.shape == shape
    assert trace.num_experts == experts
    assert trace.prompt_len.sum() == prompts
    assert trace.has_decode
    assert trace.has_prefill == (prompts > 0)
