"""Importance matrices of llama.cpp become frequency profiles, where they hold counts at all."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf_files import LIST, TEXT, value, whole_file
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from perfmodel.errors import TraceError
from perfmodel.routing.importers import import_files, recognise
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.profile import FrequencyProfile

STATED = (
    value("general.type", TEXT, "imatrix"),
    value("imatrix.datasets", LIST, ["wiki.txt"], TEXT),
    value("imatrix.chunk_count", 4, 3),
    value("imatrix.chunk_size", 4, 512),
)
TABLE = {1: [3, 1, 0, 4], 2: [2, 2, 2, 2], 10: [8, 0, 0, 0]}


def tensors(
    table: dict[int, Sequence[float]] = TABLE, tokens: float | None = 4, kinds: Sequence[str] = ("gate", "up", "down")
) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """The tensors of a file: sums and counts of the experts' matrices, and of an attention matrix."""
    found: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    for layer, counts in table.items():
        for kind in kinds:
            name = f"blk.{layer}.ffn_{kind}_exps.weight"
            found[f"{name}.in_sum2"] = ((2, len(counts)), [0.5] * 2 * len(counts))
            found[f"{name}.counts"] = ((1, len(counts)), counts)
        if tokens is not None:
            found[f"blk.{layer}.attn_q.weight.in_sum2"] = ((2, 1), [1.0, 2.0])
            found[f"blk.{layer}.attn_q.weight.counts"] = ((1, 1), [tokens])
    return found


def write(folder: Path, found: dict[str, Any], name: str = "m.gguf", values: Sequence[bytes] = STATED) -> Path:
    (folder / name).write_bytes(whole_file(found, values))
    return folder / name


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        import_files("imatrix", [path], ImportOptions(**options))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_counts_become_a_profile(tmp_path: Path) -> None:
    path = write(tmp_path, tensors())
    assert list(recognise(path)) == ["imatrix"]
    imported = import_files("auto", [path], ImportOptions(model="a model"))
    profile = imported.result
    assert isinstance(profile, FrequencyProfile)
    assert not imported.findings
    assert_array_equal(profile.counts, list(TABLE.values()))
    assert_array_equal(profile.layer_index, [1, 2, 10])
    assert (profile.top_k, profile.scale) == (2, "counts")
    assert profile.metadata == {
        "model": "a model", "source": "from-counts", "how": "imported from m.gguf (imatrix)",
        "import_format": "imatrix", "id_space": "logical", "phase": "prefill", "tokens": 4, "chunks": 3,
        "chunk_size": 512, "datasets": ["wiki.txt"],
    }  # fmt: skip
    assert FrequencyProfile.from_imatrix(path, model="a model").content_hash() == profile.content_hash()


def test_files_of_one_model_are_added(tmp_path: Path) -> None:
    more = {1: [1, 1, 1, 1], 2: [0, 4, 0, 0], 10: [0, 0, 4, 0]}
    files = [write(tmp_path, tensors()), write(tmp_path, tensors(more, tokens=2), "n.gguf")]
    profile = FrequencyProfile.from_imatrix(*files)
    assert_array_equal(profile.counts, [[4, 2, 1, 5], [2, 6, 2, 2], [8, 0, 4, 0]])
    assert (profile.top_k, profile.metadata["tokens"], profile.metadata["chunks"]) == (2, 6, 6)
    assert profile.metadata["datasets"] == ["wiki.txt", "wiki.txt"]
    other = write(tmp_path, tensors({1: [1, 1, 1, 1]}), "o.gguf")
    with pytest.raises(TraceError, match=r"o\.gguf: counts 1 layers of 4 experts, m\.gguf 3 of 4"):
        FrequencyProfile.from_imatrix(files[0], other)


@pytest.mark.parametrize(
    ("tokens", "picks"),
    [(4, 2), (8, 1), (2, 4), (3, None), (16, None), (1, None), (None, None), (0, None), (float("nan"), None)],
)
def test_picks_follow_from_tokens_where_they_are_whole(tmp_path: Path, tokens: float | None, picks: int | None) -> None:
    profile = FrequencyProfile.from_imatrix(write(tmp_path, tensors(tokens=tokens)))
    assert profile.top_k == picks
    if picks is None:
        assert FrequencyProfile.from_imatrix(tmp_path / "m.gguf", top_k=3).top_k == 3


def test_layers_that_are_counted_unlike_tell_no_picks(tmp_path: Path) -> None:
    assert FrequencyProfile.from_imatrix(write(tmp_path, tensors({0: [4, 4], 1: [4, 0]}))).top_k is None


