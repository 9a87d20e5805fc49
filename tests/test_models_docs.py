"""docs/models.md is true: its commands and code run, its tables are those of the code, and its numbers are computed.

Run this file to write the tables of the page anew.
"""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run

from perfmodel.families import Family, families
from perfmodel.families.aliases import ALIASES
from perfmodel.families.attention import HEAD_DEFAULTS
from perfmodel.memory import ACTIVATION_TOKENS, RESERVE_BYTES, distinct_experts
from perfmodel.model import LAYOUTS, MoEModel
from perfmodel.storage import CLASSES, FORMATS, GGUF_BLOCKS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
TEXT = PAGE.read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
COMMON = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}
GPT_OSS_20B = GPT_OSS | {
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
GPT_OSS_120B = GPT_OSS | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
}


# Tables made from the code


def code(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def spellings_rows() -> list[str]:
    return [f"| `{field}` | {code(keys)} |" for field, keys in ALIASES.items()]


def families_rows() -> list[str]:
    """One row for all model types that declare the same, in the order of the first of them."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, entry in sorted(families().items()):
        if isinstance(entry, Family):
            declared = entry.declared
            usual = set(COMMON) <= set(declared.required)
            required = [field for field in declared.required if not (usual and field in COMMON)]
            defaults = dict(declared.optional)
            optional = []
            if HEAD_DEFAULTS.items() <= defaults.items():
                optional.append("*heads*")
                defaults = {field: default for field, default in defaults.items() if field not in HEAD_DEFAULTS}
            optional += [f"`{field}` = {default}" for field, default in defaults.items()]
            cells = (
                ("" if usual else "all: ") + (code(required) or "-"),
                code(declared.nullable) or "-",
                ", ".join(optional) or "-",
            )
        else:
            cells = (f"the model type in `{entry.inside}`, with its keys", "-", "-")
        rows.setdefault(cells, []).append(name)
    return [f"| {code(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]


def formats_rows() -> list[str]:
    rows = []
    for name, stored in FORMATS.items():
        block = "{} weights in {} bytes (GGUF)".format(*GGUF_BLOCKS[name]) if name in GGUF_BLOCKS else "-"
        rows.append(f"| `{name}` | {stored.bits:.8g} | {block} |")
    return rows


TABLES: dict[str, Callable[[], list[str]]] = {
    "| field | keys |": spellings_rows,
    "| `model_type` | also required | may be null | optional, with its default |": families_rows,
    "| format | bits | block |": formats_rows,
}


def table_below(header: str) -> list[str]:
    """The rows of a table of the page, below its header and the line under that."""
    lines = TEXT.splitlines()
    start = lines.index(header) + 2
    end = next(i for i in range(start, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
    return lines[start:end]


@pytest.mark.parametrize("header", TABLES)
def test_tables_are_those_of_the_code(header: str) -> None:
    assert table_below(header) == TABLES[header](), "run tests/test_models_docs.py to write the tables anew"


def test_what_the_text_says_of_the_families() -> None:
    known = families()
    ordinary = [one for one in known.values() if isinstance(one, Family) and set(COMMON) <= set(one.declared.required)]
    assert len(ordinary) > len(known) / 2
    assert (
        f"*Heads* stands for {' and '.join(f'`{field}` = {rule}' for field, rule in HEAD_DEFAULTS.items())}." in PLAIN
    )
    assert re.search(r"A class is one of (.*?)\.", PLAIN).group(1).count("`") == 2 * len(CLASSES)  # type: ignore[union-attr]
    assert set(CLASSES) <= set(re.findall(r"`(\w+)`", re.search(r"A class is one of (.*?)\.", PLAIN).group(1)))  # type: ignore[union-attr]


# Commands, code and options


def test_the_page_runs() -> None:
    assert {language for language, _ in BLOCKS} == {"sh", "python"}
    assert TEXT.count("```") == 2 * len(BLOCKS)
    for language, text in BLOCKS:
        if language == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                assert program == "perfmodel"
                answer = run(*arguments)
                assert answer.code == 0, f"{line}\n{answer.err}{answer.out}"
        else:
            exec(compile(text, "docs/models.md", "exec"), {"__name__": "page"})


def test_options_are_on_the_page() -> None:
    for action in ("show", "fit"):
        for option in set(re.findall(r"--\w[\w-]*", run("model", action, "--help").out)) - {"--help"}:
            assert option in TEXT, option
    named = set(re.findall(r"(?<![\w-])--\w[\w-]*", TEXT))
    assert named <= set(re.findall(r"--\w[\w-]*", run("model", "show", "--help").out))


def test_the_document_has_these_keys() -> None:
    document = run("model", "show", "mixtral-8x7b", "--layers", "--json").document
    section = TEXT.split("## The document")[1].split("\n## ")[0]
    keys = [
        key
        for line in section.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert keys == list(document)


# Numbers


def test_published_counts() -> None:
    for config, total, active, way in (
        (GPT_OSS_20B, "20.91", "3.61", "active_params_without_input_embedding"),
        (GPT_OSS_120B, "116.83", "5.13", "active_params_without_input_embedding"),
        (QWEN, "30.5", "3.3", "active_params"),
        (DEEPSEEK, "671", "37", "active_params_without_input_embedding"),
    ):
        model = MoEModel.from_config(config)
        assert f"{active} of {total}" in PLAIN
        assert model.total_params / 1e9 == pytest.approx(float(total), rel=0.01)
        assert getattr(model, way) / 1e9 == pytest.approx(float(active), rel=0.03)
    mixtral = MoEModel.from_config("mixtral-8x7b")
    assert f"({mixtral.active_params / 1e9:.1f} of {mixtral.total_params / 1e9:.1f} billion)" in PLAIN


def test_bits_of_gpt_oss() -> None:
    model = MoEModel.from_config(GPT_OSS_120B)
    assert f"4.25 bits in their matrices and {model.expert_bits:.3f} with" in PLAIN
    unpacked = model.storage.upcast(())
    sizes = (sum(model.params_by_class().values()) * 2 / 1e9, model.weight_bytes / 1e9)
    assert {stored.bits for stored in unpacked.by_class().values()} == {16}
    assert "gpt-oss-120b {:.0f} GB instead of {:.0f} GB".format(*sizes) in PLAIN


def test_cache_of_a_token() -> None:
    rows = re.findall(
        r"^\| ([\w.-]+), ?([\w ]+) \| (.*?) \| ([\d,]+) \|$|^\| ([\w.-]+) \| (.*?) \| ([\d,]+) \|$", TEXT, re.M
    )
    assert len(rows) == 6
    gpt = MoEModel.from_config(GPT_OSS_120B)
    deepseek = MoEModel.from_config(DEEPSEEK)
    computed = {
        "Mixtral-8x7B": MoEModel.from_config("mixtral-8x7b").kv_bytes(1),
        "Qwen3-30B-A3B": MoEModel.from_config(QWEN).kv_bytes(1),
        "DeepSeek-V3 latent": deepseek.kv_bytes(1),
        "DeepSeek-V3 expanded": deepseek.kv_bytes(1, mla_cache="expanded"),
        "gpt-oss-120b all layers": gpt.kv_bytes(1),
        "gpt-oss-120b beyond the window": gpt.kv_bytes(5001) - gpt.kv_bytes(5000),
    }
    shown = {}
    for name, part, product, size, plain, plain_product, plain_size in rows:
        shown[f"{name} {part}" if name else plain] = int((size or plain_size).replace(",", ""))
        assert eval((product or plain_product).replace(" x ", " * ")) == int((size or plain_size).replace(",", ""))
    assert shown == computed


def test_windows() -> None:
    model = MoEModel.from_config(GPT_OSS_20B)
    full, capped = (32 * model.kv_bytes(8192, layout=layout) / 2**30 for layout in ("full", "capped"))
    assert f"takes {full:.2f} GiB in full pages and {capped:.2f} GiB capped" in PLAIN
    assert set(re.findall(r"^\| `(capped|full|llama\.cpp)` \|", TEXT, re.M)) == set(LAYOUTS)
    assert f"| `llama.cpp` | the window and {LAYOUTS['llama.cpp'].extra_tokens} tokens |" in TEXT


def test_estimates_and_distinct_experts() -> None:
    assert f"{ACTIVATION_TOKENS} tokens of a prefill run at once, and {RESERVE_BYTES / 1e9:g} GB go to" in PLAIN
    assert f"{distinct_experts(128, 8, 8, ranks=8):.2f} for 128 experts" in PLAIN
    assert f"{distinct_experts(16, 8, 8):.2f}" in PLAIN


def test_readme_shows_what_is_printed() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n## What a model takes\n")[1].split("\n## ")[0]
    command, shown = re.findall(r"^```(?:sh|text)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    program, *arguments = shlex.split(command, comments=True)
    assert program == "perfmodel"
    printed = run(*arguments).out.splitlines()
    at = 0
    for line in shown.splitlines():
        if line == "...":  # lines are left out here, and nowhere else
            continue
        where = printed.index(line, at)
        assert where == at or not line or shown.splitlines()[shown.splitlines().index(line) - 1] == "...", line
        at = where + 1


def write_tables() -> None:
    """Put the tables of the code into the page."""
    lines = TEXT.splitlines()
    for header, rows in TABLES.items():
        start = lines.index(header) + 2
        end = next(i for i in range(start, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
        lines[start:end] = rows()
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_tables()
    sys.stdout.write(f"wrote the tables of {PAGE}\n")
