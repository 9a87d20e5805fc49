"""What a build refuses: options, rows, outputs; and the command around it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import EXPERTS, HIDDEN, LAYERS, TOP_K, make, rows, write
from commands import check_refusal, run
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, TraceError
from perfmodel.losses import Calibration, build_losses
from perfmodel.routing.npz import read_npz


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model")).folder


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "calibration.npz"
    rows().save(file)
    return file


def check_error(error: Exception, *words: str) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message, message


# --- options ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "awq"}, ("method", "'awq'", "gptq, rtn")),
        ({"method": None}, ("method", "None")),
        ({"bits": ()}, ("bits", "1,2,3,4")),
        ({"bits": (2, 1)}, ("bits", "rising")),
        ({"bits": (2, 2)}, ("bits", "rising")),
        ({"bits": (0, 2)}, ("bits", "1 to 16")),
        ({"bits": (2, 17)}, ("bits", "1 to 16")),
        ({"bits": (2.0,)}, ("bits", "whole")),
        ({"bits": (True,)}, ("bits", "whole")),
        ({"bits": "12"}, ("bits", "'12'")),
        ({"bits": 3}, ("bits", "3")),
        ({"group_size": 0}, ("group size", "0", "2 to 20")),
        ({"group_size": 1}, ("group size", "1", "2 to 20")),
        ({"group_size": 21}, ("group size", "21", "2 to 20")),
        ({"group_size": 4.0}, ("group size", "4.0")),
        ({"damping": 0}, ("damping", "0", "above 0")),
        ({"damping": -0.1}, ("damping", "-0.1")),
        ({"damping": float("nan")}, ("damping", "nan")),
        ({"damping": float("inf")}, ("damping", "inf")),
        ({"damping": "much"}, ("damping", "'much'", "auto")),
        ({"damping": True}, ("damping", "True")),
        ({"order": "random"}, ("order", "'random'", "natural, activation")),
        ({"folds": 1}, ("folds", "1", "2 to")),
        ({"folds": 2.5}, ("folds", "2.5")),
        ({"folds": 40}, ("folds: found 40", "2 to 24", "48 rows of a layer")),
        ({"method": "rtn", "damping": 0.1, "order": "natural"}, ("damping, order", "rtn")),
        ({"method": "rtn", "folds": 4}, ("folds", "rtn")),
        ({"held_out": rows(seed=2), "folds": 4}, ("folds", "held out")),
        ({"held_out": rows()}, ("held-out rows", "calibration itself")),
        ({"held_out": rows(7, seed=3)}, ("7 rows", "8 or more")),
        ({"held_out": 3}, ("held-out rows", "3", ".npz")),
        ({"resume": True}, ("resume", "without an output")),
        ({"overwrite": True}, ("overwrite", "without an output")),
        ({"resume": True, "overwrite": True}, ("resume and overwrite",)),
    ],
)
def test_options_that_are_refused(model: Path, options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PerfModelError) as raised:
        build_losses(model, rows(), **options)
    check_error(raised.value, *words)


def test_too_little_damping_is_refused(model: Path) -> None:
    # Fewer rows than columns: the moment is singular, and this damping is lost in rounding.
    with pytest.raises(PerfModelError) as raised:
        build_losses(model, rows(12), damping=1e-30)
    check_error(raised.value, "expert 0 of layer 0", "damping 1e-30", "auto")


def test_output_too_large_for_numbers(tmp_path: Path) -> None:
    made = make(tmp_path / "model", dtype="F64")
    calibration = rows()
    for name, one in made.tensors.items():
        values = np.frombuffer(one.data, "<f8" if one.dtype == "F64" else "<f4")
        if one.dtype == "F64":
            made.tensors[name] = one._replace(data=(values * 1e200).tobytes())
    write(made.folder, made.tensors)
    with pytest.raises(PerfModelError) as raised:
        build_losses(made.folder, calibration)
    check_error(raised.value, "expert 0 of layer 0", "too large")


# --- rows ---


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    made = rows(
        expert_weights=np.full((LAYERS, 48, TOP_K), 0.5, np.float16), layer_index=np.arange(LAYERS), info={"text": "C"}
    )
    made.save(tmp_path / "c.npz")
    found = Calibration.load(tmp_path / "c.npz")
    for name in ("hidden", "expert_ids", "expert_weights", "layer_index"):
        assert_array_equal(getattr(found, name), getattr(made, name))
        assert getattr(found, name).dtype == getattr(made, name).dtype
        assert not getattr(found, name).flags.writeable
    assert dict(found.info) == {"text": "C"}
    assert found.content_hash() == made.content_hash() != rows().content_hash()
    assert rows(expert_weights=made.expert_weights).content_hash() == rows().content_hash()
    assert rows(hidden=rows().hidden.astype(np.float32)).content_hash() == rows().content_hash()
    assert rows(seed=2).content_hash() != rows().content_hash()


def _with(array: np.ndarray, place: tuple[int, ...], value: Any) -> np.ndarray:
    changed = array.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": rows().hidden[0]}, ("hidden", "3 axes")),
        ({"hidden": rows().hidden[:, :0]}, ("hidden", "not empty")),
        ({"hidden": rows().hidden.astype(np.float64)}, ("hidden", "float64", "float16 or float32")),
        ({"hidden": rows().hidden.astype(int)}, ("hidden", "int64", "float16")),
        ({"hidden": _with(rows().hidden, (1, 7, 3), np.nan)}, ("hidden", "layer 1, row 7", "finite")),
        ({"hidden": _with(rows().hidden, (0, 2, 0), np.inf)}, ("hidden", "layer 0, row 2", "finite")),
        ({"hidden": [[["a"]]]}, ("hidden", "allowed: float16")),
        ({"hidden": [[1], [2, 3]]}, ("hidden", "no array")),
        ({"expert_ids": rows().expert_ids[:, :-1]}, ("expert_ids", "[2, 47, 2]", "[2, 48,")),
        ({"expert_ids": rows().expert_ids.astype(float)}, ("expert_ids", "float64", "whole")),
        ({"expert_ids": rows().expert_ids[..., 0]}, ("expert_ids", "3 axes")),
        ({"expert_ids": _with(rows().expert_ids.astype(np.int8), (1, 5, 0), -1)}, ("layer 1, row 5", "-1")),
        ({"expert_ids": np.ones_like(rows().expert_ids)}, ("layer 0, row 0", "[1, 1]", "once")),
        ({"expert_weights": np.ones((LAYERS, 48, 3), np.float32)}, ("expert_weights", "[2, 48, 3]")),
        ({"expert_weights": -np.ones((LAYERS, 48, TOP_K), np.float32)}, ("expert_weights", "-1")),
        ({"layer_index": np.array([1, 0])}, ("layer_index", "rising")),
        ({"layer_index": np.array([0, 1, 2])}, ("layer_index", "2 layers")),
        ({"layer_index": np.array([0.0, 1.0])}, ("layer_index", "whole")),
    ],
)
def test_rows_that_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(TraceError) as raised:
        rows(**changes)
    check_error(raised.value, "calibration", *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": rows().hidden[:1], "expert_ids": rows().expert_ids[:1]}, ("layers 1", "allowed: 2")),
        ({"hidden": rows().hidden[..., :5]}, ("hidden size 5", f"allowed: {HIDDEN}")),
        ({"expert_ids": rows().expert_ids[..., :1]}, ("experts of a row 1", "allowed: 2")),
        ({"expert_ids": rows().expert_ids + 1}, ("expert_ids holds 4", "0 to 3")),
        ({"layer_index": np.array([0, 3])}, ("layer_index", "[0, 3]", "[0, 1]")),
    ],
)
def test_rows_of_another_model(model: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    for options in ({}, {"held_out": rows(**changes)}):
        with pytest.raises(TraceError) as raised:
            build_losses(model, rows() if options else rows(**changes), **options)
        check_error(raised.value, *words)


def test_calibration_files_that_are_none(calibration: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", losses=np.ones(3))
    arrays = dict(np.load(calibration))
    np.savez(tmp_path / "info.npz", **{**arrays, "metadata": np.array("{")})
    np.savez(tmp_path / "list.npz", **{**arrays, "metadata": np.array("[1]")})
    np.savez(tmp_path / "pickled.npz", **{**arrays, "hidden": np.array([{}], dtype=object)})
    (tmp_path / "text.npz").write_text("x", encoding="utf-8")
    (tmp_path / "cut.npz").write_bytes(calibration.read_bytes()[:-30])
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (tmp_path / "absent.npz", ("no such file",)),
        (tmp_path, ("directory",)),
        (tmp_path / "other.npz", ("'hidden'", "losses")),
        (tmp_path / "info.npz", ("metadata", "JSON")),
        (tmp_path / "list.npz", ("metadata", "list")),
        (tmp_path / "pickled.npz", ("pickled",)),
        (tmp_path / "text.npz", ("cannot be read",)),
        (tmp_path / "cut.npz", ("cannot be read",)),
        (None, ("None",)),
    ]
    for given, words in cases:
        with pytest.raises(TraceError) as raised:
            Calibration.load(given)
        check_error(raised.value, *words)
    for bad in (tmp_path / "c.txt", tmp_path / "text.npz" / "c.npz"):
        with pytest.raises(TraceError) as raised:
            rows().save(bad)
        check_error(raised.value, str(bad))


def test_what_a_file_declares_is_checked_before_it_is_read(
    model: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrays of zeros shrink a thousandfold, so that a small file may hold gigabytes.
    arrays = dict(np.load(calibration))
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"hidden": np.zeros((LAYERS, 48, 3 * HIDDEN), np.float16)}, (f"hidden size {3 * HIDDEN}", str(HIDDEN))),
        ({"hidden": np.zeros((9, 48, HIDDEN), np.float16)}, ("expert_ids", "[9, 48,")),
        ({"hidden": np.zeros(10**5, np.float16)}, ("hidden has shape [100000]", "3 axes")),
        ({"expert_weights": np.zeros((LAYERS, 48, 5), np.float32)}, ("expert_weights", "[2, 48, 2]")),
        ({"layer_index": np.zeros(10**5, np.int64)}, ("layer_index", "[100000]", "2 layers")),
        ({"metadata": np.array(["{}"] * 100)}, ("metadata has shape [100]", "JSON")),
        ({"metadata": np.array("x" * 2**25)}, ("metadata is longer than 64 MiB",)),
    ]
    monkeypatch.setattr("perfmodel.losses.calibration.read_npz", None)
    for changes, words in cases:
        np.savez(tmp_path / "c.npz", **{**arrays, **changes})
        for options in ({"calibration": tmp_path / "c.npz"}, {"calibration": rows(), "held_out": tmp_path / "c.npz"}):
            with pytest.raises(TraceError) as raised:
                build_losses(model, **options)
            check_error(raised.value, "c.npz", *words)


# --- outputs ---


def test_outputs_that_are_refused(model: Path, calibration: Path, tmp_path: Path) -> None:
    ours, table = tmp_path / "ours.npz", tmp_path / "table.npz"
    np.savez(table, losses=np.ones((1, 1, 4)))
    ours.write_text("my notes", encoding="utf-8")
    loop = tmp_path / "loop.npz"
    loop.symlink_to(loop)
    (tmp_path / "folder.npz").mkdir()
    copy = tmp_path / "rows.npz"
    copy.write_bytes(calibration.read_bytes())
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (tmp_path / "t.csv", (".npz",)),
        ("", ("''", ".npz")),
        (3, ("3", ".npz")),
        (ours / "t.npz", ("not a folder",)),
        (tmp_path / "folder.npz", ("no regular file",)),
        (loop, ("loop.npz",)),
        ("a\0.npz", (".npz",)),
        (ours, ("left alone", "another output")),
        (table, ("left alone", "another output")),
        (copy, ("made from",)),
        (tmp_path / f"{'n' * 240}.npz", ("too long", "shorter name")),
        (tmp_path / f"{'n' * 300}.npz", ("too long",)),
        ("/proc/x.npz", ("cannot be written",)),
    ]
    for out, words in cases:
        with pytest.raises(PerfModelError) as raised:
            build_losses(tmp_path / "no checkpoint", copy, out)  # refused before anything else is looked at
        check_error(raised.value, "output", *words)
    with pytest.raises(PerfModelError, match="made from"):
        build_losses(model, copy, copy, overwrite=True)
    for foreign in (ours, table):
        with pytest.raises(PerfModelError, match="left alone"):
            build_losses(model, copy, foreign, overwrite=True)
    assert ours.read_text(encoding="utf-8") == "my notes"
    assert list(tmp_path.glob(".*")) == []
    long = tmp_path / f"{'n' * 222}.npz"
    build_losses(model, copy, long)
    assert LossTable.load(long).num_experts == EXPERTS


def test_outputs_in_new_folders_and_behind_links(model: Path, tmp_path: Path) -> None:
    build_losses(model, rows(), tmp_path / "new" / "folder" / "t.npz")
    link = tmp_path / "link.npz"
    link.symlink_to(tmp_path / "new" / "folder" / "t.npz")
    before = link.read_bytes()
    build_losses(model, rows(seed=4), link, overwrite=True)
    assert link.is_symlink()
    assert link.read_bytes() != before


def test_failed_builds_leave_the_output_alone(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    build_losses(model, rows(), out)
    before = out.read_bytes()
    with pytest.raises(PerfModelError):
        build_losses(model, rows(12), out, damping=1e-30, overwrite=True)
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


# --- the command ---


def test_command(model: Path, calibration: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    answer = run("losses", "build", model, "--calibration", calibration, "-o", out)
    assert answer.code == 0
    assert answer.err == f"wrote {out}\n"
    table, stored = LossTable.load(out), read_npz(out, ["losses_rtn"])
    lines = answer.out.splitlines()
    assert lines[0].startswith(f"model {model.name!r}: {LAYERS} layers x {EXPERTS} experts = 8 experts, in ")
    assert "every one held out once in 4 folds" in lines[1]
    for i, bits in enumerate(table.bits):
        means = [array[..., i].mean() for array in (table.losses, stored["losses_rtn"])]
        assert lines[-4 + i].split()[:3] == [str(bits), f"{means[0]:.4g}", f"{means[1]:.4g}"]
    for more in ((), ("--resume",)):
        again = run("losses", "build", model, "--calibration", calibration, "-o", out, *more)
        assert (again.code, again.err) == (0, f"{out} is finished already\n")
        assert again.out.splitlines()[2:] == lines[2 - (len(lines) - len(again.out.splitlines())) :]
    other = run("losses", "build", model, "--calibration", calibration, "-o", out, "--bits", "2,4,8")
    check_refusal(other, str(out), "bits 1,2,3,4 there, 2,4,8 here", "--overwrite")


def test_command_says_what_is_left_unfinished(model: Path, calibration: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    out = tmp_path / "t.npz"
    build_losses(model, calibration, out)
    with pytest.raises(KeyboardInterrupt):
        build_losses(model, calibration, out, group_size=4, overwrite=True, report=stop)
    command = ("losses", "build", model, "--calibration", calibration, "-o", out)
    answer = run(*command)
    left = "an unfinished build beside it ('.t.perfmodel-partial.npz') is left as it is"
    assert (answer.code, answer.err) == (0, f"{out} is finished already; {left}\n")
    document = run(*command, "--group-size", "4", "--resume", "--json").document
    assert document["experts_done_before"] == 2
    assert document["info"]["group_size"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_command_with_every_option(model: Path, calibration: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "t.npz", tmp_path / "other.npz"
    rows(40, seed=2).save(other)
    document = run(
        "losses", "build", model, "--calibration", calibration, "--held-out", other, "--method", "gptq",
        "--bits", "2,8", "--group-size", "4", "--damping", "0.25", "--order", "activation",
        "-o", out, "--overwrite", "--quiet", "--json",
    ).document  # fmt: skip
    expected = build_losses(
        model, calibration, held_out=other, bits=(2, 8), group_size=4, damping=0.25, order="activation"
    )
    assert_array_equal(LossTable.load(out).losses, expected.losses)
    assert document["info"] == json.loads(json.dumps(dict(expected.info)))
    assert [one["bits"] for one in document["mean_losses"]] == [2, 8]
    for i, one in enumerate(document["mean_losses"]):
        assert_allclose(one["loss"], expected.losses[..., i].mean(), rtol=1e-14, atol=0)
        assert one["over_rtn"] == one["loss"] / one["loss_rtn"]
    assert document["experts_with_borrowed_rows"] == 0
    assert document["experts_done_before"] == 0


def test_command_for_rounding_to_nearest(model: Path, calibration: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    answer = run("losses", "build", model, "--calibration", calibration, "--method", "rtn", "-o", out)
    assert answer.code == 0
    assert "rtn loss" in answer.out
    assert "gptq" not in answer.out
    folds = run(
        "losses", "build", model, "--calibration", calibration, "--folds", "3", "--bits", "2", "-o", out, "--overwrite"
    )
    assert "in 3 folds" in folds.out


def python(*arguments: object, close: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m perfmodel`` in a shell that closes some of its outputs."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    command = f"exec {shlex.join([sys.executable, '-m', 'perfmodel', *map(str, arguments)])} {close}"
    return subprocess.run(
        command, shell=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_closed_outputs(model: Path, calibration: Path, tmp_path: Path) -> None:
    for close, err in ((">&-", True), (">&- 2>&-", False)):
        out = tmp_path / f"{len(close)}.npz"
        answer = python("losses", "build", model, "--calibration", calibration, "-o", out, close=close)
        assert (answer.returncode, answer.stderr) == (0, f"wrote {out}\n" if err else "")
        assert LossTable.load(out).num_experts == EXPERTS


def test_interrupts_before_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    expected = (130, "", "perfmodel: interrupted\n")
    with monkeypatch.context() as patch:
        patch.setattr("perfmodel.cli.commands.build_parser", interrupt)
        assert run("--version") == expected
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "perfmodel.cli.commands")
        patch.setattr(sys, "meta_path", [type("Finder", (), {"find_spec": interrupt})])
        assert run("--version") == expected


def test_no_memory(model: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*given: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("perfmodel.losses.build.gptq_losses", exhausted)
    answer = run("losses", "build", model, "--calibration", calibration, "-o", tmp_path / "t.npz")
    check_refusal(answer, "not enough memory", "rows")
    assert "price" not in answer.err


def test_borrowed_rows_are_said(model: Path, tmp_path: Path) -> None:
    ids = np.broadcast_to(np.array([0, 1], np.uint8), (LAYERS, 48, TOP_K))
    rows(expert_ids=ids).save(tmp_path / "c.npz")
    answer = run("losses", "build", model, "--calibration", tmp_path / "c.npz", "-o", tmp_path / "t.npz")
    assert "4 experts had fewer than 8 rows of their own" in answer.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bits", "1,x"), ("--bits", "'x'")),
        (("--bits", "4,2"), ("bits", "rising")),
        (("--bits", ""), ("--bits", "''")),
        (("--group-size", "big"), ("--group-size", "'big'")),
        (("--damping", "lots"), ("--damping", "'lots'", "auto")),
        (("--damping", "-1"), ("damping", "-1")),
        (("--folds", "many"), ("--folds", "'many'")),
        (("--method", "gtpq"), ("method", "'gtpq'")),
        (("--order", "x"), ("order", "'x'")),
        (("--held-out", "absent.npz"), ("absent.npz", "no such file")),
        (("--resume", "--overwrite"), ("resume and overwrite",)),
    ],
)
def test_command_refuses(
    model: Path, calibration: Path, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    answer = run("losses", "build", model, "--calibration", calibration, "-o", tmp_path / "t.npz", *arguments)
    check_refusal(answer, *words)
    assert list(tmp_path.iterdir()) == []


def test_command_needs_a_checkpoint_rows_and_an_output(model: Path, calibration: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    check_refusal(run("losses", "build", model, "-o", out), "--calibration")
    check_refusal(run("losses", "build", model, "--calibration", calibration), "--out")
    check_refusal(run("losses", "build", "--calibration", calibration, "-o", out), "CHECKPOINT")
    check_refusal(run("losses", "build", "absent", "--calibration", calibration, "-o", out), "absent", "no such folder")
    check_refusal(run("losses"), "ACTION")
