"""Arrays of integers without a telling name: recordings of picks are told from everything else that has three axes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import import_files, recognise
from perfmodel.routing.importers.looks import why_not_picks

Ints = NDArray[np.integer]


def recorded(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> Ints:
    """Picks of layers that each like experts of their own."""
    rng = np.random.default_rng(seed)
    wanted = rng.normal(size=(tokens, layers, experts)) + 0.7 * rng.normal(size=(layers, experts))
    return np.argsort(-wanted, axis=2)[:, :, :top_k].astype(np.int32)


def some(*shape: int, of: int, seed: int = 0) -> Ints:
    """Different numbers at random in each list."""
    return np.argsort(np.random.default_rng(seed).random((*shape[:-1], of)), axis=-1)[..., : shape[-1]]


def neighbours(places: NDArray[np.float64], count: int, first: int = 0) -> Ints:
    """The nearest points of each point [batch, points, dimensions]."""
    apart = ((places[:, :, None] - places[:, None]) ** 2).sum(-1)
    return np.argsort(apart, axis=-1)[..., first : first + count]


def blobs(*shape: int) -> NDArray[np.float64]:
    """A smooth picture in 0..120."""
    waves = np.random.default_rng(2).normal(size=shape).cumsum(0).cumsum(1)
    return (waves - waves.min()) / np.ptp(waves) * 120


def deals(times: int, cards: int, *hands: int) -> Ints:
    return np.stack(
        [np.random.default_rng(s).permutation(cards)[: np.prod(hands)].reshape(hands) for s in range(times)]
    )


rng = np.random.default_rng(7)
POINTS = rng.random((30, 60, 3))
MOVING = rng.random((1, 60, 3)) + 0.05 * rng.random((40, 60, 3))
BODY = rng.integers(20, 200, (1, 17, 2)) + rng.integers(-15, 15, (90, 17, 2))
GRAY = blobs(64, 64)
FOREIGN: dict[str, Ints] = {
    "indices at random": some(8, 100, 10, of=100),
    "many indices at random": some(60, 24, 8, of=64),
    "indices at random of more": some(30, 100, 10, of=200),
    "neighbours of points": neighbours(POINTS, 8),
    "neighbours without the point": neighbours(POINTS, 8, 1),
    "neighbours of sorted points": neighbours(np.sort(POINTS[..., :1], axis=1), 4, 1),
    "neighbours over time": neighbours(MOVING, 8, 1),
    "neighbours in a data base": np.argsort(((rng.random((40, 16, 1, 3)) - rng.random((200, 3))) ** 2).sum(-1))[
        ..., :5
    ],
    "faces": np.array([[[i, i + 1, i + 2] for i in range(50)]] * 20),
    "corners of tetrahedra": np.sort(some(40, 6, 4, of=30), axis=-1),
    "orders of all": some(40, 12, 16, of=16),
    "ranks": some(40, 12, 8, of=8).argsort(axis=-1),
    "a picture": rng.integers(0, 256, (64, 64, 3)),
    "a picture of one colour": np.broadcast_to([200, 120, 10], (64, 64, 3)),
    "a tinted picture": np.stack(
        [rng.integers(130, 256, (64, 64)), rng.integers(60, 120, (64, 64)), GRAY // 3], -1
    ).astype(int),
    "a smooth picture": np.stack([GRAY + 110, GRAY + 60, GRAY], -1).astype(int),
    "a brown picture": np.stack([GRAY + 100, GRAY * 0.8 + 60, GRAY * 0.5 + 20], -1).astype(int),
    "a slice of a body": np.clip(rng.normal(100, 20, (64, 64, 16)), 0, 255).astype(int),
    "a volume": rng.integers(0, 4096, (32, 32, 32)),
    "words": rng.integers(0, 50_000, (20, 10, 8)),
    "likely words": some(20, 10, 5, of=2000),
    "labels": rng.integers(0, 10, (100, 20, 1)),
    "drawn again": rng.integers(0, 100, (50, 20, 10)),
    "folds": np.array([[rng.permutation(100)[:20] for _ in range(5)] for _ in range(10)]),
    "counts": rng.poisson(20, (50, 6, 8)),
    "masks": rng.integers(0, 2, (50, 6, 8)),
    "one of eight": np.eye(8, dtype=int)[rng.integers(0, 8, (50, 6))],
    "places of a grid": np.stack(np.meshgrid(np.arange(40), np.arange(50, 80), indexing="ij"), -1),
    "places of a square": np.stack(np.meshgrid(np.arange(20), np.arange(20), indexing="ij"), -1),
    "dates": np.stack(
        [rng.integers(1, 13, (50, 10)), rng.integers(1, 32, (50, 10)), rng.integers(0, 100, (50, 10))], -1
    ),
    "boxes": np.concatenate([(low := rng.integers(0, 200, (50, 10, 2))), low + rng.integers(5, 50, (50, 10, 2))], -1),
    "joints": rng.integers(0, 224, (50, 17, 2)),
    "joints of a body": BODY,
    "joints and whether they are seen": np.concatenate([BODY, np.full((90, 17, 1), 2)], -1),
    "bases": rng.integers(0, 4, (50, 100, 3)),
    "sudoku": some(50, 9, 9, of=9) + 1,
    "hands of cards": deals(100, 52, 4, 5),
    "lottery": np.sort(some(100, 6, 6, of=49), axis=-1) + 1,
    "codes of sound": rng.integers(0, 1024, (100, 8, 2)),
    "notes": np.stack([rng.integers(30, 90, (100, 8)), rng.integers(0, 127, (100, 8))], -1),
    "what many like": np.argsort(rng.gumbel(size=(100, 7, 500)) + 3 * rng.normal(size=500))[..., :-11:-1],
    "the same lists in each column": np.repeat(recorded(60, 1, 32, 4), 6, axis=1),
    "too few rows": recorded(5, 8, 32, 4),
    "too few columns": recorded(60, 3, 32, 4),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_recording_is_not_taken_for_one(tmp_path: Path, kind: str) -> None:
    for save, name in ((np.save, "a.npy"), (np.savez, "a.npz")):
        save(tmp_path / name, FOREIGN[kind])
        assert recognise(tmp_path / name) == {}
        with pytest.raises(TraceError, match="is of no known format"):
            import_files("auto", [tmp_path / name])


@given(
    tokens=st.integers(24, 60),
    layers=st.integers(4, 30),
    shape=st.sampled_from([(8, 2), (16, 4), (32, 4), (60, 4), (64, 6), (128, 8), (256, 8)]),
    seed=st.integers(0, 2**32),
)
def test_recordings_are_taken(tokens: int, layers: int, shape: tuple[int, int], seed: int) -> None:
    if layers != shape[0]:
        assert why_not_picks(recorded(tokens, layers, *shape, seed)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids,
        lambda ids: np.where(np.arange(12)[:, None] < 2, 0, ids),  # dense layers
        lambda ids: np.where(np.arange(12)[:, None] < 2, -1, ids),
        lambda ids: np.where(np.arange(12)[:, None] < 9, 0, ids),
        lambda ids: np.concatenate([ids, np.full((9, 12, 4), -1)]),  # rows that were never written
    ],
)
def test_fillers_do_not_hide_a_recording(tmp_path: Path, change: Callable[[Ints], Ints]) -> None:
    np.save(tmp_path / "a.npy", change(recorded(40, 12, 32, 4)))
    assert list(recognise(tmp_path / "a.npy")) == ["vllm"]


def test_published_recordings_are_taken(shared: Path) -> None:
    for name in ("deepseek-v2-lite/esft_law", "deepseek-v2-lite/esft_translation", "gpt-oss-20b/gptoss20b_decode"):
        trace = import_files("auto", [shared / "traces" / f"{name}.npz"]).result
        assert isinstance(trace, RoutingTrace)
        for s in range(trace.num_sequences):
            rows = slice(int(trace.sequence_offsets[s]), int(trace.sequence_offsets[s + 1]))
            assert why_not_picks(trace.topk_ids[rows].astype(np.int64)) is None
