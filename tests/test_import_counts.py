"""Tables of counts and ranked lists that other tools write become frequency profiles."""

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import save_file

from perfmodel.errors import TraceError
from perfmodel.routing.importers import import_files, recognise
from perfmodel.routing.importers.base import Imported, ImportOptions
from perfmodel.routing.profile import FrequencyProfile


def read(name: str, *files: Path, **options: Any) -> tuple[FrequencyProfile, list[str]]:
    """The profile, and the defects that its reader noticed."""
    imported: Imported = import_files(name, files, ImportOptions(**options))
    assert isinstance(imported.result, FrequencyProfile)
    assert imported.result.metadata["source"] == "from-counts"
    assert imported.result.metadata["import_format"] == name
    return imported.result, [one.defect for one in imported.findings]


def refused(name: str, path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        import_files(name, [path], ImportOptions(**options))
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    return message


def saved(folder: Path, array: Any, name: str = "table.npy") -> Path:
    np.save(folder / name, array)
    return folder / name


# ---- MoE-Infinity ----


def collection(picks: Sequence[int] = (6, 9), layers: int = 3, experts: int = 4, capacity: int = 3) -> np.ndarray:
    """Counts of sequences in the first places of a collection; every layer of a sequence has as many picks."""
    random = np.random.default_rng(3)
    found = np.zeros((capacity, layers, experts), np.float32)
    for s, number in enumerate(picks):
        for layer in range(layers):
            found[s, layer] = random.multinomial(number, np.ones(experts) / experts)
    return found


def test_sequences_of_a_collection_are_added(tmp_path: Path) -> None:
    path = saved(tmp_path, collection())
    assert recognise(path) == {}
    with pytest.raises(TraceError, match=r"looks like moe-infinity, but it is a stack .* name the format moe-infinity"):
        import_files("auto", [path])
    profile, defects = read("moe-infinity", path, model="switch", top_k=1, layers=(1, 3, 5))
    assert_array_equal(profile.counts, collection().sum(axis=0))
    assert_array_equal(profile.counts.sum(axis=1), 15)
    assert profile.layer_index.tolist() == [1, 3, 5]
    assert (profile.top_k, profile.scale, profile.metadata["num_sequences"]) == (1, "counts", 2)
    assert defects == ["padding"]
    again = FrequencyProfile.from_moe_infinity(collection(), model="switch", top_k=1, layers=[1, 3, 5])
    assert_array_equal(again.counts, profile.counts)
    assert again.metadata["how"] == "from numbers in memory (moe-infinity)"
    assert FrequencyProfile.from_moe_infinity(path).num_layers == 3
    np.savez(tmp_path / "table.npz", trace_collection=collection())
    assert list(recognise(tmp_path / "table.npz")) == ["moe-infinity"]
    assert_array_equal(read("moe-infinity", tmp_path / "table.npz")[0].counts, profile.counts)


def test_encoder_and_decoder_may_differ_in_picks(tmp_path: Path) -> None:
    both = np.concatenate([collection((6, 9)), collection((2, 4))], axis=1)
    three = np.concatenate([both, collection((1, 1))], axis=1)
    for array, message in ((both, "looks like moe-infinity, but it is a stack"), (three, "do not have as many picks")):
        with pytest.raises(TraceError, match=message):
            import_files("auto", [saved(tmp_path, array.astype(float))])


@pytest.mark.parametrize(
    "array",
    [
        -collection(), collection() + 0.5, np.zeros((2, 3, 4)), collection()[0], collection().astype("U8"),
        np.full((1, 2, 2), np.nan), collection(capacity=3)[:0], np.arange(24).reshape(2, 3, 4),
    ],
)  # fmt: skip
def test_other_arrays_are_not_taken_for_a_collection(tmp_path: Path, array: np.ndarray) -> None:
    assert "moe-infinity" not in recognise(saved(tmp_path, array))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (collection()[0], r"shape (3, 4), expected numbers [sequences, layers, experts]"),
        (np.zeros((2, 3, 4)), "no expert was used in any layer"),
        (-collection(), "sequence 0, layer row 0, expert 1 is -1.0"),
        (np.where(collection() > 1, np.nan, collection()), "is nan, expected a finite number"),
        (np.full((1, 1, 2), np.inf), "is inf"),
        (np.ones((1, 1, 65536), np.uint8), "1 layers of 65536 experts"),
        (np.ones((5000, 100, 100), np.uint8), "need 400,000,000 bytes"),
        (np.ones((2, 2, 2), bool), "dtype bool"),
        (np.array([[["a"]]]), "dtype <U1"),
    ],
)
def test_what_is_no_collection_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    assert message in refused("moe-infinity", saved(tmp_path, array))


