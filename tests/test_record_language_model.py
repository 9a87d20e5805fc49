"""Language-model loss of checkpoints whose experts are quantised."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import recorded

from perfmodel.errors import ModelConfigError, PerfModelError, PolicyError
from perfmodel.losses.calibration import Calibration
from perfmodel.losses.checkpoint import Expert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from perfmodel.losses.expert import Rounding, gptq_expert  # noqa: E402  # below the skips
from perfmodel.losses.record.capture import capture  # noqa: E402
from perfmodel.losses.record.language_model import QuantisedModel, quantiser  # noqa: E402

SHAPE = (recorded.LAYERS, recorded.EXPERTS)
MIXED = np.array([[0, 1, 2, 3], [4, 4, 1, 0], [2, 3, 8, 1]])


class Place(NamedTuple):
    """A checkpoint and text for it."""

    checkpoint: Path
    texts: list[Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A Mixtral of three layers."""
    folder = tmp_path_factory.mktemp("record")
    return Place(recorded.save_model(recorded.make_model(), folder / "toy"), recorded.write_texts(folder / "texts"))


def by_library(checkpoint: Path, windows: list[Any]) -> float:
    """The loss that Transformers computes itself, window by window."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    total = 0.0
    with torch.no_grad():
        for window in windows:
            ids = torch.from_numpy(window)[None]
            total += float(model(ids, labels=ids).loss) * (window.size - 1)
    return total / sum(window.size - 1 for window in windows)


def nearest(w: Any, bits: int) -> Any:
    """Rounding to nearest, one row and one weight at a time."""
    rows = []
    for row in w.astype(float):
        if bits == 1:
            rows.append(np.where(row >= 0, 1, -1) * np.abs(row).mean())
            continue
        low, high = min(row.min(), 0), max(row.max(), 0)
        scale = (high - low) / (2**bits - 1)
        zero = round(-low / scale)
        rows.append([(min(max(round(x / scale) + zero, 0), 2**bits - 1) - zero) * scale for x in row])
    return np.array(rows)


def test_loss_is_that_of_the_library(made: Place) -> None:
    model = QuantisedModel(made.checkpoint, quantiser("rtn"))
    assert (model.num_layers, model.num_experts) == SHAPE
    for sequence, tokens in ((32, None), (50, 120), (200, None)):
        windows = model.windows(made.texts, tokens=tokens, sequence=sequence)
        np.testing.assert_allclose(model.loss(windows), by_library(made.checkpoint, windows), rtol=1e-6, atol=0)
        np.testing.assert_allclose(model.loss(windows, np.zeros(SHAPE, int)), model.loss(windows), rtol=1e-15, atol=0)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_loss_is_that_of_a_checkpoint_with_rounded_weights(family: str, tmp_path: Path) -> None:
    """The rounded weights are written to a checkpoint of their own, by a rounding of its own."""
    original = recorded.make_model(family)
    checkpoint = recorded.save_model(original, tmp_path / "original")
    layers = [1, 2] if family == "qwen3_moe" else [0, 1, 2]
    assigned = MIXED[-len(layers) :]
    with torch.no_grad():
        for row, layer in enumerate(layers):
            experts = original.model.layers[layer].mlp.experts
            for expert, bits in enumerate(assigned[row].tolist()):
                if bits:
                    both, down = experts.gate_up_proj[expert], experts.down_proj[expert]
                    both.copy_(torch.from_numpy(nearest(both.numpy(), bits)))
                    down.copy_(torch.from_numpy(nearest(down.numpy(), bits)))
    rounded = recorded.save_model(original, tmp_path / "rounded")
    model = QuantisedModel(checkpoint, quantiser("rtn"))
    windows = model.windows(recorded.write_texts(tmp_path), sequence=32)
    found = model.loss(windows, assigned)
    np.testing.assert_allclose(found, by_library(rounded, windows), rtol=1e-6, atol=0)
    assert abs(found - model.loss(windows)) > 1e-3 * found


def test_assignments_leave_no_trace(made: Place) -> None:
    """Whatever was asked before, the same assignment has the same loss to the last bit."""
    model = QuantisedModel(made.checkpoint, quantiser("rtn"))
    windows = model.windows(made.texts, sequence=32)
    asked = [None, MIXED, np.full(SHAPE, 2), MIXED[::-1], None, np.full(SHAPE, 2), MIXED]
    found = [model.loss(windows, one) for one in asked]
    assert found[0] == found[4]
    assert found[1] == found[6]
    assert found[2] == found[5]
    assert len(set(found)) == 4
    assert found[1] == QuantisedModel(made.checkpoint, quantiser("rtn")).loss(windows, MIXED)


def test_every_expert_is_quantised_once_at_every_width(made: Place, tmp_path: Path) -> None:
    calls: list[tuple[int, int, int]] = []

    def quantise(layer: int, expert: int, weights: Expert, bits: int) -> Expert:
        calls.append((layer, expert, bits))
        return weights

    model = QuantisedModel(made.checkpoint, quantise)
    windows = model.windows(made.texts[:1], sequence=32)
    losses = {model.loss(windows, one) for one in (MIXED, None, np.full(SHAPE, 2), MIXED)}
    assert len(losses) == 1  # this one changes nothing
    places = [(layer, expert) for layer in range(SHAPE[0]) for expert in range(SHAPE[1])]
    mixed = {(*place, int(MIXED[place])) for place in places if MIXED[place]}
    assert sorted(calls) == sorted(mixed | {(*place, 2) for place in places})
    # Layers are counted among those with experts, here all but the first.
    calls.clear()
    other = QuantisedModel(recorded.save_model(recorded.make_model("qwen3_moe"), tmp_path / "qwen"), quantise)
    other.loss(windows, MIXED[:2])
    assert {layer for layer, _, _ in calls} == {0, 1}


def test_gptq_takes_every_experts_own_rows(made: Place) -> None:
    rows = capture(made.checkpoint, made.texts, sequence=32)
    weights = Expert(*(np.random.default_rng(5).normal(size=s) for s in ((24, 16), (24, 16), (16, 24))))
    quantise = quantiser("gptq", rows, group=8, damping=0.05, order="activation")
    how = Rounding((3,), 8, 0.05, "activation")
    for layer, expert in ((0, 1), (2, 3)):
        own = rows.hidden[layer][(rows.expert_ids[layer] == expert).any(axis=1)].astype(float)
        assert len(own) > 8
        for found, expected in zip(quantise(layer, expert, weights, 3), gptq_expert(weights, own, 3, how), strict=True):
            np.testing.assert_array_equal(found, expected)
    seldom = Calibration(rows.hidden, np.where(rows.expert_ids == 1, 0, rows.expert_ids)[..., :1])
    everything = rows.hidden[0].astype(float)
    expected = gptq_expert(weights, everything, 3, how).gate
    found = quantiser("gptq", seldom, group=8, damping=0.05, order="activation")(0, 1, weights, 3).gate
    np.testing.assert_array_equal(found, expected)  # nobody's rows are its own, so all of the layer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((2, 4), int), r"found int64 \[2, 4\], allowed: whole numbers \[3, 4\]"),
        (np.full(SHAPE, 2.0), r"found float64 \[3, 4\], allowed: whole numbers \[3, 4\]"),
        (np.full(SHAPE, -1), "found -1 bits, allowed: 0"),
        (np.full(SHAPE, 17), "found 17 bits, allowed: 0"),
        ("two", "allowed: whole numbers"),
    ],
)
def test_wrong_assignments(wrong: Any, words: str, made: Place) -> None:
    model = QuantisedModel(made.checkpoint, quantiser("rtn"))
    with pytest.raises(PolicyError, match=words):
        model.loss(model.windows(made.texts, sequence=32), wrong)


def test_wrong_methods_and_models(made: Place, tmp_path: Path) -> None:
    with pytest.raises(PerfModelError, match="method: found 'awq', allowed: gptq, rtn"):
        quantiser("awq")  # type: ignore[arg-type]
    with pytest.raises(PerfModelError, match="gptq needs calibration rows"):
        quantiser("gptq")
    with pytest.raises(PerfModelError, match=r"config\.json: no such file"):
        QuantisedModel(tmp_path, quantiser("rtn"))
    with pytest.raises(ModelConfigError, match="gpt_oss"):
        QuantisedModel(recorded.save_model(recorded.make_model("gpt_oss"), tmp_path / "other"), quantiser("rtn"))
    with pytest.raises(PerfModelError, match="sequence: found 5000 tokens, allowed: 2 to 1024"):
        QuantisedModel(made.checkpoint, quantiser("rtn")).windows(made.texts, sequence=5000)
    with pytest.raises(PerfModelError, match="windows: found none"):
        QuantisedModel(made.checkpoint, quantiser("rtn")).loss([])


def test_the_small_model_of_this_project(shared: Path, tmp_path: Path) -> None:
    """On this file: a loss far below that of guessing, and ever larger losses with ever fewer bits."""
    text = tmp_path / "text.py"
    text.write_bytes(Path(__file__).read_bytes())
    model = QuantisedModel(shared / "tiny-mixtral" / "model", quantiser("rtn"))
    windows = model.windows([text], tokens=1024)
    own = model.loss(windows)
    assert 1 < own < 5 < np.log(2048)
    added = [model.loss(windows, np.full((32, 8), bits)) - own for bits in (4, 3, 2, 1)]
    assert np.abs(added[0]) < 0.05
    assert added[0] < added[1] < 0.15 < added[3]
    assert added[1] < added[2] < 0.6
    assert added[3] > 1.5
    rows = Calibration.load(shared / "tiny-mixtral" / "calibration.npz")
    better = QuantisedModel(shared / "tiny-mixtral" / "model", quantiser("gptq", rows))
    assert 0 < better.loss(windows, np.full((32, 8), 2)) - own < added[2]
