"""Loss tables from weights: by definition, beside a reference, and resumed after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import EXPERTS, FUSED, HIDDEN, INNER, LAYERS, LAYOUTS, QWEN, TOP_K, make, rows, write
from numpy.testing import assert_allclose, assert_array_equal
from threadpoolctl import threadpool_info, threadpool_limits

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError
from perfmodel.losses import Calibration, Checkpoint, build_losses, journal
from perfmodel.losses.expert import Rounding, gptq_expert, gptq_losses, inner, nearest_expert, output
from perfmodel.losses.gptq import moments, quantised
from perfmodel.losses.grids import rounded
from perfmodel.routing.npz import read_npz

BITS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), dtype="F16").folder


def arrays_of(file: Path) -> dict[str, Any]:
    return read_npz(file, ["losses", "losses_rtn", "bits", "output_variance", "n_tokens", "borrowed", "metadata"])


def partial_of(file: Path) -> Path:
    return file.with_name(f".{file.stem}.perfmodel-partial.npz")


# --- one expert ---


def plain_output(gate: np.ndarray, up: np.ndarray, down: np.ndarray, row: np.ndarray) -> np.ndarray:
    """What an expert makes of one row, by its definition."""
    hidden = []
    for one, two in zip(gate, up, strict=True):
        x = float(one @ row)
        hidden.append(x / (1 + np.exp(-x)) * float(two @ row))
    return np.array([float(line @ np.array(hidden)) for line in down])


def test_an_expert_is_a_gated_network(model: Path) -> None:
    expert, inputs = Checkpoint(model).expert(0, 1), rows().rows(0, 1)
    expected = [plain_output(*expert, row) for row in inputs]
    assert_allclose(output(expert, inputs), expected, rtol=1e-11, atol=1e-13)


def test_a_very_negative_gate_gives_zero(model: Path) -> None:
    expert = Checkpoint(model).expert(0, 0)
    inputs = np.linalg.lstsq(expert.gate[:HIDDEN], np.full(HIDDEN, -1e4), rcond=None)[0][None]
    found = inner(expert, inputs)
    assert np.isfinite(found).all()
    assert_array_equal(found[0, :HIDDEN], np.zeros(HIDDEN))


def test_gptq_of_an_expert_goes_on_with_what_it_has_made(model: Path) -> None:
    expert, inputs = Checkpoint(model).expert(1, 0), rows().rows(1, 0)
    how = Rounding(BITS, group=5, damping=0.2, order="activation")
    found = gptq_expert(expert, inputs, 3, how)
    first = moments(inputs, 0.2, "activation")
    assert_array_equal(found.gate, quantised(expert.gate, first, 3, 5))
    assert_array_equal(found.up, quantised(expert.up, first, 3, 5))
    x, y = inputs @ found.gate.T, inputs @ found.up.T
    second = moments(x / (1 + np.exp(-x)) * y, 0.2, "activation")
    assert_allclose(found.down, quantised(expert.down, second, 3, 5), rtol=1e-9, atol=0)


def test_every_row_is_held_out_once(model: Path) -> None:
    expert, inputs = Checkpoint(model).expert(0, 2), rows().rows(0, 2)
    how = Rounding((2, 4))
    found = gptq_losses(expert, inputs, None, how, 3)
    errors: list[list[np.ndarray]] = [[], []]
    for fold in range(3):
        seen = np.array([row for i, row in enumerate(inputs) if i % 3 != fold])
        for i, bits in enumerate(how.bits):
            smaller = gptq_expert(expert, seen, bits, how)
            errors[i] += [output(smaller, row[None]) - output(expert, row[None]) for row in inputs[fold::3]]
    assert [len(one) for one in errors] == [len(inputs)] * 2
    assert_allclose(found.losses, [np.mean(np.square(one)) for one in errors], rtol=1e-10, atol=0)
    assert found.rows == len(inputs)


# --- tables ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_of_every_layout(layout: str, tmp_path: Path) -> None:
    made, calibration = make(tmp_path / "model", layout, "BF16", shards=2), rows()
    table = build_losses(made.folder, calibration, tmp_path / "t.npz", bits=(1, 3), group_size=7)
    loaded = LossTable.load(tmp_path / "t.npz")
    stored = arrays_of(tmp_path / "t.npz")
    assert table.losses.shape == (LAYERS, EXPERTS, 2)
    assert loaded.bits == table.bits == (1, 3)
    assert_array_equal(loaded.losses, table.losses)
    assert not stored["borrowed"].any()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            own = (calibration.expert_ids[layer] == expert).any(axis=1)
            inputs = calibration.hidden[layer][own].astype(float)
            weights = [part[layer, expert] for part in made[1:4]]
            true = np.array([plain_output(*weights, row) for row in inputs])
            assert table.n_tokens is not None
            assert table.n_tokens[layer, expert] == own.sum()
            assert_allclose(stored["output_variance"][layer, expert], np.mean(true**2), rtol=1e-11, atol=0)
            for i, bits in enumerate(table.bits):
                smaller = [rounded(one, bits, 7) for one in weights]
                error = np.array([plain_output(*smaller, row) for row in inputs]) - true
                assert_allclose(stored["losses_rtn"][layer, expert, i], np.mean(error**2), rtol=1e-10, atol=0)
    info = dict(loaded.info)
    assert (info["method"], info["group_size"], info["damping"], info["folds"]) == ("gptq", 7, "auto", 4)
    shape = {"num_layers": LAYERS, "num_experts": EXPERTS, "hidden_size": HIDDEN, "expert_size": INNER, "top_k": TOP_K}
    assert {key: info[key] for key in ("model", *shape)} == {"model": "model", **shape}
    assert info["model_type"] == ("qwen3_moe" if layout == QWEN else "mixtral")
    assert set(info["sha256"]) == {"checkpoint", "calibration", "program"}
    assert not any(str(tmp_path) in str(value) for value in info.values())


def test_same_weights_give_the_same_table_whatever_their_layout(tmp_path: Path) -> None:
    tables = [build_losses(make(tmp_path / layout, layout, "F32").folder, rows()) for layout in (QWEN, FUSED)]
    assert_array_equal(tables[0].losses, tables[1].losses)


def test_rounding_to_nearest_alone(model: Path, tmp_path: Path) -> None:
    build_losses(model, rows(), tmp_path / "gptq.npz")
    table = build_losses(model, rows(), tmp_path / "rtn.npz", method="rtn")
    stored = arrays_of(tmp_path / "rtn.npz")
    assert_array_equal(table.losses, arrays_of(tmp_path / "gptq.npz")["losses_rtn"])
    assert "losses_rtn" not in stored
    assert {"damping", "order", "folds"}.isdisjoint(table.info)


def test_rows_of_another_file_are_held_out(model: Path) -> None:
    seen, other = rows(seed=1), rows(40, seed=2)
    how = Rounding(BITS)
    table = build_losses(model, seen, held_out=other)
    expert = Checkpoint(model).expert(1, 3)
    inputs = other.rows(1, 3)
    for i, bits in enumerate(BITS):
        smaller = gptq_expert(expert, seen.rows(1, 3), bits, how)
        error = output(smaller, inputs) - output(expert, inputs)
        assert_allclose(table.losses[1, 3, i], np.mean(error**2), rtol=1e-12, atol=0)
    assert table.n_tokens is not None
    assert table.n_tokens[1, 3] == len(inputs)
    nearest = build_losses(model, seen, held_out=other, method="rtn")
    error = output(nearest_expert(expert, 2), inputs) - output(expert, inputs)
    assert_allclose(nearest.losses[1, 3, 1], np.mean(error**2), rtol=1e-12, atol=0)


def test_experts_with_few_rows_borrow_those_of_their_layer(model: Path, tmp_path: Path) -> None:
    plain = rows(40)
    ids = plain.expert_ids.copy()
    ids[0] = [[1, 2]] * 33 + [[0, 1]] * 7  # seven rows reach expert 0, and none expert 3
    scarce = rows(40, expert_ids=ids)
    table = build_losses(model, scarce, tmp_path / "t.npz")
    borrowed = arrays_of(tmp_path / "t.npz")["borrowed"]
    assert borrowed[0].tolist() == [True, False, False, True]
    assert table.n_tokens is not None
    assert table.n_tokens[0].tolist() == [40, 40, 33, 40]
    assert table.info["least_rows"] == 8
    expert = Checkpoint(model).expert(0, 3)
    expected = gptq_losses(expert, scarce.rows(0), None, Rounding(BITS), 4)
    assert_array_equal(table.losses[0, 3], expected.losses)
    held_out = build_losses(model, plain, tmp_path / "h.npz", held_out=scarce)
    assert arrays_of(tmp_path / "h.npz")["borrowed"][0].tolist() == [True, False, False, True]
    assert held_out.n_tokens is not None
    assert held_out.n_tokens[0].tolist() == [40, 40, 33, 40]


@pytest.fixture(scope="module")
def reference(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table of the small recorded model with default options, and the one that was published with it."""
    folder = shared / "tiny-mixtral"
    out = tmp_path_factory.mktemp("tiny") / "losses.npz"
    build_losses(folder / "model", folder / "calibration.npz", out)
    known = read_npz(folder / "loss_table.npz", ["losses", "losses_rtn", "n_tokens", "output_variance"])
    return arrays_of(out), known