def test_collections_in_memory_are_checked_too() -> None:
    for value, message in (([[1, 2]], "shape"), ([[[1], [2, 3]]], "no array"), ([[[-1.0]]], "is -1.0")):
        with pytest.raises(TraceError, match=message):
            FrequencyProfile.from_moe_infinity(value)
    with pytest.raises(TraceError, match="layers names 1 layers; allowed: 3"):
        FrequencyProfile.from_moe_infinity(collection(), layers=[1])


# ---- KTransformers and shares ----


TABLES = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8]),
    st.tuples(st.integers(1, 6), st.integers(2, 6)),
    elements={"min_value": 0, "max_value": 200},
)


@given(table=TABLES)
def test_tables_come_back_without_unused_layers(table: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("table")
    np.savez(folder / "table.npz", activation_freq=table)
    assert list(recognise(folder / "table.npz")) == ["ktransformers"]
    path = saved(folder, table)
    used = [row for row, counts in enumerate(table.tolist()) if any(counts)]
    if not used:
        assert "no expert was used" in refused("ktransformers", path)
        return
    profile, defects = read("ktransformers", path)
    assert_array_equal(profile.counts, table[used].astype(np.float64))
    assert profile.layer_index.tolist() == used
    assert defects == ["padding"] * (len(used) < len(table))
    whole = all(float(value).is_integer() for row in table.tolist() for value in row)
    assert profile.scale == ("counts" if whole else "shares")


@given(data=st.data())
def test_sums_show_that_a_matrix_counts_picks(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    layers, experts = data.draw(st.integers(8, 20)), data.draw(st.integers(8, 64))
    counts = random.multinomial(data.draw(st.integers(50, 1000)), random.dirichlet(np.ones(experts)), size=layers)
    folder = tmp_path_factory.mktemp("table")
    with_dense = np.concatenate([np.zeros((1, experts), int), counts])
    for table in (counts, with_dense, counts.astype(np.float32), counts / counts.sum(axis=1, keepdims=True)):
        path = saved(folder, table)
        assert recognise(path) == {}
        with pytest.raises(TraceError, match=r"without a name, of (counts|shares) .* name the format ktransformers"):
            import_files("auto", [path])
    off = counts.copy()
    off[0, 0] += 1
    for table in (off, off / off.sum(), counts[:1]):
        with pytest.raises(TraceError, match=r"^(?!.*without a name).*is of no known format"):
            import_files("auto", [saved(folder, table)])


RANDOM = np.random.default_rng(5)
PICKED = RANDOM.random((200, 64)).argsort(axis=1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (PICKED[:, :8], r"looks like vllm, but has shape \(200, 8\), expected \[tokens, layers, picks\]"),
        (np.arange(32)[:, None] * 8 + np.arange(8), "looks like ktransformers, but .* neither one sum"),
        (PICKED[:, :8].argsort(axis=1).argsort(axis=1), "looks like vllm"),  # ranks: each row the same numbers
        ((PICKED < 4).astype(np.int8), "looks like vllm"),  # masks of four picks
        (RANDOM.integers(0, 32_000, (200, 8)), "looks like"),  # words
        (RANDOM.random((5000, 64)).astype(np.float32), "is of no known format"),
        (np.sort(RANDOM.dirichlet(np.ones(4), size=50))[:, ::-1], "neither one sum"),  # weights of picks
        (RANDOM.normal(size=(24, 60)) ** 2, "neither one sum"),
        (PICKED[None, :, :8] == 0, "is of no known format"),
        (np.zeros((4, 8, 8)), "looks like moe-infinity, but .*zeros and ones only"),
        (np.eye(8)[PICKED[:, :3] % 8], "zeros and ones only"),
    ],
)
def test_numbers_of_which_nothing_tells_what_they_are(tmp_path: Path, array: np.ndarray, message: str) -> None:
    path = saved(tmp_path, array)
    assert recognise(path) == {}
    with pytest.raises(TraceError, match=message):
        import_files("auto", [path])


def test_every_way_to_store_a_table(tmp_path: Path) -> None:
    table = np.array([[1.0, 2.0, 3.0], [3.0, 0.0, 1.0]])
    files = [saved(tmp_path, table), tmp_path / "t.npz", tmp_path / "t.safetensors"]
    np.savez(files[1], activation_freq=table)
    save_file({"activation_freq": table}, files[2])
    for path in files:
        assert list(recognise(path)) == ([] if path == files[0] else ["ktransformers"])
        assert_array_equal(read("ktransformers", path)[0].counts, table)
    assert_array_equal(FrequencyProfile.from_ktransformers(table.tolist()).counts, table)
    assert FrequencyProfile.from_ktransformers(files[0], model="m", top_k=2, num_experts=3).top_k == 2


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        (np.ones((2, 2, 2)), {}, "has shape (2, 2, 2) of float64, expected [layers, experts]"),
        (np.ones((2, 2)), {"num_experts": 3}, "holds 2 experts a layer, --num-experts says 3"),
        (np.ones((2, 2)), {"top_k": 3}, "top_k is 3"),
        (np.ones((2, 2)), {"layers": (0,)}, "--layers names 1 layers; allowed: 2"),
        (np.ones((2, 2)), {"layers": (1, 0)}, "expected layers that increase"),
        (np.ones((2, 2)), {"prompt_len": (1,)}, "--prompt-len: has no meaning"),
        (np.array([[1, -1]]), {}, "expert 1 is -1"),
        (np.array([[1, np.nan]]), {}, "expert 1 is nan"),
        (np.ones((1, 70000), np.uint8), {}, "1 layers of 70000 experts"),
        (np.ones((2, 2), complex), {}, "dtype complex128"),
        (np.array([["a", "b"]]), {}, "dtype <U1"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, array: np.ndarray, options: dict[str, Any], message: str) -> None:
    path = saved(tmp_path, array)
    with pytest.raises(TraceError) as caught:
        import_files("ktransformers", [path], ImportOptions(**options))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_files_are_no_tables(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", other=np.ones((2, 2)))
    assert "expected a matrix activation_freq [layers, experts], holds other" in refused(
        "ktransformers", tmp_path / "a.npz"
    )
    (tmp_path / "a.txt").write_text("1 2 3\n")
    assert "holds no array (text file)" in refused("ktransformers", tmp_path / "a.txt")
    assert "holds no array (text file)" in refused("moe-infinity", tmp_path / "a.txt")
    with pytest.raises(TraceError, match="a second file"):
        import_files("ktransformers", [saved(tmp_path, np.ones((2, 2)))] * 2)
    np.save(tmp_path / "objects.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    assert "pickled Python objects" in refused("ktransformers", tmp_path / "objects.npy")


def test_a_header_of_a_table_that_is_not_there(tmp_path: Path) -> None:
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (1048576, 1048576), }".ljust(117) + "\n"
    path = tmp_path / "huge.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode() + bytes(64))
    for name in ("ktransformers", "moe-infinity"):
        assert "declares shape (1048576, 1048576)" in refused(name, path)


# ---- ranked lists ----


def ranked(layers: int = 3, experts: int = 4, seed: int = 0) -> list[tuple[int, int]]:
    pairs = list(itertools.product(range(layers), range(experts)))
    np.random.default_rng(seed).shuffle(pairs)
    return [(int(layer), int(expert)) for layer, expert in pairs]


def lines(folder: Path, pairs: Sequence[tuple[int, int]], end: str = "\n") -> Path:
    (folder / "rank.csv").write_bytes("".join(f"{layer},{expert}{end}" for layer, expert in pairs).encode())
    return folder / "rank.csv"


@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 99))
def test_the_order_of_a_list_is_kept(layers: int, experts: int, seed: int) -> None:
    pairs = ranked(layers, experts, seed)
    profile = FrequencyProfile.from_popularity_rank(pairs, top_k=2)
    assert profile.scale == "ranks"
    assert profile.top_k == 2
    for layer in range(layers):
        assert profile.order()[layer].tolist() == [expert for row, expert in pairs if row == layer]
    # Larger means more often across layers too.
    flat = {pair: profile.counts[pair] for pair in pairs}
    assert sorted(flat, key=flat.__getitem__, reverse=True) == pairs
    assert (profile.counts > 0).all()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lists_are_recognised_and_read(tmp_path: Path, end: str) -> None:
    path = lines(tmp_path, ranked(), end)
    assert list(recognise(path)) == ["popularity-rank"]
    assert_array_equal(
        FrequencyProfile.from_popularity_rank(path).counts, FrequencyProfile.from_popularity_rank(ranked()).counts
    )
    long = lines(tmp_path, ranked(120, 128))
    assert long.stat().st_size > 2**16
    assert "no pair twice" in recognise(long)["popularity-rank"]
    assert read("popularity-rank", long)[0].counts.shape == (120, 128)


