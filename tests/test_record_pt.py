"""Files of ``torch.save``: read where torch is, checked before it is imported, and refused where it is not."""

import importlib.util
import io
import json
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import import_files, recognise
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_nested, read_pt
from perfmodel.routing.importers.pt_outline import Outline, outline
from perfmodel.routing.profile import FrequencyProfile

torch = pytest.importorskip("torch")

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


def content() -> dict[str, Any]:
    """Everything that a dump may nest."""
    numbers = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)
    shared: list[Any] = []
    return {
        "tensors": {name: (numbers[0] % 2).to(getattr(torch, name)) for name in DTYPES},
        "views": [numbers.transpose(0, 2), numbers[:, 1:, ::2], numbers[1, 2, 3], torch.zeros(0, 3)],
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "plain": [1, -5, 2**40, 1.5, True, None, "text", (1, 2), {3: "three"}],
        "same": [shared, shared],
    }


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        wide = expected.float() if expected.dtype == torch.bfloat16 else expected
        return (
            isinstance(found, np.ndarray) and found.dtype == wide.numpy().dtype and np.array_equal(found, wide.numpy())
        )
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def test_everything_that_a_dump_holds_comes_back(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "a.pt")
    assert same(read_pt(tmp_path / "a.pt"), content())


def test_the_outline_has_the_shapes_and_types_of_the_tensors(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "a.pt")
    found, read = outline(tmp_path / "a.pt"), read_pt(tmp_path / "a.pt")

    def check(one: Any, other: Any) -> None:
        if isinstance(one, Outline):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
        elif isinstance(one, dict):
            for key in one:
                check(one[key], other[key])
        elif isinstance(one, list):
            for pair in zip(one, other, strict=True):
                check(*pair)
        else:
            assert one == other

    check(found, read)


def test_a_probe_looks_into_the_file(tmp_path: Path) -> None:
    torch.save(torch.ones(2, 3), tmp_path / "a.pt")
    probe = Probe.of(tmp_path / "a.pt")
    assert probe.kind == "pt"
    assert probe.shapes == {"": ((2, 3), np.dtype("f4"))}
    np.testing.assert_array_equal(probe.array(), np.ones((2, 3)))


def test_a_dump_of_sglang(tmp_path: Path) -> None:
    ids = np.full((3, 4, 8), -1, np.int32)
    ids[1:, :, :2] = np.argsort(np.random.default_rng(0).random((2, 4, 6)), axis=2)[:, :, :2]
    record = {
        "forward_pass_id": 1,
        "input_ids": [7, 8, 9, 10],
        "positions": [0, 1, 2, 3],
        "extend_seq_lens": [4],
        "forward_mode": 1,
        "topk_ids_of_layer": torch.from_numpy(ids),
        "misc_objects": [],
    }
    mapping = torch.arange(6).repeat(3, 1)
    torch.save({"records": [record], "last_physical_to_logical_map": mapping}, tmp_path / "a.pt")
    assert list(recognise(tmp_path / "a.pt")) == ["sglang"]
    trace = import_files("auto", [tmp_path / "a.pt"]).result
    assert isinstance(trace, RoutingTrace)
    np.testing.assert_array_equal(trace.topk_ids, ids[1:, :, :2].transpose(1, 0, 2))
    counts = torch.arange(36).reshape(2, 3, 6)
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, tmp_path / "c.pt")
    profile = import_files("auto", [tmp_path / "c.pt"]).result
    assert isinstance(profile, FrequencyProfile)
    np.testing.assert_array_equal(profile.counts, counts.sum(0).numpy())


def test_without_torch_the_message_says_how_to_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"logical_count": torch.ones(1, 2, 3, dtype=torch.int32)}, "a.pt")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(TraceError, match="needs torch") as caught:
        read_pt(Path("a.pt"))
    message = str(caught.value)
    assert "\n" not in message
    recipe = message[message.index('-c "') + 4 : message.rindex('"')]
    subprocess.run([sys.executable, "-c", recipe], check=True)
    assert read_nested(Path("a.json")) == {"logical_count": [[[1, 1, 1], [1, 1, 1]]]}
    assert list(recognise("a.pt")) == ["sglang-stat"]


