"""Windows of text, and what is said where PyTorch or Transformers is missing. These tests need neither."""

import itertools
import subprocess
import sys
import types
from pathlib import Path

import commands
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import record
from perfmodel.errors import PerfModelError
from perfmodel.record.libraries import import_torch, import_transformers
from perfmodel.record.text import Text, batches, cut

sizes = st.lists(st.integers(2, 60), min_size=1, max_size=6)


def texts_of(lengths: list[int]) -> list[Text]:
    """Texts whose ids are all different, so that every token can be traced to its place."""
    ends = np.cumsum([0, *lengths])
    return [Text(f"{i}", "", np.arange(first, last)) for i, (first, last) in enumerate(itertools.pairwise(ends))]


def slow_cut(lengths: list[int], sequence: int, tokens: int) -> list[list[int]]:
    """Windows token by token."""
    ids = [list(text.ids) for text in texts_of(lengths)]
    found = []
    while any(ids):
        for one in ids:
            window = [one.pop(0) for _ in range(min(sequence, len(one)))]
            used = sum(map(len, found))
            window = window[: tokens - used]
            if len(window) >= 2:
                found.append(window)
    return found


@given(sizes, st.integers(2, 40), st.integers(2, 400))
def test_windows_are_dealt_in_turn(lengths: list[int], sequence: int, tokens: int) -> None:
    found = cut(texts_of(lengths), sequence, tokens)
    assert [window.tolist() for window in found] == slow_cut(lengths, sequence, tokens)


@given(sizes, st.integers(2, 40))
def test_without_a_limit_only_single_tokens_are_left_out(lengths: list[int], sequence: int) -> None:
    found = cut(texts_of(lengths), sequence)
    assert [window.tolist() for window in found] == slow_cut(lengths, sequence, 10**9)
    single = sum(length % sequence == 1 for length in lengths)
    assert sum(window.size for window in found) == sum(lengths) - single


@given(sizes, st.integers(2, 40), st.integers(1, 100))
def test_batches_keep_order_and_never_pad(lengths: list[int], sequence: int, tokens: int) -> None:
    windows = cut(texts_of(lengths), sequence)
    found = batches(windows, tokens)
    assert [row.tolist() for batch in found for row in batch] == [window.tolist() for window in windows]
    assert all(len(batch) == 1 or batch.size <= tokens for batch in found)


@pytest.mark.parametrize("wrong", [1, 0, -3, 2.5, True, None, "many"])
def test_wrong_lengths(wrong: object) -> None:
    with pytest.raises(PerfModelError, match=r"sequence: found .*, allowed: a whole number from 2 up"):
        cut(texts_of([5]), wrong)  # type: ignore[arg-type]
    if wrong is not None:
        with pytest.raises(PerfModelError, match=r"tokens: found .*, allowed: a whole number from 2 up"):
            cut(texts_of([5]), 3, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name) if name != missing else None)
    answer = commands.run("losses", "capture", tmp_path, "--text", "t", "-o", tmp_path / "rows.npz")
    commands.check_refusal(answer, f"running a model needs {missing}: pip install 'perfmodel[record]'")
    assert not list(tmp_path.iterdir())
    with pytest.raises(PerfModelError, match=missing):
        import_transformers()
    if missing == "torch":
        with pytest.raises(PerfModelError, match="needs torch"):
            import_torch()


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("transformers")
    old.__version__ = "4.57.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(PerfModelError, match=r"needs transformers 5 or later, found 4\.57\.1: pip install"):
        import_transformers()


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    package = Path(record.__file__).parent
    modules = [f"record.{file.stem}" for file in package.glob("*.py")]
    modules += ["losses.record.capture", "losses.record.language_model"]
    lines = [
        "import sys, perfmodel.cli",
        "perfmodel.cli.build_parser()",
        "heavy = {'torch', 'transformers', 'tokenizers', 'rich', 'scipy'}",
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)",
        *(f"import perfmodel.{name}" for name in modules),
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=120)