def test_numbers_of_layers_are_kept(tmp_path: Path) -> None:
    pairs = [(layer + 5, expert) for layer, expert in ranked(2, 2)]
    assert read("popularity-rank", lines(tmp_path, pairs))[0].layer_index.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0,1\n0,0\n0,1\n", "layer 0, expert 1 is both number 1 and 3"),
        ("0,1\n", "1 pairs of 1 layers and experts 0..1; expected each of the 2 pairs once"),
        ("0,0\n0,1\n1,0\n", "expected each of the 4 pairs once"),
        ("0,0\n0,65534\n", "expected each of the 65535 pairs once"),
        ("0,0\n0,65535\n", "line 2: expert is '65535', expected an integer in 0..65534"),
        ("0,0\n0,99999999999999999999999\n", "line 2: expert is"),
        ("0,0\n0\n", "line 2: 1 columns; allowed: 2"),
        ("0,0\n0,1,2\n", "line 2: 3 columns"),
        ("layer,expert\n0,0\n", "line 1: layer is 'layer'"),
        ("0,0\n\n0,1\n", "line 2: 1 columns"),
        ("-1,0\n", "line 1: layer is '-1'"),
        ("0,1.0\n", "line 1: expert is '1.0'"),
        ("0," + "1" * 1000 + "\n", "line 1 is longer than 256 bytes"),
        ("0," * 10**6, "line 1 is longer"),
        ("0,\0\n", "holds the byte zero"),
        ("0,٣\n", "line 1: expert is"),
    ],
)
def test_bad_lists_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rank.csv"
    path.write_bytes(content.encode())
    assert message in refused("popularity-rank", path)
    assert "popularity-rank" not in recognise(path)


