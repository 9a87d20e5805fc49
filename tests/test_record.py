"""Calibration rows of real models: the rows that the experts get, a fair sample, and refusals."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any, NamedTuple

import commands
import numpy as np
import pytest
import recorded

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.losses.calibration import Calibration

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from perfmodel.losses.record import capture as capture_module  # noqa: E402  # below the skips
from perfmodel.losses.record.capture import capture  # noqa: E402
from perfmodel.record import text as text_module  # noqa: E402
from perfmodel.record.blocks import load_model, moe_blocks, outline  # noqa: E402

SEQUENCE = 32


class Place(NamedTuple):
    """A checkpoint and text for it."""

    checkpoint: Path
    texts: list[Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A Mixtral of three layers."""
    folder = tmp_path_factory.mktemp("record")
    checkpoint = recorded.save_model(recorded.make_model(), folder / "toy-moe")
    return Place(checkpoint, recorded.write_texts(folder / "texts"))


def routed(place: Place) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """Router inputs, ids and weights of every layer, seen by hooks on the routers while a plain loop runs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place.checkpoint, dtype=torch.float32)
    seen: list[list[tuple[Any, ...]]] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            rows: list[tuple[Any, ...]] = []
            layer.mlp.gate.register_forward_hook(lambda _, x, y, rows=rows: rows.append((x[0], y[2], y[1])))
            seen.append(rows)
    windows = text_module.cut(text_module.read_texts(place.checkpoint, place.texts, 300), SEQUENCE)
    with torch.no_grad():
        for batch in text_module.batches(windows):
            model(torch.from_numpy(batch))
    return model, [
        tuple(torch.cat([one[i].reshape(-1, one[i].shape[-1]) for one in rows]).numpy() for i in range(3))
        for rows in seen
    ]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_rows_are_what_the_experts_get(family: str, tmp_path: Path) -> None:
    checkpoint = recorded.save_model(recorded.make_model(family), tmp_path / family)
    place = Place(checkpoint, recorded.write_texts(tmp_path))
    found = capture(checkpoint, place.texts, sequence=SEQUENCE)
    _, expected = routed(place)
    layers = [1, 2] if family == "qwen3_moe" else [0, 1, 2]
    assert found.layer_index is not None
    assert found.layer_index.tolist() == layers
    assert found.hidden.shape == (len(layers), 150 + 41 + 90, recorded.HIDDEN)  # nothing is padded
    assert found.hidden.dtype == np.float16
    assert found.info["family"] == family
    for layer, (hidden, ids, weights) in enumerate(expected):
        # Another instance of the model may add up in another order on several threads: float16 may round the other way.
        assert np.abs(found.hidden[layer].astype(np.float64) - hidden).max() <= 2**-10 * np.abs(hidden).max()
        np.testing.assert_array_equal(found.expert_ids[layer], ids)
        np.testing.assert_allclose(found.expert_weights[layer], weights, rtol=1e-5, atol=0)


def test_the_rows_make_the_experts_output(made: Place) -> None:
    """Rows, ids and weights together give what the whole block adds, by its equation in NumPy."""
    found = capture(made.checkpoint, made.texts[:1], sequence=SEQUENCE, tokens=SEQUENCE)
    model = load_model(made.checkpoint)
    added: list[Any] = []
    hooks = [layer.mlp.register_forward_hook(lambda _, __, y: added.append(y)) for layer in model.model.layers]
    window = text_module.cut(text_module.read_texts(made.checkpoint, made.texts[:1], 300), SEQUENCE, SEQUENCE)[0]
    with torch.no_grad():
        model(torch.from_numpy(window)[None])
    assert len(hooks) == len(added) == recorded.LAYERS
    for layer, block in enumerate(moe_blocks(model)):
        stacked = block.experts.gate_up_proj.numpy().astype(float)
        down = block.experts.down_proj.numpy().astype(float)
        total = np.zeros((SEQUENCE, recorded.HIDDEN))
        for row, x in enumerate(found.hidden[layer].astype(float)):
            for expert, weight in zip(found.expert_ids[layer, row], found.expert_weights[layer, row], strict=True):
                gate, up = np.split(stacked[expert] @ x, 2)
                total[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        error = np.abs(total - added[layer][0].numpy()).max()
        assert error < 2e-3 * np.abs(total).max()  # float16 rows


def test_a_sample_is_drawn_from_all_tokens_and_is_the_same_in_every_layer(made: Place) -> None:
    everything = capture(made.checkpoint, made.texts, sequence=SEQUENCE)
    some = capture(made.checkpoint, made.texts, sequence=SEQUENCE, rows=60, seed=3)
    same = (some.hidden[:, :, None] == everything.hidden[:, None]).all(axis=(0, 3))
    places = [-1]
    for row in same:  # the first token of a window may look the same elsewhere
        places.append(int(next(i for i in np.flatnonzero(row) if i > places[-1])))
    places = places[1:]
    assert places[0] < 60  # from the beginning to the end
    assert places[-1] > 200
    for name in ("expert_ids", "expert_weights"):
        np.testing.assert_array_equal(getattr(some, name), getattr(everything, name)[:, places])
    other = capture(made.checkpoint, made.texts, sequence=SEQUENCE, rows=60, seed=4)
    assert not np.array_equal(some.hidden, other.hidden)


def test_tokens_are_taken_in_turn_from_every_file(made: Place) -> None:
    found = capture(made.checkpoint, made.texts, sequence=20, tokens=50)
    alone = [capture(made.checkpoint, [file], sequence=20, tokens=20) for file in made.texts]
    assert found.num_rows == 50
    np.testing.assert_array_equal(found.expert_ids[:, :20], alone[0].expert_ids)
    np.testing.assert_array_equal(found.expert_ids[:, 20:40], alone[1].expert_ids)
    np.testing.assert_array_equal(found.expert_ids[:, 40:], alone[2].expert_ids[:, :10])


def test_the_same_answers_with_and_without_hooks(made: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(made.checkpoint)
    with_hooks: list[Any] = []
    monkeypatch.setattr(capture_module, "load_model", lambda *_: model)
    handle = model.base_model.register_forward_hook(lambda _, __, out: with_hooks.append(out.last_hidden_state))
    capture(made.checkpoint, made.texts, sequence=SEQUENCE)
    handle.remove()
    assert not any(block.experts._forward_pre_hooks for block in moe_blocks(model))
    windows = text_module.cut(text_module.read_texts(made.checkpoint, made.texts, 300), SEQUENCE)
    batches = text_module.batches(windows)
    assert len(with_hooks) == len(batches)
    with torch.inference_mode():
        for batch, hidden in zip(batches, with_hooks, strict=True):
            assert torch.equal(model(torch.from_numpy(batch)).logits, model.lm_head(hidden))


def test_hooks_are_gone_after_a_failure(made: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(made.checkpoint)
    monkeypatch.setattr(capture_module, "load_model", lambda *_: model)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(made.checkpoint, made.texts, sequence=SEQUENCE, report=stop)
    assert not any(block.experts._forward_pre_hooks for block in moe_blocks(model))


def test_values_beyond_float16_are_kept_in_float32(tmp_path: Path) -> None:
    model = recorded.make_model()
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.fill_(1e5)
    checkpoint = recorded.save_model(model, tmp_path / "loud")
    found = capture(checkpoint, recorded.write_texts(tmp_path), sequence=SEQUENCE, tokens=SEQUENCE)
    assert found.hidden.dtype == np.float32
    assert np.abs(found.hidden[1]).max() > 1e5
    with pytest.raises(ModelConfigError, match=r"layer 1 is given rows that are not finite; try another dtype"):
        capture(checkpoint, recorded.write_texts(tmp_path), sequence=SEQUENCE, tokens=SEQUENCE, dtype="float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_number_formats_give_rows_that_are_nearly_the_same(dtype: str, made: Place) -> None:
    exact, rough = (capture(made.checkpoint, made.texts, sequence=SEQUENCE, dtype=name) for name in ("float32", dtype))
    difference = np.abs(rough.hidden[0].astype(float) - exact.hidden[0]).max() / np.abs(exact.hidden[0]).max()
    assert 0 < difference < 0.05
    assert rough.info["dtype"] == dtype


def test_the_command_writes_the_same_file_again(made: Place, tmp_path: Path) -> None:
    files = [tmp_path / "a.npz", tmp_path / "new" / "b.npz"]
    options = ["--tokens", 100, "--sequence", SEQUENCE, "--rows", 80]
    for file in files:
        answer = commands.run("losses", "capture", made.checkpoint, "--text", *made.texts, *options, "-o", file)
        assert answer.code == 0, answer.err
        assert answer.err == f"wrote {file}\n"
    assert "model 'toy-moe' (mixtral): 100 tokens of 3 files, 80 kept, drawn with seed 0" in answer.out
    assert files[0].read_bytes() == files[1].read_bytes()
    before = files[0].read_bytes()
    same = commands.run("losses", "capture", made.checkpoint, "--text", *made.texts, *options, "-o", files[0])
    assert (same.code, files[0].read_bytes()) == (0, before)
    other = ["losses", "capture", made.checkpoint, "--text", *made.texts, "-o", files[0], "--json"]
    refused = commands.run(*other)
    commands.check_refusal(refused, str(files[0]), "tokens 100 there, 281 here", "--overwrite")
    assert files[0].read_bytes() == before
    again = commands.run(*other, "--overwrite")
    assert again.document["info"]["tokens"] == again.document["info"]["rows"] == 281
    assert again.document["rows_per_expert"]["mean"] == 281 * recorded.TOP_K / recorded.EXPERTS
    loaded = Calibration.load(files[0])
    assert loaded.num_rows == 281
    assert loaded.info == again.document["info"]
    assert [one["name"] for one in loaded.info["texts"]] == ["first.txt", "second.txt", "third.txt"]


def test_progress_is_reported(made: Place) -> None:
    told: list[tuple[int, int]] = []
    capture(made.checkpoint, made.texts, sequence=SEQUENCE, report=lambda done, total: told.append((done, total)))
    assert told[-1] == (281, 281)
    assert told == sorted(set(told))


def test_nothing_is_looked_up_elsewhere(made: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was tried")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert capture(made.checkpoint, made.texts[:1], tokens=8).num_rows == 8


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt_oss", "model family gpt_oss: the experts at model.layers.0.mlp.experts are not understood"),
        ("llama", "model family llama: no experts were found"),
    ],
)
def test_families_that_are_not_understood_are_named(family: str, words: str, tmp_path: Path) -> None:
    checkpoint = recorded.save_model(recorded.make_model(family), tmp_path / family)
    answer = commands.run(
        "losses", "capture", checkpoint, "--text", *recorded.write_texts(tmp_path), "-o", tmp_path / "o.npz"
    )
    commands.check_refusal(answer, words)
    assert not (tmp_path / "o.npz").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "1"], "tokens: found 1, allowed: a whole number from 2 up"),
        (["--tokens", "many"], "--tokens: invalid int value"),
        (["--sequence", "1"], "sequence: found 1, allowed: a whole number from 2 up"),
        (["--sequence", "1025"], "sequence: found 1025 tokens, allowed: 2 to 1024"),
        (["--rows", "0"], "rows: found 0, allowed: a whole number from 1 up"),
        (["--rows", "282"], "rows: found 282, allowed: 1 to 281, the tokens of the text"),
        (["--seed", "-1"], "seed: found -1, allowed: a whole number from 0 up"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_wrong_options(options: list[str], words: str, made: Place, tmp_path: Path) -> None:
    answer = commands.run(
        "losses", "capture", made.checkpoint, "--text", *made.texts, "--sequence", "64", "-o", tmp_path / "o.npz"
    )
    assert answer.code == 0
    base = ["losses", "capture", made.checkpoint, "--text", *made.texts, "-o", tmp_path / "p.npz"]
    commands.check_refusal(commands.run(*base, *options), words)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "o.npz"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file, expected a text file"),
        (b"", "holds 0 tokens, allowed: two or more"),
        (b"\xef\xbb\xbfa", "holds 1 tokens, allowed: two or more"),
        (b"caf\xe9 au lait", "is no UTF-8 text (invalid continuation byte at byte 3)"),
    ],
)
def test_wrong_texts(content: bytes | None, words: str, made: Place, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    answer = commands.run("losses", "capture", made.checkpoint, "--text", file, "-o", tmp_path / "o.npz")
    commands.check_refusal(answer, str(file), words)
    folder = commands.run("losses", "capture", made.checkpoint, "--text", tmp_path, "-o", tmp_path / "o.npz")
    commands.check_refusal(folder, str(tmp_path), "is a folder, expected a text file")


def test_outputs_that_are_something_else_are_left_alone(made: Place, tmp_path: Path) -> None:
    (tmp_path / "notes.npz").write_text("mine", encoding="utf-8")
    np.savez(tmp_path / "table.npz", losses=np.ones(3))
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name, words in (
        ("notes.npz", "exists and is no calibration file"),
        ("table.npz", "exists and is no calibration file"),
        ("folder.npz", "is no regular file"),
        ("rows.npy", "allowed: a name that ends in .npz"),
        ("rows", "allowed: a name that ends in .npz"),
        ("file/rows.npz", "is not a folder that can be written"),
    ):
        answer = commands.run("losses", "capture", made.checkpoint, "--text", "absent", "-o", tmp_path / name)
        commands.check_refusal(answer, str(tmp_path / name), words)  # before the text is looked at
        both = commands.run(
            "losses", "capture", made.checkpoint, "--text", "absent", "-o", tmp_path / name, "--overwrite"
        )
        commands.check_refusal(both, str(tmp_path / name), words)
    long = commands.run("losses", "capture", made.checkpoint, "--text", "absent", "-o", tmp_path / f"{'n' * 240}.npz")
    commands.check_refusal(long, "too long", "shorter name")
    assert (tmp_path / "notes.npz").read_text(encoding="utf-8") == "mine"


def _cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _forget_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _config(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    return change


def _write(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def _remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut_short, "cannot be loaded as a language model"),
        (_forget_a_weight, "1 weights are missing, such as model.layers.1.self_attn.q_proj.weight"),
        (_pickle, "cannot be loaded as a language model"),
        (_config(hidden_size=32), "cannot be loaded as a language model"),
        (_config(vocab_size=50), "tokenizer.json has token"),
        (_config(model_type="unheard-of"), "cannot be loaded as a language model"),
        (_write("config.json", "{"), "cannot be loaded as a language model"),
        (_remove("config.json"), "no config.json there"),
        (_write("tokenizer.json", "{}"), "cannot be read as a tokenizer"),
        (_remove("tokenizer.json"), "tokenizer.json: no such file"),
    ],
)
def test_damaged_checkpoints(damage: Any, words: str, made: Place, tmp_path: Path) -> None:
    checkpoint = tmp_path / "damaged"
    shutil.copytree(made.checkpoint, checkpoint)
    damage(checkpoint)
    answer = commands.run("losses", "capture", checkpoint, "--text", *made.texts, "-o", tmp_path / "o.npz")
    commands.check_refusal(answer, str(checkpoint), words)
    assert not (tmp_path / "o.npz").exists()


def test_code_in_a_checkpoint_is_never_run(made: Place, tmp_path: Path) -> None:
    checkpoint = tmp_path / "own-code"
    shutil.copytree(made.checkpoint, checkpoint)
    (checkpoint / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n", encoding="utf-8")
    _config(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})(checkpoint)
    answer = commands.run("losses", "capture", checkpoint, "--text", *made.texts, "-o", tmp_path / "o.npz")
    commands.check_refusal(answer, "own-code")
    assert not (tmp_path / "ran").exists()


def test_wrong_values_from_python(made: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PerfModelError, match=r"text: found no file"):
        capture(made.checkpoint, [])
    with pytest.raises(PerfModelError, match=r"overwrite: of no use without an output"):
        capture(made.checkpoint, made.texts, overwrite=True)
    with pytest.raises(PerfModelError, match=r"overwrite: found 1, allowed True or False"):
        capture(made.checkpoint, made.texts, overwrite=1)  # type: ignore[arg-type]
    with pytest.raises(PerfModelError, match=r"dtype: found 'int8', allowed: float32, bfloat16, float16"):
        capture(made.checkpoint, made.texts, dtype="int8")
    with pytest.raises(PerfModelError, match=r"rows: found 2.5, allowed: a whole number"):
        capture(made.checkpoint, made.texts, rows=2.5)  # type: ignore[arg-type]
    monkeypatch.setattr(capture_module, "MAX_BYTES", 100 * recorded.LAYERS * recorded.HIDDEN * 4)
    with pytest.raises(PerfModelError, match=r"rows: found 281, .* allowed: 1 to 100 for this checkpoint"):
        capture(made.checkpoint, made.texts)


def test_routing_that_is_not_understood_is_refused(made: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(change: Any) -> None:
        model = load_model(made.checkpoint)
        experts = model.model.layers[1].mlp.experts
        shapes: list[Any] = []

        def before(_: Any, given: Any) -> Any:
            shapes.append(given[0].shape)
            return change(*given)

        experts.register_forward_pre_hook(before)
        experts.forward = lambda *_: torch.zeros(shapes[-1])
        monkeypatch.setattr(capture_module, "load_model", lambda *_: model)
        capture(made.checkpoint, made.texts, sequence=SEQUENCE)

    changed(lambda hidden, ids, weights: (hidden, ids, weights))
    with pytest.raises(ModelConfigError, match=r"model family mixtral: layer 1 calls its experts with"):
        changed(lambda hidden, ids, weights: (hidden, ids))
    with pytest.raises(ModelConfigError, match=r"layer 1 routes with ids float32 .* not understood"):
        changed(lambda hidden, ids, weights: (hidden, weights, weights))
    with pytest.raises(ModelConfigError, match=r"layer 1 routes to expert 5, but has 4"):
        changed(lambda hidden, ids, weights: (hidden, ids * 0 + 5, weights))
    with pytest.raises(ModelConfigError, match=r"layer 1: its experts were given 140 rows of 281 tokens"):
        changed(lambda hidden, ids, weights: _half(hidden, ids, weights))


def _half(*given: Any) -> tuple[Any, ...]:
    return tuple(one[: len(one) // 2] for one in given)


def test_outline_of_a_checkpoint(made: Place) -> None:
    found = outline(made.checkpoint)
    assert found == (found.__class__)("mixtral", (0, 1, 2), recorded.EXPERTS, recorded.HIDDEN, 300, 1024)


def test_the_small_model_of_this_project(shared: Path, tmp_path: Path) -> None:
    """Its checkpoint has Mixtral's own key names, half precision, and a tokenizer of 2,048 tokens."""
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    found = capture(shared / "tiny-mixtral" / "model", [text], tokens=512)
    assert found.hidden.shape == (32, 512, 64)
    np.testing.assert_allclose(found.expert_weights.sum(axis=2), 1, rtol=1e-6, atol=0)
    given = Calibration.load(shared / "tiny-mixtral" / "calibration.npz")
    scale = [np.square(one.hidden.astype(float)).mean(axis=(1, 2)) for one in (found, given)]
    assert (np.abs(np.log(scale[0] / scale[1])) < np.log(1.5)).all()  # the same place in the network