@given(
    table=st.dictionaries(
        st.integers(0, 99), st.lists(st.integers(0, 2**24), min_size=4, max_size=4), min_size=1, max_size=4
    )
)
def test_any_counts_come_back(table: dict[int, list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("any"), tensors(table, tokens=None, kinds=["down"]))
    used = {layer: counts for layer, counts in sorted(table.items()) if any(counts)}
    if not used:
        assert "no expert was used in any layer" in refused(path)
        return
    imported = import_files("imatrix", [path])
    profile = imported.result
    assert isinstance(profile, FrequencyProfile)
    assert_array_equal(profile.counts, list(used.values()))
    assert profile.layer_index.tolist() == list(used)
    assert [one.defect for one in imported.findings] == ["padding"] * (len(used) < len(table))


def test_options_must_agree_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, tensors())
    assert "holds 4 experts a layer, --num-experts says 8" in refused(path, num_experts=8)
    assert "a token has 2 picks, --top-k says 1" in refused(path, top_k=1)
    with pytest.raises(TraceError, match="--prompt-len: has no meaning"):
        import_files("imatrix", [path], ImportOptions(prompt_len=(3,)))
    with pytest.raises(TraceError, match="--mend"):
        import_files("imatrix", [path], ImportOptions(mend=frozenset({"padding"})))


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("up", ((1, 4), [3, 1, 1, 3]), "differs from the counts of another matrix of layer 1"),
        ("up", ((1, 3), [3, 1, 0]), "differs from the counts of another matrix of layer 1"),
        ("gate", ((1, 1), [8]), "one count for all experts"),
        ("gate", ((1, 4), [3, -1, 0, 4]), "expert 1 is -1.0"),
        ("gate", ((1, 4), [3, 1, 0.5, 4]), "expert 2 is 0.5, expected a whole number"),
        ("gate", ((1, 4), [float("nan"), 1, 0, 4]), "expert 0 is nan"),
        ("gate", ((1, 4), [3, 1, 0, float("inf")]), "expert 3 is inf"),
    ],
)
def test_damaged_counts_are_refused(tmp_path: Path, name: str, entry: Any, message: str) -> None:
    found = {**tensors(), f"blk.1.ffn_{name}_exps.weight.counts": entry}
    assert message in refused(write(tmp_path, found))


def test_layers_of_unlike_size_are_refused(tmp_path: Path) -> None:
    assert "layers have 2 to 3 experts" in refused(write(tmp_path, tensors({0: [1, 1], 1: [1, 1, 1]})))


def test_other_gguf_files_are_refused(tmp_path: Path) -> None:
    dense = {"blk.0.ffn_up.weight.counts": ((1, 1), [4.0]), "blk.0.ffn_up.weight.in_sum2": ((1, 1), [4.0])}
    assert "counts no experts (general.type is 'imatrix')" in refused(write(tmp_path, dense))
    weights = write(
        tmp_path, {"blk.0.ffn_up_exps.weight": ((2,), [1, 2])}, values=[value("general.type", TEXT, "model")]
    )
    assert "general.type is 'model'" in refused(weights)
    assert recognise(weights) == {}
    (tmp_path / "t.txt").write_text("hello\n")
    assert "is a text file; allowed: a GGUF file" in refused(tmp_path / "t.txt")


def legacy(entries: int = 1, name: bytes = b"blk.0.ffn_up_exps.weight", calls: int = 3, values: int = 8) -> bytes:
    numbers = struct.pack(f"<{values}f", *range(values))
    body = struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, values) + numbers
    return struct.pack("<i", entries) + body + struct.pack("<ii", calls, 8) + b"wiki.txt"


def test_the_older_layout_is_recognised_and_says_why_it_will_not_do(tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(legacy())
    assert recognise(path) == {"imatrix": "starts as a llama.cpp .dat importance matrix"}
    assert "holds no uses of experts" in refused(path)
    assert "--output-format gguf" in refused(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\0", legacy(entries=0), legacy(entries=-1), legacy(name=b""), legacy(name=b"\1\2\3."), legacy(calls=-1),
        legacy()[:40], struct.pack("<ii", 1, 2**31 - 1) + bytes(40), legacy(name=b"x" * 300 + b"."),
        legacy()[:28] + struct.pack("<ii", 3, 2**31 - 1) + bytes(8),
    ],
)  # fmt: skip
def test_other_bytes_are_not_taken_for_the_older_layout(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(data)
    assert "imatrix" not in recognise(path)
    assert "allowed: a GGUF file written by llama-imatrix" in refused(path)