def test_empty_lists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="0 pairs of 0 layers"):
        FrequencyProfile.from_popularity_rank([])
    (tmp_path / "rank.csv").touch()
    assert "is empty" in refused("popularity-rank", tmp_path / "rank.csv")


# ---- TensorRT-LLM ----


def statistics(folder: Path, ranks: int = 2, **changes: Any) -> tuple[Path, np.ndarray]:
    """A folder of statistics of iterations 50 and 51 in layers 3 and 4, and its sums [layers, experts]."""
    random = np.random.default_rng(7)
    place = folder / "statistics"
    place.mkdir(exist_ok=True)
    sums = np.zeros((2, 4))
    for rank in range(ranks):
        tensors = {}
        for iteration, (row, layer) in itertools.product((50, 51), enumerate((3, 4))):
            counts = random.integers(0, 99, 4).astype(np.int32)
            sums[row] += counts
            tensors[f"{iteration}_{layer}"] = counts
        save_file(tensors, place / f"rank{rank}.safetensors")
        save_file({"50_3": np.eye(4)}, place / f"cooccurrence_rank{rank}.safetensors")
        save_file({"x": np.ones(3)}, place / f"rank{rank}_raw.safetensors")
    meta = {"num_experts": 4, "num_experts_per_token": 2, **changes}
    (place / "meta_info.json").write_text(json.dumps({key: one for key, one in meta.items() if one is not None}))
    return place, sums


