"""Prompts and drawn tokens of a recording. These tests need neither PyTorch nor Transformers."""

import hashlib
import itertools
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.record import Prompt, record_trace
from perfmodel.record.prompts import as_prompts, labels_of, read_prompts
from perfmodel.record.sampling import Sampling

logit_lists = st.lists(st.floats(-30, 30), min_size=1, max_size=12)


class Fixed:
    """A stream of one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


@given(
    logit_lists,
    st.floats(0.05, 5),
    st.floats(0.01, 1),
    st.none() | st.integers(1, 14),
    st.floats(0, 1, exclude_max=True),
)
def test_drawn_tokens_are_kept_ones_at_their_place_in_the_distribution(
    logits: list[float], temperature: float, top_p: float, top_k: int | None, number: float
) -> None:
    sampling = Sampling(temperature, top_p, top_k)
    token = sampling.draw(logits, Fixed(number))  # type: ignore[arg-type]
    odds = [math.exp((one - max(logits)) / temperature) for one in logits]
    order = sorted(range(len(odds)), key=lambda i: (-logits[i], i))[:top_k]
    sums = list(itertools.accumulate(odds[i] for i in order))
    shares = [one / sums[-1] for one in sums]
    if any(abs(share - top_p) < 1e-9 for share in shares):  # rounding decides whether the next one is kept
        shares = [share - 1e-8 for share in shares]
    kept = {i for i, share in zip(order[1:], shares, strict=False) if share < top_p} | {order[0]}
    assert token in kept
    if len(kept) == 1 or all(abs(one / sums[-1] - top_p) > 1e-9 for one in sums):
        mass = math.fsum(odds[i] for i in kept)
        low = math.fsum(odds[i] for i in kept if i < token) / mass
        assert low - 1e-9 <= number <= low + odds[token] / mass + 1e-9


@given(logit_lists)
@example([0.0, 1e-45])  # whose exponentials are the same number
def test_temperature_zero_takes_the_first_of_the_likeliest(logits: list[float]) -> None:
    assert Sampling(0.0).draw(logits, Fixed(0.7)) == logits.index(max(logits))  # type: ignore[arg-type]
    assert Sampling(1.0, top_k=1).draw(logits, Fixed(0.7)) == logits.index(max(logits))  # type: ignore[arg-type]


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=12), st.data())
def test_tokens_of_minus_infinity_are_never_drawn(logits: list[float], data: Any) -> None:
    never = data.draw(st.sets(st.integers(0, len(logits) - 1), max_size=len(logits) - 1))
    values = [-math.inf if i in never else one for i, one in enumerate(logits)]
    for number in (0.0, 0.5, math.nextafter(1, 0)):
        for sampling in (Sampling(), Sampling(1e-3), Sampling(0.0), Sampling(1.0, 0.5, 3)):
            assert sampling.draw(values, Fixed(number)) not in never  # type: ignore[arg-type]


def test_frequencies_are_the_probabilities() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    for sampling, expected in (
        (Sampling(seed=1), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(0.5, seed=1), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Sampling(top_k=2, seed=1), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.9, seed=1), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(top_p=0.49, seed=1), [1, 0, 0, 0]),
    ):
        stream = sampling.stream(0)
        drawn = np.bincount([sampling.draw(logits, stream) for _ in range(count)], minlength=4) / count
        error = np.sqrt(np.array(expected) * (1 - np.array(expected)) / count)
        assert (np.abs(drawn - expected) <= 4 * error).all()


def test_every_sequence_has_a_stream_of_its_own() -> None:
    sampling = Sampling(seed=3)
    streams = [sampling.stream(i).random(4).tolist() for i in (0, 1, 0)] + [
        Sampling(seed=4).stream(0).random(4).tolist()
    ]
    assert streams[0] == streams[2]
    assert streams[0] != streams[1]
    assert streams[0] != streams[3]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_not_finite(wrong: float) -> None:
    for logits in ([1.0, wrong, 2.0], [wrong] * 3, [-math.inf, wrong]):
        with pytest.raises(ModelConfigError, match="logits are not finite; try another dtype"):
            Sampling().draw(logits, Fixed(0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature: found -0.1, allowed: a number from 0"),
        ({"temperature": math.nan}, "temperature: found nan"),
        ({"temperature": math.inf}, "temperature: found inf"),
        ({"temperature": "hot"}, "temperature: found 'hot'"),
        ({"temperature": True}, "temperature: found True"),
        ({"temperature": 10**400}, "temperature: found 1000"),
        ({"top_p": 0}, "top_p: found 0, allowed: a number from 1e-6 to 1"),
        ({"top_p": 1.5}, "top_p: found 1.5"),
        ({"top_k": 0}, "top_k: found 0, allowed: a whole number from 1 up"),
        ({"top_k": 2.5}, r"top_k: found 2\.5"),
        ({"seed": -1}, "seed: found -1, allowed: a whole number from 0 up"),
        ({"seed": None}, "seed: found None"),
    ],
)
def test_wrong_ways_to_draw(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PerfModelError, match=words):
        Sampling(**options)


def test_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes('\ufeffOnce upon\r\n\n  \n{"prompt": 1}\nÜber  '.encode())
    found = read_prompts(file)
    assert [prompt.text for prompt in found.items] == ["Once upon", '{"prompt": 1}', "Über  "]
    assert [prompt.where.partition(": ")[2] for prompt in found.items] == ["line 1", "line 4", "line 5"]
    assert (found.name, found.sha256) == ("prompts.txt", hashlib.sha256(file.read_bytes()).hexdigest())
    assert labels_of(found) is None


def test_one_object_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "Hi"}]
    records = [{"prompt": "two\nlines", "label": "prose"}, {"messages": messages}]
    file.write_text("".join(json.dumps(record) + "\n\n" for record in records), encoding="utf-8")
    first, second = read_prompts(file).items
    assert (first.text, first.messages, first.label) == ("two\nlines", None, "prose")
    assert (second.text, second.messages) == (None, (("system", "Be\nbrief."), ("user", "Hi")))
    assert labels_of(read_prompts(file)) == ("prose", "-")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: is no JSON"),
        ("3", "line 2 is 3, allowed: an object with prompt, messages, label"),
        ("{}", "line 2: found both or neither of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "line 2: found both or neither"),
        ('{"prompt": ""}', "line 2: found '', allowed: a text that is not empty"),
        ('{"prompt": 5}', "line 2: found 5, allowed: a text"),
        ('{"promt": "a"}', "line 2 has key 'promt'; did you mean 'prompt'?; allowed: prompt, messages, label"),
        ('{"prompt": "a", "prompt": "b"}', "line 2: key 'prompt' occurs twice"),
        ('{"prompt": "\\ud800"}', "line 2: letter 0 is a lone surrogate"),
        ('{"prompt": "a", "label": "b\\nc"}', "line 2: label is 'b\\nc', allowed: a line"),
        ('{"prompt": "a", "label": " "}', "line 2: label is ' ', allowed: a line of 1 to 200 letters"),
        ('{"prompt": "a", "label": 7}', "line 2: label is 7, allowed: a line"),
        ('{"messages": []}', "line 2: messages is empty"),
        ('{"messages": "hi"}', "line 2: messages is 'hi', allowed: a list"),
        ('{"messages": [{"role": "user"}]}', "line 2: a message lacks content"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "line 2: found [1], allowed: a text"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "line 2: a message has key 'name'"),
        ("[" * 100_000, "line 2"),
        ('{"prompt": "a", "label": 1e400}', "line 2: holds 1e400"),
        ("NaN", "line 2: holds NaN"),
        ('{"prompt": "a\x00"}', "line 2 holds the byte zero"),
        ('{"prompt": "\udcff"}', "line 2, byte 12 is not UTF-8"),
    ],
)
def test_wrong_records(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    answer = commands.run(
        *("trace", "record", "--model", tmp_path, "--prompts", file, "--max-new-tokens", 1), "-o", "o.npz"
    )
    commands.check_refusal(answer, str(file), words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: None, "no such file"),
        (lambda file: file.mkdir(), "is a folder"),
        (lambda file: file.write_bytes(b""), "is empty"),
        (lambda file: file.write_bytes(b" \n\n"), "holds no prompt, allowed: one or more"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "line 1, byte 0 is not UTF-8 text"),
    ],
)
def test_wrong_files(make: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    make(file)
    with pytest.raises(PerfModelError, match=words) as found:
        read_prompts(file)
    assert str(file) in str(found.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "prompts: found none, allowed: one or more"),
        ([1], r"prompts: found \[1\], allowed: a file, or a list of texts"),
        (None, "prompts: found None, allowed: a file, or a list of texts"),
        (["a", ""], "prompt 1: found '', allowed: a text that is not empty"),
    ],
)
def test_wrong_prompts_from_python(wrong: Any, words: str) -> None:
    with pytest.raises(PerfModelError, match=words):
        as_prompts(wrong)
    assert as_prompts(["a", Prompt("b", label="c")]).items[1].label == "c"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name) if name != missing else None)
    (tmp_path / "p.txt").write_text("Hello\n", encoding="utf-8")
    options = ("--model", tmp_path, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 4)
    answer = commands.run("trace", "record", *options, "-o", tmp_path / "trace.npz")
    commands.check_refusal(answer, f"running a model needs {missing}: pip install 'perfmodel[record]'")
    assert [file.name for file in tmp_path.iterdir()] == ["p.txt"]
    with pytest.raises(PerfModelError, match=missing):
        record_trace(tmp_path, ["a"], max_new_tokens=1)
