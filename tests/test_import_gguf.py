"""The reader of GGUF files against files of another writer and against files written by hand."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import LIST, TEXT, header, tensor, text, value, whole_file
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from perfmodel.errors import TraceError
from perfmodel.routing.importers.gguf import read_gguf

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
VALUES = st.one_of(
    st.tuples(st.just(TEXT), NAMES),
    st.tuples(st.just(4), st.integers(0, 2**32 - 1)),
    st.tuples(st.just(5), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just(7), st.booleans()),
    st.tuples(st.just(10), st.integers(0, 2**64 - 1)),
    st.tuples(st.just(12), st.floats(allow_nan=False)),
)


def write(folder: Path, data: bytes) -> Path:
    (folder / "some.gguf").write_bytes(data)
    return folder / "some.gguf"


def refused(folder: Path, data: bytes) -> str:
    with pytest.raises(TraceError) as caught:
        read_gguf(write(folder, data))
    message = str(caught.value)
    assert "some.gguf: " in message
    assert "\n" not in message
    return message


@given(
    values=st.dictionaries(NAMES.filter(lambda name: not name.startswith("general.")), VALUES, max_size=5),
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=4),
    alignment=st.sampled_from([8, 32, 64, 4096]),
    seed=st.integers(0, 9),
)
def test_files_of_another_writer_are_read_as_they_were_written(
    values: dict[str, tuple[int, object]],
    shapes: list[list[int]],
    alignment: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "other.gguf"
    writer = gguf.GGUFWriter(path, "")
    writer.add_custom_alignment(alignment)
    for name, (kind, content) in values.items():
        writer.add_key_value(name, content, gguf.GGUFValueType(kind))
    random = np.random.default_rng(seed)
    arrays = {f"t{i}": random.random(shape, np.float32) for i, shape in enumerate(shapes)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    assert found.version == 3
    assert {name: content for name, content in found.values.items() if not name.startswith("general.")} == {
        name: content for name, (_, content) in values.items()
    }
    assert found.values["general.alignment"] == alignment
    assert list(found.tensors) == list(arrays)
    numbers = found.read(arrays)
    for name, array in arrays.items():
        assert found.tensors[name].shape == array.shape[::-1]
        assert_array_equal(numbers[name], array.reshape(-1))


def test_every_kind_of_value_and_both_versions(tmp_path: Path) -> None:
    numbers = {
        0: 200,
        1: -100,
        2: 60000,
        3: -30000,
        4: 2**32 - 1,
        5: -(2**31),
        6: 0.5,
        7: True,
        10: 2**63,
        11: -5,
        12: 0.1,
    }
    entries = [value(f"v{kind}", kind, number) for kind, number in numbers.items()]
    entries += [value("words", LIST, ["a", "ß"], TEXT), value("list", LIST, [1, 2, 3], 4)]
    entries += [value("long", LIST, range(2000), 4), value("none", LIST, [], TEXT)]
    for version in (2, 3):
        data = whole_file({"t": ((3, 1), [1, 2, 3])}, entries, version=version)
        found = read_gguf(write(tmp_path, data))
        assert found.version == version
        assert {key: found.values[key] for key in found.values if key[0] == "v"} == {
            f"v{kind}": number for kind, number in numbers.items()
        }
        assert found.values["words"] == ("a", "ß")
        assert found.values["list"] == (1, 2, 3)
        assert found.values["long"] is None
        assert found.values["none"] == ()
        assert_array_equal(found.read(["t"])["t"], [1, 2, 3])


def test_machines_of_the_other_byte_order_are_named(tmp_path: Path) -> None:
    for data in (header(3, order=">"), header(2, order=">"), header(3, magic=b"FUGG", order=">")):
        assert "big-endian" in refused(tmp_path, data)
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "", endianess=gguf.GGUFEndian.BIG)
    writer.add_string("general.type", "imatrix")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(TraceError, match="big-endian"):
        read_gguf(path)


HUGE = 2**40


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF", "version needs 4 bytes, 0 are left"),
        (b"GGML" + bytes(40), "is no GGUF file; it starts with b'GGML'"),
        (header(1), "is version 1 of GGUF; allowed: 2, 3"),
        (header(4), "is version 4 of GGUF"),
        (header(0), "is version 0 of GGUF"),
        (header(tensors=HUGE), "number of tensors is 1099511627776; allowed: at most 20000"),
        (header(values=HUGE), "number of values is 1099511627776"),
        (header(values=1), "name of a value needs 8 bytes, 0 are left"),
        (header(values=1) + struct.pack("<Q", HUGE), "name of a value has 1099511627776 bytes"),
        (header(values=1) + text(b"\xff\xfe") + bytes(12), "name of a value is not UTF-8 text"),
        (header(values=1) + text(b"\xed\xa0\x80") + bytes(12), "not UTF-8"),
        (header(values=2) + 2 * value("a", 4, 1), "value 'a' occurs twice"),
        (header(values=1) + text("a") + struct.pack("<I", 13), "value 'a' is of type 13; allowed: 0 to 12"),
        (header(values=1) + text("a") + struct.pack("<IQ", TEXT, HUGE), "value 'a' has 1099511627776 bytes"),
        (header(values=1) + text("a") + struct.pack("<IIQ", LIST, LIST, 1), "is a list of type 9"),
        (header(values=1) + text("a") + struct.pack("<IIQ", LIST, TEXT, HUGE), "is a list of 1099511627776 texts"),
        (header(values=1) + text("a") + struct.pack("<IIQ", LIST, 4, HUGE), "value 'a' needs 4398046511104 bytes"),
        (header(values=1) + value("general.alignment", 4, 0), "general.alignment is 0"),
        (header(values=1) + value("general.alignment", 4, 12), "general.alignment is 12"),
        (header(values=1) + value("general.alignment", 6, 32.0), "general.alignment is 32.0"),
        (header(tensors=1) + text("t") + struct.pack("<I", 2**31), "tensor 't' has 2147483648 axes"),
        (header(tensors=1) + text("t") + struct.pack("<I", 0), "tensor 't' has 0 axes"),
        (header(tensors=1) + tensor("t", [HUGE, HUGE], 0), "larger than any file"),
        (header(tensors=1) + tensor("t", [1], 2**63), "larger than any file"),
        (header(tensors=1) + tensor("t", [1], 4), "is at byte 4, which is no multiple of 32"),
        (header(tensors=2) + tensor("t", [1], 0) + tensor("t", [1], 32), "tensor 't' occurs twice"),
        (header(values=1) + value("a\nb", 4, 1)[:-2], r"value 'a\nb' needs 4 bytes"),
    ],
)  # fmt: skip
def test_what_breaks_the_format_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refused(tmp_path, data)


def test_many_long_texts_are_refused(tmp_path: Path) -> None:
    data = header(values=40) + b"".join(value(f"v{i}", TEXT, b"x" * 2**20) for i in range(40))
    assert "with the texts before it" in refused(tmp_path, data)


def test_tensors_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    good = whole_file({"t": ((4,), [1, 2, 3, 4]), "u": ((2,), [5, 6])})
    assert_array_equal(read_gguf(write(tmp_path, good)).read(["t"])["t"], [1, 2, 3, 4])
    end = good.index(struct.pack("<2f", 5, 6)) + 8
    read_gguf(write(tmp_path, good[:end]))
    for missing in (1, 8, 9, 24):
        with pytest.raises(TraceError, match=r"tensor '[tu]' ends at byte .*: it is cut"):
            read_gguf(write(tmp_path, good[: end - missing]))
    large = header(tensors=1) + tensor("t", [HUGE], 0) + bytes(64)
    with pytest.raises(TraceError, match="it is cut"):
        read_gguf(write(tmp_path, large)).read(["t"])
    half = header(tensors=1) + tensor("t", [1], 0, kind=1) + bytes(64)
    with pytest.raises(TraceError, match="tensor 't' is of type 1, expected 0"):
        read_gguf(write(tmp_path, half)).read(["t"])
    much = header(tensors=1) + tensor("t", [2**22 + 8], 0)
    with pytest.raises(TraceError, match="have 16777248 bytes; allowed: at most 16777216 at once"):
        read_gguf(write(tmp_path, much + bytes(2**24 + 128))).read(["t"])
    same = header(tensors=9) + b"".join(tensor(f"t{i}", [60], 0) for i in range(9))
    same += bytes(-len(same) % 32 + 240)
    with pytest.raises(TraceError, match="overlap"):
        read_gguf(write(tmp_path, same)).read([f"t{i}" for i in range(9)])


@given(cut=st.floats(0, 1), place=st.floats(0, 1), flip=st.integers(1, 255))
def test_damage_anywhere_is_refused_or_harmless(
    cut: float, place: float, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    entries = [value("general.type", TEXT, "imatrix"), value("words", LIST, ["a", "b"], TEXT), value("n", 4, 7)]
    data = bytearray(whole_file({"t": ((4,), [1, 2, 3, 4]), "u": ((2, 1), [5, 6])}, entries))
    data[int(place * (len(data) - 1))] ^= flip
    folder = tmp_path_factory.mktemp("damage")
    for piece in (bytes(data), bytes(data[: int(cut * len(data))])):
        message = ""
        try:
            found = read_gguf(write(folder, piece))
            found.read(found.tensors)
        except TraceError as error:
            message = str(error)
        assert "\n" not in message


@pytest.mark.parametrize("what", ["missing", "folder", "empty"])
def test_what_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "some.gguf"
    if what == "folder":
        path.mkdir()
    elif what == "empty":
        path.touch()
    with pytest.raises(TraceError, match=r"some\.gguf: (no such file|is a folder|is empty)"):
        read_gguf(path)