def test_ranks_and_iterations_are_added(tmp_path: Path) -> None:
    folder, sums = statistics(tmp_path)
    assert list(recognise(folder)) == ["tensorrt-llm"]
    profile, defects = read("tensorrt-llm", folder, model="m")
    assert_array_equal(profile.counts, sums)
    assert profile.layer_index.tolist() == [3, 4]
    assert (profile.top_k, profile.scale, defects) == (2, "counts", [])
    assert profile.metadata["iterations"] == [50, 51]
    assert profile.metadata["ranks"] == 2
    assert_array_equal(FrequencyProfile.from_tensorrt_llm(folder, model="m").counts, sums)


def test_stages_of_a_pipeline_have_layers_of_their_own_and_no_iteration_is_skipped(tmp_path: Path) -> None:
    folder, _ = statistics(tmp_path)
    replaced({f"{i}_{n}": COUNTS for i in (50, 51) for n in (7, 8)})(folder)
    assert read("tensorrt-llm", folder)[0].layer_index.tolist() == [3, 4, 7, 8]
    for rank in (0, 1):
        save_file({f"{i}_3": COUNTS for i in (50, 51, 53)}, folder / f"rank{rank}.safetensors")
    assert "has iterations 50 to 53 without iteration 52" in refused("tensorrt-llm", folder)


def test_options_in_memory_are_checked_as_those_of_files() -> None:
    table = np.array([[1, 2, 3], [3, 2, 1]])
    for make in (
        lambda: FrequencyProfile.from_ktransformers(table, layers=3),  # type: ignore[arg-type]
        lambda: FrequencyProfile.from_ktransformers(table, layers=["x"]),  # type: ignore[list-item]
        lambda: FrequencyProfile.from_ktransformers(table, top_k="x"),  # type: ignore[arg-type]
        lambda: FrequencyProfile.from_moe_infinity(table[None], layers=3.5),  # type: ignore[arg-type]
        lambda: FrequencyProfile.from_popularity_rank([(0, 0)], model=""),
        lambda: FrequencyProfile.from_sglang_stat("none", layers=[2, 1]),
        lambda: FrequencyProfile.from_imatrix(["none", "nil"], num_experts=0),
    ):
        with pytest.raises(TraceError) as caught:
            make()
        assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match="none: no such file"):
        FrequencyProfile.from_imatrix(["none", "nil"])


def test_picks_may_be_left_open(tmp_path: Path) -> None:
    folder, _ = statistics(tmp_path, num_experts_per_token=None)
    assert read("tensorrt-llm", folder)[0].top_k is None
    assert read("tensorrt-llm", folder, top_k=3)[0].top_k == 3


def test_sums_beyond_32_bits_are_right(tmp_path: Path) -> None:
    folder, _ = statistics(tmp_path, ranks=1)
    top = np.full(4, 2**31 - 1, np.int32)
    save_file({"0_0": top, "1_0": top, "2_0": top}, folder / "rank0.safetensors")
    assert_array_equal(read("tensorrt-llm", folder)[0].counts, [[3 * (2**31 - 1)] * 4])


def replaced(tensors: dict[str, np.ndarray]) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors, folder / "rank1.safetensors")