# ---- hostile files ----


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must never run",)


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None], compress: int = zipfile.ZIP_STORED) -> None:
    """The same archive with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in members.items():
            new = change(name, data)
            if new is not None:
                archive.writestr(name, new)


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def doubled(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


def looped() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": Payload()}, "names '__builtin__.print', which is not run"),
        ({"a": np.ones(3)}, "which is not run"),
        ({"a": torch.nn.Linear(2, 2)}, "which is not run"),
        ({"a": torch.nn.Parameter(torch.ones(2))}, "which is not run"),
        ({"a": torch.ones(1).expand(10**9)}, "does not fit its 1 numbers"),
        ({"a": torch.ones(2).to_sparse()}, "which is not run"),
        ({(1, 2): 3}, "keys that are neither text nor integers"),
        (nest(100), "nested more than 50 deep"),
        (doubled(60), "nested more than 50 deep"),
        (looped(), "or holds itself"),
        ({"a": {1, 2}}, "its pickle"),
    ],
)
def test_what_is_more_than_tensors_and_tables_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(TraceError, match=message) as caught:
        read_pt(tmp_path / "a.pt")
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def swap_pickle(data: bytes) -> Callable[[str, bytes], bytes | None]:
    return lambda name, old: data if name.endswith("data.pkl") else old


#: A tensor of 2**40 numbers over storage "0", which the archive has with four bytes; and one of a negative size.
HUGE, NEGATIVE = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpu" + count + b"tQK\x00" + size + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR."
    for count, size in ((b"\x8a\x06\x00\x00\x00\x00\x00\x01", b"K\x01"), (b"K\x01", b"J\xff\xff\xff\xff"))
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_pickle(HUGE), "data/0 has 4 bytes, for 1099511627776 numbers"),
        (swap_pickle(NEGATIVE), "makes a tensor of negative size"),
        (swap_pickle(b"\x80\x02K\x01"), "cannot be read as a .pt file"),
        (swap_pickle(b"\x80\x02K\x01.x"), "bytes after its end"),
        (swap_pickle(b"\x80\x02."), "cannot be read as a .pt file"),
        (swap_pickle(b"\x80\x02a."), "cannot be read as a .pt file|empty stack"),
        (swap_pickle(b"\x80\x02K\x01K\x02a."), "fills a int as a list"),
        (swap_pickle(b"\x80\x02K\x01)R."), "calls what is no function"),
        (swap_pickle(b"cposix\nsystem\n(X\x02\x00\x00\x00lstR."), "names 'posix.system'"),
        (swap_pickle(b"\x80\x04\x8c\x05posix\x8c\x06system\x93."), "holds the instruction STACK_GLOBAL"),
        (lambda name, old: b"big" if name.endswith("byteorder") else old, "byte order b'big'"),
        (lambda name, old: old[:-1] if name.endswith("data/0") else old, "has 3 bytes, for 1 numbers"),
        (lambda name, old: None if name.endswith("data/0") else old, "has no bytes"),
        (lambda name, old: None if name.endswith("data.pkl") else old, "no folder|one folder with a data.pkl"),
    ],
)
def test_damaged_archives_are_refused(
    tmp_path: Path, change: Callable[[str, bytes], bytes | None], message: str
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", change)
    with pytest.raises(TraceError, match=message):
        read_pt(tmp_path / "a.pt")


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", lambda _, old: old, zipfile.ZIP_DEFLATED)
    with pytest.raises(TraceError, match="is compressed, which"):
        read_pt(tmp_path / "a.pt")


def test_the_old_kind_of_file_is_a_pickle(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(TraceError, match="is a pickle file; allowed"):
        read_nested(tmp_path / "a.pt")


def test_refusing_needs_no_torch(tmp_path: Path) -> None:
    torch.save({"records": Payload()}, tmp_path / "a.pt")
    script = (
        "import sys\nfrom pathlib import Path\nfrom perfmodel.errors import TraceError\n"
        "from perfmodel.routing.importers import import_files\n"
        f"try: import_files('auto', [{str(tmp_path / 'a.pt')!r}])\n"
        "except TraceError as error: print(error)\n"
        "print(sorted({'numba', 'torch'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "__builtin__.print" in found
    assert found.splitlines()[-1] == "[]"


def test_arrays_named_by_their_place(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"records/0/x": [1], "records/1/x": [2], "map": [[3]]})  # type: ignore[arg-type]
    found = read_nested(tmp_path / "a.npz")
    assert [one["x"].tolist() for one in found["records"]] == [[1], [2]]
    assert found["map"].tolist() == [[3]]
    np.savez(tmp_path / "b.npz", **{"a/b": [1], "a": [2]})  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="both an array and a folder"):
        read_nested(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{"a": [1], "a/b": [2]})  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="lies within another array"):
        read_nested(tmp_path / "c.npz")
    (tmp_path / "d.json").write_text(json.dumps({"a": [1]}))
    assert read_nested(tmp_path / "d.json") == {"a": [1]}


def test_pickles_of_other_tools_are_never_opened(tmp_path: Path) -> None:
    stream = io.BytesIO()
    pickle.dump(Payload(), stream)
    (tmp_path / "a.pkl").write_bytes(stream.getvalue())
    with pytest.raises(TraceError, match=r"is of no known format \(a pickle file"):
        import_files("auto", [tmp_path / "a.pkl"])