def test_reference_rows_and_rounding_to_nearest(reference: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found, known = reference
    assert_array_equal(found["n_tokens"], known["n_tokens"])
    for name in ("losses_rtn", "output_variance"):
        assert_allclose(found[name], known[name], rtol=1e-13, atol=0)


def test_gptq_beats_rounding_to_nearest_on_rows_it_did_not_see(
    reference: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    found, _ = reference
    ratio = found["losses"].mean(axis=(0, 1)) / found["losses_rtn"].mean(axis=(0, 1))
    assert (ratio < [0.95, 0.85, 0.87, 0.87]).all(), ratio


def test_gptq_is_close_to_the_reference(reference: tuple[dict[str, Any], dict[str, Any]]) -> None:
    # The reference saw 12,288 other tokens, these tables a few hundred that are held out in turn: a quarter of what is
    # measured is never seen. So the losses are a tenth higher, and alike from expert to expert.
    found, known = reference
    means = found["losses"].mean(axis=(0, 1)) / known["losses"].mean(axis=(0, 1))
    assert (means > 0.98).all(), means
    assert (means < [1.05, 1.13, 1.13, 1.13]).all(), means
    ratio = np.log(found["losses"] / known["losses"])
    assert (ratio.std(axis=(0, 1)) < 0.08).all(), ratio.std(axis=(0, 1))
    assert np.abs(ratio).max() < np.log(1.65)
    for i in range(4):
        both = np.log([found["losses"][..., i].ravel(), known["losses"][..., i].ravel()])
        assert np.corrcoef(both)[0, 1] > 0.995


@pytest.mark.parametrize(
    ("row", "over"), [("| auto |", "losses_rtn"), ("| the 512 rows, 4 folds |", "losses")], ids=["rtn", "reference"]
)
def test_documented_figures(row: str, over: str, reference: tuple[dict[str, Any], dict[str, Any]]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "losses.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(row)]
    documented = [float(cell) for cell in line.split("|")[2:6]]
    found, known = reference
    # Another linear algebra library may round a few weights the other way.
    assert_allclose(found["losses"].mean((0, 1)) / known[over].mean((0, 1)), documented, rtol=0.005, atol=0)


def test_documented_correlations(reference: tuple[dict[str, Any], dict[str, Any]]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "losses.md").read_text(encoding="utf-8")
    span = r"([\d.]+) to\s+([\d.]+)"
    (documented,) = re.findall(
        rf"over experts is {span} for the losses, by width, and {span} for their logarithms", text
    )
    both = [[table["losses"][..., i].ravel() for table in reference] for i in range(4)]
    plain = [np.corrcoef(one)[0, 1] for one in both]
    logs = [np.corrcoef(np.log(one))[0, 1] for one in both]
    assert_allclose(
        [min(plain), max(plain), min(logs), max(logs)], [float(one) for one in documented], rtol=0, atol=2e-4
    )


def test_measured_damping_matters(shared: Path, reference: tuple[dict[str, Any], dict[str, Any]]) -> None:
    folder, (found, _) = shared / "tiny-mixtral", reference
    weights, calibration = Checkpoint(folder / "model"), Calibration.load(folder / "calibration.npz")
    ratios = []
    for layer in range(0, 32, 8):
        little = Rounding((3,), damping=0.01)
        losses = gptq_losses(weights.expert(layer, 0), calibration.rows(layer, 0), None, little, 4)
        ratios.append(losses.losses[0] / losses.nearest[0])
        assert losses.losses[0] > found["losses"][layer, 0, 2]
    assert np.mean(ratios) > 1.2  # worse than no calibration at all


# --- killed and resumed ---

CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from checkpoints import rows
from perfmodel.losses import build_losses, journal

journal._EVERY_S = 0.0

def report(done, total):
    if done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

build_losses(sys.argv[1], rows(), sys.argv[2], resume="resume" in sys.argv, report=report)
"""


def child(model: Path, out: Path, number: int, *more: str) -> int:
    """A build in another process that kills itself when so many experts are done."""
    code = CHILD.format(tests=str(Path(__file__).parent))
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, str(model), str(out), str(number), *more]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def test_killed_and_resumed(model: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "t.npz", tmp_path / "whole.npz"
    build_losses(model, rows(), whole)
    for number, more in ((3, ()), (6, ("resume",))):
        assert child(model, out, number, *more) == -signal.SIGKILL
        assert partial_of(out).exists()
        assert not out.exists()
    with pytest.raises(PerfModelError, match=rf"unfinished build .* \(6 of {LAYERS * EXPERTS} .*--resume.*--overwrite"):
        build_losses(model, rows(), out)
    done: list[int] = []
    build_losses(model, rows(), out, resume=True, report=lambda now, total: done.append(now))
    assert done == [6, 7, 8]
    assert out.read_bytes() == whole.read_bytes()
    assert not partial_of(out).exists()


class StoppedError(Exception):
    """Raised by a report, as an interrupt would be."""


def stop(number: int) -> Any:
    def report(done: int, total: int) -> None:
        if done == number:
            raise StoppedError

    return report


def half_done(model: Path, out: Path, **options: Any) -> None:
    with pytest.raises(StoppedError):
        build_losses(model, rows(), out, report=stop(5), **options)
    assert partial_of(out).exists()


def test_interrupted_builds_keep_what_is_done_and_begin_anew_on_demand(model: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "t.npz", tmp_path / "whole.npz"
    build_losses(model, rows(), whole)
    half_done(model, out)
    done: list[int] = []
    build_losses(model, rows(), out, overwrite=True, report=lambda now, total: done.append(now))
    assert done[0] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.npz", "whole.npz"]
    build_losses(model, rows(), tmp_path / "new.npz", resume=True)  # nothing to resume
    assert (tmp_path / "new.npz").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"calibration": rows(seed=9)}, "contents of calibration changed"),
        ({"held_out": rows(seed=9)}, "held-out here only"),
        ({"bits": (2, 3, 4)}, "bits 1,2,3,4 there, 2,3,4 here"),
        ({"damping": 0.5}, "damping 'auto' there, 0.5 here"),
        ({"group_size": 4}, "group size None there, 4 here"),
        ({"method": "rtn"}, "method 'gptq' there, 'rtn' here"),
        ({"order": "activation"}, "order"),
        ({"folds": 3}, "folds 4 there, 3 here"),
    ],
)
def test_other_inputs_are_not_resumed(model: Path, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    half_done(model, out)
    before = partial_of(out).read_bytes()
    with pytest.raises(PerfModelError, match=f"{words}.*--overwrite"):
        build_losses(model, changes.pop("calibration", rows()), out, resume=True, **changes)
    assert partial_of(out).read_bytes() == before


def test_other_weights_and_programs_are_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, out = make(tmp_path / "model"), tmp_path / "t.npz"
    half_done(made.folder, out)
    make(tmp_path / "model", seed=5)
    with pytest.raises(PerfModelError, match="contents of checkpoint changed"):
        build_losses(made.folder, rows(), out, resume=True)
    make(tmp_path / "model")
    monkeypatch.setattr("perfmodel.losses.build.program_hash", lambda: "other")
    with pytest.raises(PerfModelError, match="the program changed"):
        build_losses(made.folder, rows(), out, resume=True)


#: Ways to damage an unfinished build, and what is said of it.
DAMAGE = {
    "empty": "cannot be read",
    "cut": "cannot be read",
    "text": "cannot be read",
    "array": "array losses",
    "identity": "identity does not say what it was made from",
    "two": "array identity",
    "nan": "array losses",
    "negative": "array output_variance",
    "rows": "array rows",
    "edited": "its numbers are not those that were written",
    "swapped": "its numbers are not those that were written",
    "more": "its numbers are not those that were written",
    "table": "array identity is missing",
    "hash": "array sha256 is missing",
    "done": "array done is missing",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_unfinished_builds(model: Path, damage: str, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    half_done(model, out)
    file = partial_of(out)
    content = file.read_bytes()
    arrays = dict(np.load(file))
    changes = {
        "array": {"losses": np.zeros(3)},
        "identity": {"identity": np.array("[]")},
        "nan": {"losses": arrays["losses"] * np.nan},
        "negative": {"output_variance": arrays["output_variance"] - 1e9},
        "rows": {"rows": arrays["rows"] + 1},
        "edited": {"losses": np.where(arrays["losses"] == arrays["losses"].max(), 1e-3, arrays["losses"])},
        "swapped": {name: arrays[name][:, [1, 0, *range(2, EXPERTS)]] for name in ("losses", "nearest")},
        "more": {"borrowed": ~arrays["borrowed"]},
        "two": {"identity": np.array(["{}", "{}"])},
        "table": {"identity": None},
        "hash": {"sha256": None},
        "done": {"done": None},
    }
    if damage in changes:
        changed = {**arrays, **changes[damage]}
        np.savez(file, **{name: array for name, array in changed.items() if array is not None})
    else:
        file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "text": b"x" * 100}[damage])
    for resume in (False, True):
        with pytest.raises(PerfModelError, match=r"damaged.*--overwrite") as raised:
            build_losses(model, rows(), out, resume=resume)
        assert "\n" not in str(raised.value)
        assert DAMAGE[damage] in str(raised.value)
    assert not out.exists()
    assert file.exists()
    build_losses(model, rows(), out, overwrite=True)
    assert LossTable.load(out).num_experts == EXPERTS


def test_a_folder_where_unfinished_work_would_lie(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    partial_of(out).mkdir()
    for overwrite in (False, True):
        with pytest.raises(PerfModelError, match="is a folder; allowed: another output"):
            build_losses(model, rows(), out, overwrite=overwrite)


def test_rows_of_an_unfinished_build_are_those_of_the_calibration(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    half_done(model, out)
    arrays = dict(np.load(partial_of(out)))
    arrays["rows"][0, 1] += 1
    identity, _ = str(arrays.pop("identity")), arrays.pop("sha256")
    whole = np.array(journal._content_hash(arrays, identity))  # as one would who knows how it is made
    np.savez(partial_of(out), **arrays, identity=np.array(identity), sha256=whole)
    with pytest.raises(PerfModelError, match=r"damaged \(array rows\)"):
        build_losses(model, rows(), out, resume=True)


def test_a_link_to_nothing_where_unfinished_work_would_lie(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    partial_of(out).symlink_to(tmp_path / "absent.npz")
    for resume in (False, True):
        with pytest.raises(PerfModelError, match="is a link to a file that does not exist; remove the link"):
            build_losses(model, rows(), out, resume=resume)
    build_losses(model, rows(), out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_what_is_done_outlives_a_table_that_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise PerfModelError("no table")

    out = tmp_path / "t.npz"
    monkeypatch.setattr("perfmodel.losses.build.LossTable", refuse)
    with pytest.raises(PerfModelError, match="no table"):
        build_losses(model, rows(), out)
    assert not out.exists()
    assert np.load(partial_of(out))["done"].all()


def change_byte(made: Any, layer: int, expert: int) -> None:
    """Another value in the middle of one expert's weights, and nothing else: neither sizes nor headers."""
    name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"
    data = bytearray(made.tensors[name].data)
    data[len(data) // 2 + 3] ^= 1
    write(made.folder, {**made.tensors, name: made.tensors[name]._replace(data=bytes(data))})


def test_weights_that_changed_anywhere_in_what_is_done_are_not_resumed(tmp_path: Path) -> None:
    made, out = make(tmp_path / "model"), tmp_path / "t.npz"
    half_done(made.folder, out)
    change_byte(made, 0, 2)
    with pytest.raises(PerfModelError, match=r"checkpoint changed: row 0 of its layers, expert 2\); .*--overwrite"):
        build_losses(made.folder, rows(), out, resume=True)
    change_byte(made, 1, 3)  # not done yet, so nothing is mixed
    build_losses(made.folder, rows(), out, resume=True)
    build_losses(made.folder, rows(), tmp_path / "whole.npz")
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()
    made = make(tmp_path / "model")
    before = LossTable.load(out).info["sha256"]["checkpoint"]
    assert build_losses(made.folder, rows()).info["sha256"]["checkpoint"] != before


def test_a_failure_says_what_is_kept_and_how_to_go_on(tmp_path: Path) -> None:
    made, out = make(tmp_path / "model"), tmp_path / "t.npz"
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    bad = made.tensors[name]._replace(data=np.full(HIDDEN * INNER, np.inf, "<f4").tobytes())
    write(made.folder, {**made.tensors, name: bad})
    with pytest.raises(
        PerfModelError, match=r"holds inf .*; 7 of 8 experts are done and kept: .*--resume.*--overwrite"
    ):
        build_losses(made.folder, rows(), out)
    write(made.folder, made.tensors)
    done: list[int] = []
    build_losses(made.folder, rows(), out, resume=True, report=lambda now, total: done.append(now))
    assert done == [7, 8]
    build_losses(made.folder, rows(), tmp_path / "whole.npz")
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()


# --- finished ---


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_table_is_not_built_again(resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, out = make(tmp_path / "model"), tmp_path / "t.npz"
    table = build_losses(made.folder, rows(), out)
    before = out.read_bytes(), out.stat().st_mtime_ns
    monkeypatch.setattr("perfmodel.losses.build.gptq_losses", None)
    done: list[int] = []
    again = build_losses(made.folder, rows(), out, resume=resume, report=lambda now, total: done.append(now))
    assert done == [LAYERS * EXPERTS]
    assert_array_equal(again.losses, table.losses)
    assert dict(again.info) == dict(table.info)
    change_byte(made, 1, 1)
    with pytest.raises(
        PerfModelError, match=r"finished table of something else \(the contents of checkpoint changed\)"
    ):
        build_losses(made.folder, rows(), out, resume=resume)
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"calibration": rows(seed=9)}, "contents of calibration changed"),
        ({"held_out": rows(seed=9)}, "held-out here only"),
        ({"bits": (2, 4)}, "bits 1,2,3,4 there, 2,4 here"),
        ({"damping": 0.5}, "damping 'auto' there, 0.5 here"),
        ({"method": "rtn"}, "method 'gptq' there, 'rtn' here"),
    ],
)
def test_a_finished_table_of_something_else_is_replaced_on_demand_only(
    model: Path, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    out = tmp_path / "t.npz"
    build_losses(model, rows(), out)
    before = out.read_bytes()
    given = {"calibration": rows(), **changes}
    for resume in (False, True):
        with pytest.raises(PerfModelError, match=rf"finished table of something else .*{words}.*--overwrite"):
            build_losses(model, output=out, resume=resume, **given)
        assert out.read_bytes() == before
    build_losses(model, output=out, overwrite=True, **given)
    assert out.read_bytes() != before


def test_a_replacement_that_was_stopped_is_resumed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    build_losses(model, rows(), out, method="rtn")
    half_done(model, out, overwrite=True)
    assert LossTable.load(out).info["method"] == "rtn"  # until the new one is finished
    build_losses(model, rows(), out, resume=True)
    assert LossTable.load(out).info["method"] == "gptq"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("options", [{"group_size": 4}, {}])
def test_a_finished_table_counts_whatever_lies_unfinished_beside_it(
    model: Path, resume: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "t.npz"
    build_losses(model, rows(), out)
    half_done(model, out, overwrite=True, **options)
    before = out.read_bytes(), partial_of(out).read_bytes()
    done: list[int] = []
    table = build_losses(model, rows(), out, resume=resume, report=lambda now, total: done.append(now))
    assert done == [LAYERS * EXPERTS]
    assert table.info["group_size"] is None
    assert (out.read_bytes(), partial_of(out).read_bytes()) == before
    with pytest.raises(PerfModelError, match=r"unfinished build.*--overwrite, which also replaces the finished table"):
        build_losses(model, rows(), out, bits=(2, 8), resume=True)


def test_names_are_no_reason_to_build_again(tmp_path: Path) -> None:
    one, two = (make(tmp_path / name).folder for name in ("one", "two"))
    out, whole = tmp_path / "t.npz", tmp_path / "whole.npz"
    build_losses(one, rows(), out)
    before = out.read_bytes()
    assert build_losses(two, rows(name="other"), out).info["model"] == "one"  # as in the file, which is left as it is
    assert out.read_bytes() == before
    half_done(one, tmp_path / "resumed.npz")
    table = build_losses(two, rows(name="other"), tmp_path / "resumed.npz", resume=True)
    assert (table.info["model"], table.info["calibration"]) == ("two", "other")
    build_losses(two, rows(name="other"), whole)
    assert (tmp_path / "resumed.npz").read_bytes() == whole.read_bytes()
    here, there = arrays_of(whole), arrays_of(out)
    for name in set(here) - {"metadata"}:
        assert_array_equal(here[name], there[name])


def test_names_of_folders_do_not_count_where_the_config_has_a_name(tmp_path: Path) -> None:
    tables = []
    for name in ("one", "two"):
        folder = make(tmp_path / name).folder
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "someone/Toy-8x1/"}), "utf-8")
        build_losses(folder, rows(), tmp_path / f"{name}.npz")
        tables.append((tmp_path / f"{name}.npz").read_bytes())
    assert tables[0] == tables[1]
    assert LossTable.load(tmp_path / "one.npz").info["model"] == "Toy-8x1"