COUNTS = np.ones(4, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "meta_info.json").unlink(), "meta_info.json: no such file"),
        (lambda folder: (folder / "meta_info.json").write_text("[" * 10**5), "meta_info.json: is nested too deeply"),
        (lambda folder: (folder / "meta_info.json").write_text('{"num_experts": 1e400}'), "no finite number"),
        (lambda folder: (folder / "meta_info.json").write_text('{"num_experts": 4, "num_experts": 5}'), "occurs twice"),
        (lambda folder: (folder / "meta_info.json").write_text("[4]"), "expected an object"),
        (lambda folder: (folder / "meta_info.json").write_text("{}"), "lacks 'num_experts'"),
        (lambda folder: (folder / "meta_info.json").write_text('{"num_experts": true}'), "num_experts is True"),
        (lambda folder: (folder / "meta_info.json").write_text('{"num_experts": 5}'), "expected 5 integers"),
        (lambda folder: (folder / "rank0.safetensors").unlink(), "expected rank0.safetensors and on, no gap"),
        (lambda folder: [one.unlink() for one in folder.glob("rank?.safetensors")], "files of ranks are none"),
        (lambda folder: (folder / "rank1.safetensors").write_bytes(bytes(100)), "is no safetensors file"),
        (replaced({}), "holds no tensors"),
        (replaced({"50": COUNTS}), "tensor '50'; allowed: names such as 50_3"),
        (replaced({"50_3": COUNTS.astype(np.float32)}), "of F32, expected 4 integers"),
        (replaced({"50_3": COUNTS[:3]}), "has shape (3,) of I32"),
        (replaced({"50_3": -COUNTS}), "holds -1, expected counts >= 0"),
        (replaced({"50_3": COUNTS, "050_3": COUNTS}), "iteration 50 has layer 3 twice"),
        (replaced({"52_3": COUNTS}), "rank1.safetensors: lacks iteration 50, which rank0.safetensors has"),
        (replaced({"50_3": COUNTS, "50_4": COUNTS, "51_3": COUNTS, "51_5": COUNTS}), "iteration 50 lacks layer 5"),
        (replaced({"50_3": COUNTS, "51_3": COUNTS}), "lacks layer 4, which rank0.safetensors has beside others"),
        (replaced({"50_3": COUNTS, "50_4": COUNTS}), "rank1.safetensors: lacks iteration 51"),
    ],
)
def test_broken_folders_are_refused(tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    folder, _ = statistics(tmp_path)
    change(folder)
    assert message in refused("tensorrt-llm", folder)


def test_what_is_no_folder_of_statistics(tmp_path: Path) -> None:
    assert recognise(tmp_path) == {}
    path = saved(tmp_path, np.ones((2, 2)))
    assert "is no folder" in refused("tensorrt-llm", path)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 4}')
    assert recognise(tmp_path) == {}


# ---- recordings of others ----


def test_published_tables_of_a_large_model(shared: Path) -> None:
    folder = shared / "traces" / "mixtral-counts"
    profile, defects = read("ktransformers", folder / "mixtral-8x7b-instruct-frequencies.npy", top_k=2)
    assert (profile.counts.shape, profile.scale, defects) == ((32, 8), "shares", [])
    falling = -np.sort(-profile.shares(), axis=1)
    # Measured: the upper half of the experts takes .629 of all uses [.574 to .688], the first one .197.
    half = falling[:, :4].sum(axis=1)
    assert_allclose([half.mean(), half.min(), half.max()], [0.629, 0.574, 0.688], rtol=0, atol=5e-4)
    assert_allclose(falling[:, 0].mean(), 0.197, rtol=0, atol=5e-4)
    order, _ = read("popularity-rank", folder / "mixtral-8x7b-popularity-rank.csv")
    assert (order.counts.shape, order.scale) == ((32, 8), "ranks")
    assert order.counts[9, 5] == 256
    assert recognise(folder / "mixtral-8x7b-instruct-frequencies.npy") == {}
    assert list(recognise(folder / "mixtral-8x7b-popularity-rank.csv")) == ["popularity-rank"]
