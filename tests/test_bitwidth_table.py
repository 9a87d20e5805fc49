"""Loss tables: checks, files, and what they come to for a model."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from strategies import mixtral, plain_model

from perfmodel.bitwidth import BITS, BUNDLED_LOSSES, LossTable, at_width, losses_for
from perfmodel.errors import PerfModelError, PolicyError, TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.run import evaluate

BUNDLED = "tiny-mixtral-32l-losses"


def test_bundled_table() -> None:
    table = LossTable.load(BUNDLED)
    assert (table.num_layers, table.num_experts) == (32, 8)
    assert (table.name, table.source, table.notes) == (BUNDLED, "measured", ())
    assert not table.losses.flags.writeable
    # Each bit helps every expert.
    assert (np.diff(table.losses, axis=2) < 0).all()


def test_layers_are_cycled_or_cut_with_a_note() -> None:
    table = LossTable.load(BUNDLED)
    assert table.for_model(32, 8) is table
    longer = table.for_model(56, 8)
    assert_array_equal(longer.losses, table.losses[np.arange(56) % 32])
    assert longer.source == "measured" == table.source
    assert "32 layers is cycled to 56" in longer.notes[0]
    shorter = longer.for_model(4, 8)
    assert_array_equal(shorter.losses, table.losses[:4])
    assert len(shorter.notes) == 2


def test_losses_that_rise_with_bits_are_kept_with_a_note() -> None:
    falling = np.tile([8.0, 4.0, 2.0, 2.0], (2, 3, 1))
    assert LossTable(falling, "mine").for_model(2, 3).notes == ()
    losses = falling.copy()
    losses[0, 1] = [1, 2, 4, 8]
    losses[1, 2, 3] = 2.5
    table = LossTable(losses, "mine")
    same = table.for_model(2, 3)
    assert_array_equal(same.losses, losses)
    assert same.notes == (
        "loss table mine: the loss of 2 of 6 experts rises with bits somewhere; check the order of the last axis",
    )
    assert same.for_model(2, 3).notes == same.notes
    cycled = table.for_model(3, 3)
    assert "cycled" in cycled.notes[0]
    assert "the loss of 3 of 9 experts rises with bits" in cycled.notes[1]


def test_the_note_on_rising_losses_reaches_the_report() -> None:
    table = LossTable(np.tile([1.0, 2.0, 4.0, 8.0], (32, 8, 1)), "upside-down")
    options = {"prompt": 8, "output": 2, "losses": table}
    one = evaluate("mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini", "context-aware", **options)
    assert any("the loss of 256 of 256 experts rises with bits" in note for note in one.notes)


def test_another_number_of_experts_needs_consent() -> None:
    table = LossTable.load(BUNDLED)
    with pytest.raises(TraceError, match="8 experts per layer, the model 64"):
        table.for_model(16, 64)
    assumed = table.for_model(16, 64, assume=True)
    assert assumed.source == "assumed"
    assert assumed.losses.shape == (16, 64, 4)
    assert any("not used" in note for note in assumed.notes)


def test_assumed_losses_fall_fourfold_per_bit() -> None:
    table = LossTable.assumed(2, 3)
    assert table.source == "assumed"
    assert_array_equal(table.losses[1, 2], [4.0**-q for q in BITS])


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "3", None, 10**5000], ids=lambda v: type(v).__name__)
def test_sizes_are_whole_numbers(size) -> None:
    with pytest.raises(TraceError, match="num_layers is"):
        LossTable.assumed(size, 8)
    with pytest.raises(TraceError, match="num_experts is"):
        LossTable.load(BUNDLED).for_model(8, size)


@pytest.mark.parametrize(
    "losses",
    [
        np.ones((2, 4)),
        np.ones((2, 3, 5)),
        np.ones((0, 3, 4)),
        -np.ones((1, 1, 4)),
        np.full((1, 1, 4), np.nan),
    ],
)
def test_a_table_is_checked_when_made(losses) -> None:
    with pytest.raises(TraceError, match="mine: losses"):
        LossTable(losses, "mine")


def test_a_table_is_a_copy() -> None:
    losses = np.ones((1, 2, 4))
    table = LossTable(losses, "mine")
    losses[:] = 7
    assert_array_equal(table.losses, 1)
    with pytest.raises(TraceError, match="source is 'guessed'"):
        LossTable(losses, "mine", "guessed")  # type: ignore[arg-type]


def test_a_file_is_read_by_path(tmp_path: Path) -> None:
    losses = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, losses=losses, something=np.array("else"))
    for given_path in (path, str(path)):
        table = LossTable.load(given_path)
        assert_array_equal(table.losses, losses)
        assert table.name == "mine"


def _npz(path: Path, **arrays: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)
    return path


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _with_shape(npy: bytes, shape: bytes) -> bytes:
    """The same file whose header claims another shape; the padding keeps its length."""
    old = b"(4, 4, 4), }" + b" " * 20
    assert old in npy
    return npy.replace(old, (shape + b", }").ljust(len(old)))


def _bad_files(folder: Path) -> dict[str, Path]:
    whole = folder / "whole.npz"
    np.savez(whole, losses=np.ones((4, 4, 4)))
    header = _npy(np.ones((4, 4, 4)))
    bad = {
        "missing": folder / "missing.npz",
        "folder": folder,
        "empty": folder / "empty.npz",
        "junk": folder / "junk.npz",
        "cut": folder / "cut.npz",
        "null byte": Path("a\0b.npz"),
        "long name": folder / ("x" * 5000 + ".npz"),
        "no key": _npz(folder / "key.npz", other=header),
        "pickled": _npz(folder / "pickled.npz", losses=_npy(np.array([{"a": 1}], dtype=object))),
        "not an array": _npz(folder / "text.npz", losses=b"hello"),
        "cut array": _npz(folder / "short.npz", losses=header[:-9]),
        "bad header": _npz(folder / "header.npz", losses=header.replace(b"(4, 4, 4)", b"(4,4,9**)")),
        "huge shape": _npz(folder / "huge.npz", losses=_with_shape(header, b"(4000000000, 8, 4)")),
        "larger shape": _npz(folder / "larger.npz", losses=_with_shape(header, b"(400, 8, 4)")),
        "strings": _npz(folder / "strings.npz", losses=_npy(np.full((2, 2, 4), "x"))),
        "complex": _npz(folder / "complex.npz", losses=_npy(np.ones((2, 2, 4), dtype=complex))),
        "structured": _npz(folder / "struct.npz", losses=_npy(np.ones((2, 2, 4), dtype="f4,f4"))),
        "flat": _npz(folder / "flat.npz", losses=_npy(np.ones(4))),
        "scalar": _npz(folder / "scalar.npz", losses=_npy(np.float64(1))),
        "nan": _npz(folder / "nan.npz", losses=_npy(np.full((1, 1, 4), np.nan))),
    }
    bad["empty"].write_bytes(b"")
    bad["junk"].write_bytes(os.urandom(3000))
    bad["cut"].write_bytes(whole.read_bytes()[:-40])
    return bad


def test_a_bad_file_is_an_error_in_one_line(tmp_path: Path) -> None:
    for what, path in _bad_files(tmp_path).items():
        with pytest.raises(TraceError) as caught:
            LossTable.load(path)
        message = str(caught.value)
        assert "\n" not in message, what
        assert str(path).replace("\0", "\\x00")[:60] in message, (what, message)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.routing.npz.MAX_BYTES", 1000)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, losses=np.zeros((50, 8, 4)))
    with pytest.raises(TraceError, match="would expand to"):
        LossTable.load(path)


@pytest.mark.parametrize("name", ["no-such-table", "", "tiny-mixtral-32l-mini", 3, None, b"x.npz", ["a"]])
def test_an_unknown_name_lists_the_bundled_ones(name) -> None:
    with pytest.raises(PerfModelError, match=f"{BUNDLED}|a path or a name"):
        LossTable.load(name)


# --- what a table may hold besides losses ---


def full_table() -> LossTable:
    losses = np.tile([8.0, 4.0, 2.0], (2, 3, 1))
    variance, tokens = np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3)
    return LossTable(losses, "mine", "measured", (), (2, 4, 8), variance, tokens, {"method": "rtn"})


def test_a_file_may_hold_widths_variances_tokens_and_how_it_was_made(tmp_path: Path) -> None:
    table = full_table()
    path = tmp_path / "full.npz"
    arrays = {"losses": table.losses, "bits": np.array(table.bits), "n_tokens": table.n_tokens}
    np.savez(path, output_variance=table.output_variance, metadata=np.array('{"method": "rtn"}'), **arrays)
    read = LossTable.load(path)
    assert read.bits == (2, 4, 8)
    assert read.info == {"method": "rtn"}
    assert_array_equal(read.output_variance, table.output_variance)
    assert_array_equal(read.n_tokens, table.n_tokens)
    assert read.n_tokens.dtype == np.int64
    assert read.content_hash() == table.content_hash()


def test_what_a_table_holds_stays_as_it_is() -> None:
    table = full_table()
    for array in (table.losses, table.output_variance, table.n_tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
    with pytest.raises(TypeError):
        table.info["method"] = "gptq"  # type: ignore[index]
    again = pickle.loads(pickle.dumps(table))
    assert (again.name, again.bits, dict(again.info)) == (table.name, table.bits, dict(table.info))
    assert_array_equal(again.losses, table.losses)
    assert again.content_hash() == table.content_hash()


def test_hash_is_that_of_the_numbers() -> None:
    table = full_table()
    other = [
        LossTable(table.losses * 2, "mine", bits=(2, 4, 8)),
        LossTable(table.losses, "mine", bits=(2, 3, 4)),
        LossTable(table.losses, "mine", bits=(2, 4, 8), output_variance=table.output_variance * 2),
    ]
    plain = LossTable(table.losses, "mine", bits=(2, 4, 8))
    assert len({one.content_hash() for one in (plain, table, *other)}) == 5
    assert LossTable(table.losses, "other", bits=(2, 4, 8), info={"a": 1}).content_hash() == plain.content_hash()


def test_layers_are_cycled_with_all_they_hold() -> None:
    longer = full_table().for_model(3, 3)
    assert longer.bits == (2, 4, 8)
    assert_array_equal(longer.output_variance[2], longer.output_variance[0])
    assert_array_equal(longer.n_tokens[:2], full_table().n_tokens)


def test_only_some_widths() -> None:
    table = full_table()
    assert table.only((2, 4, 8)) is table
    some = table.only([8, 2])
    assert some.bits == (2, 8)
    assert_array_equal(some.losses, table.losses[..., [0, 2]])
    assert_array_equal(some.output_variance, table.output_variance)
    with pytest.raises(PolicyError, match="loss table mine has no losses at 1, 3 bits; it has 2, 4, 8"):
        table.only([1, 2, 3])
    with pytest.raises(PolicyError, match="no widths given"):
        table.only([])


def test_losses_for_a_model() -> None:
    model = mixtral()
    bundled = losses_for(None, model)
    assert bundled.source == "measured"
    assert bundled.notes[0].startswith(f"losses: {BUNDLED_LOSSES}, measured on tiny-mixtral-32l (")
    assert losses_for(None, model) is bundled
    assert losses_for(None, plain_model(num_experts=6)).source == "assumed"
    mine = full_table()
    assert_array_equal(losses_for(mine, plain_model(num_layers=2, num_experts=3)).losses, mine.losses)
    with pytest.raises(TraceError, match=r"3 experts per layer, the model 4; .* leave --loss out \(losses=None\)"):
        losses_for(mine, plain_model(num_layers=2))


OWN = {"model": "plain", "num_layers": 3, "hidden_size": 16, "expert_size": 24}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (OWN, "mine (measured)"),
        ({**OWN, "model": "other"}, "mine (measured on other, of the same shape)"),
        (
            {**OWN, "hidden_size": 64},
            "mine, measured on plain (hidden size 64), not on plain: ratios between widths may carry over at best",
        ),
        ({**OWN, "expert_size": 8}, "mine, measured on plain (expert size 8), not on plain: "),
        ({**OWN, "num_layers": 32}, "mine, measured on plain (layers 32), not on plain: "),
        ({"hidden_size": 64}, "mine, measured on a model (hidden size 64), not on plain: "),
        ({"model": "other"}, "mine, measured on other, not on plain: "),
        ({"model": "plain"}, "mine (measured)"),
        ({"method": "rtn"}, "mine (measured; its model is not stated)"),
        ({"model": 3}, "mine (measured; its model is not stated)"),
        ({"model": "two\nlines"}, "mine, measured on two lines, not on plain: "),
        ({**OWN, "hidden_size": [1] * 10**6}, "mine (measured)"),
    ],
)
def test_the_note_says_of_which_model_losses_are(info, words: str) -> None:
    table = LossTable(np.ones((3, 4, 4)), "mine", "measured", info=info)
    note = losses_for(table, plain_model()).notes[0]
    assert note.startswith(f"losses: {words}")
    assert "\n" not in note
    assert len(note) < 300


def test_a_table_that_says_nothing_of_its_origin_is_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "bare.npz"
    np.savez(path, losses=np.ones((3, 4, 4)))
    bare = LossTable.load(path)
    assert (bare.source, bare.origin) == ("unstated", "origin not stated")
    assert losses_for(bare, plain_model()).notes == ("losses: bare (origin not stated)",)
    assert "cycled to 3" in losses_for(LossTable(np.ones((2, 4, 4)), "few"), plain_model()).notes[1]
    np.savez(path, losses=np.ones((3, 4, 4)), metadata=np.array('{"method": "rtn"}'))
    assert LossTable.load(path).source == "measured"


def test_losses_at_a_width_between_others() -> None:
    table = LossTable(np.array([[[8.0, 4.0, 2.0], [1.0, 0.5, 0.0]]]), "mine", bits=(2, 4, 8))
    for width, expected in ((2, [8, 1]), (3, [6, 0.75]), (4, [4, 0.5]), (5, [3.5, 0.375]), (8.0, [2, 0])):
        assert_array_equal(table.at(width), [expected])
        assert_array_equal(at_width(table.losses[0, 0], table.bits, width), expected[0])
    for width in (1.9, 8.1, 16):
        assert np.isnan(table.at(width)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": (4, 2, 8)}, r"mine: bits is \[4, 2, 8\]; it must be whole numbers from 1 to 16, rising"),
        ({"bits": (2, 4)}, r"mine: losses has shape \[2, 3, 3\]; it must be \[layers, experts, 2\]"),
        ({"bits": "abc"}, "mine: bits holds"),
        ({"output_variance": np.ones((3, 2))}, r"mine: output_variance has shape \[3, 2\]; it must be \[2, 3\]"),
        ({"output_variance": np.full((2, 3), np.nan)}, r"output_variance\[0, 0\] is nan"),
        ({"n_tokens": -np.ones((2, 3))}, r"n_tokens\[0, 0\] is -1.0"),
        ({"n_tokens": np.full((2, 3), 1.5)}, "mine: n_tokens holds 1.5; they must be whole numbers"),
        ({"name": None}, "loss table: name is None; it must be a text"),
        ({"name": ""}, "loss table: name is ''; it must be a text"),
        ({"info": 3}, "mine: info is 3; it must be a table"),
    ],
)
def test_what_a_table_holds_is_checked(changes, message) -> None:
    table = full_table()
    with pytest.raises(TraceError, match=message) as caught:
        LossTable(**{"losses": table.losses, "name": "mine", "bits": table.bits, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "3", '"a"', "[" * 100_000])
def test_metadata_is_one_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, losses=np.ones((1, 2, 4)), metadata=np.array(text))
    with pytest.raises(TraceError, match="metadata") as caught:
        LossTable.load(path)
    assert "\n" not in str(caught.value)


def test_metadata_keeps_no_number_that_json_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "odd.npz"
    text = '{"a": NaN, "b": [-Infinity, 1e999, 2.5], "c": {"d": -1e999}}'
    np.savez(path, losses=np.ones((1, 2, 4)), metadata=np.array(text))
    info = LossTable.load(path).info
    assert info == {"a": None, "b": [None, None, 2.5], "c": {"d": None}}
    json.dumps(dict(info), allow_nan=False)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"losses": np.ones((2, 3, 3))},
            r"shape \[2, 3, 3\]; it must be \[layers, experts, 4\], or the file must hold bits, one width a column$",
        ),
        ({"losses": np.ones((2, 0, 4))}, r"must be \[layers, experts, 4\], not empty$"),
        ({"losses": np.ones((2, 3))}, r"must be \[layers, experts, 4\]$"),
        ({"losses": np.ones((2, 3, 3)), "bits": np.array([1, 2])}, r"must be \[layers, experts, 2\]$"),
        ({"hidden": np.ones(3), "expert_ids": np.ones(3)}, "it holds calibration rows .*losses build"),
        ({"topk_ids": np.ones(3)}, "it holds a routing trace .*--trace"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, arrays, words: str) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, **arrays)
    with pytest.raises(TraceError, match=words):
        LossTable.load(path)


def test_a_directory_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    monkeypatch.chdir(tmp_path)
    for given in ("tables", "tables/", Path("tables")):
        with pytest.raises(TraceError, match="is a directory"):
            LossTable.load(given)


def test_a_loss_table_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "losses.npz"
    np.savez(path, losses=np.ones((2, 3, 4)))
    with pytest.raises(TraceError, match=r"is a loss table \(--loss takes it\).*topk_ids \(canonical\) or .*row-phase"):
        RoutingTrace.load(path)


@pytest.mark.parametrize(
    ("losses", "variance", "words"),
    [
        (1.7e308, 1.0, "losses holds 1.7e.308, allowed 0 or 1e-100 to 1e.100; .* in a larger unit"),
        (1.0, 1e101, "output_variance holds 1e.101, .* in a larger unit"),
        (1.0, 5e-324, "output_variance holds .*e-324, .* in a smaller unit"),
        (1e100, 1e-100, ""),
        (0.0, 0.0, ""),
    ],
)
def test_a_model_takes_only_numbers_that_can_be_summed_and_divided(losses: float, variance: float, words: str) -> None:
    model = mixtral()
    table = LossTable(np.full((32, 8, 4), losses), "odd", output_variance=np.full((32, 8), variance))
    if not words:
        assert losses_for(table, model).num_layers == 32
        return
    with pytest.raises(TraceError, match=f"^loss table odd: {words}$"):
        losses_for(table, model)