def test_what_is_done_reaches_the_disk_from_time_to_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    plain = journal.write_npz

    def counted(path: Path, arrays: Any) -> None:
        written.append(int(arrays["done"].sum()))
        plain(path, arrays)

    monkeypatch.setattr(journal, "write_npz", counted)
    clock = iter(np.arange(0.0, 100.0, 0.9))
    monkeypatch.setattr(journal.time, "monotonic", lambda: next(clock))
    build_losses(model, rows(), tmp_path / "t.npz")
    assert len(written) > 1
    assert written[-1] == LAYERS * EXPERTS


# --- through a file, and around it ---


def test_small_matrices_take_one_thread(model: Path) -> None:
    during: list[set[int]] = []

    def threads() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        before = threads()
        build_losses(model, rows(), report=lambda done, total: during.append(threads()))
        assert threads() == before
    assert during[:-1] == [{1}] * LAYERS * EXPERTS


def test_metadata_is_plain_json(model: Path, tmp_path: Path) -> None:
    build_losses(model, rows(), tmp_path / "t.npz", held_out=rows(seed=3))
    info = json.loads(str(arrays_of(tmp_path / "t.npz")["metadata"].item()))
    assert info["held_out"] == "calibration"
    assert "folds" not in info
    assert len(info["scale_bits_per_weight"]) == len(BITS)


# --- the bundled table ---


def test_the_bundled_table_says_what_it_is_of() -> None:
    table = LossTable.load("tiny-mixtral-32l-losses")
    expected = {
        "source": "measured", "model": "tiny-mixtral-32l", "model_type": "mixtral", "num_layers": 32, "num_experts": 8,
        "top_k": 2, "hidden_size": 64, "expert_size": 128, "method": "gptq", "damping": 0.01, "order": "natural",
        "group_size": None,
    }  # fmt: skip
    assert expected.items() <= dict(table.info).items()


def test_the_bundled_table_is_the_one_that_was_published(shared: Path) -> None:
    names = ["losses", "losses_rtn", "n_tokens", "output_variance", "bits"]
    published = read_npz(shared / "tiny-mixtral" / "loss_table.npz", names)
    bundled = read_npz(Path(__file__).parent.parent / "traces" / "tiny-mixtral-32l-losses.npz", names)
    for name in names:
        assert bundled[name].dtype == published[name].dtype
        assert bundled[name].tobytes() == published[name].tobytes()
