"""What the recorder's hooks cost: the calls of a recording with and without them, side by side on one core.

``python benchmarks/recorder.py [--model FOLDER] [--json]``

By default the model is random: a Mixtral of 16 layers, hidden size 512 and 8 experts, which is small, so that hooks
weigh more than they do on a real one. Calls with and without hooks take turns, and the fastest of each counts.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from perfmodel.record.blocks import load_model
from perfmodel.record.routers import RouterWatch

PROMPT, PASSES, STEPS = 256, 9, 48


def random_model() -> Any:
    """A Mixtral with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()


def prefill(model: Any, watch: RouterWatch | None, tokens: Any) -> list[float]:
    """Time of one call with a prompt [ms]."""
    start = time.perf_counter()
    model(tokens, use_cache=True, logits_to_keep=1)
    if watch is not None:
        watch.take(tokens.shape[1])
    return [1e3 * (time.perf_counter() - start)]


def decode(model: Any, watch: RouterWatch | None, tokens: Any) -> list[float]:
    """Times of calls with one token each; their context is what they make themselves [ms]."""
    cache, times = None, []
    for step in range(STEPS):
        start = time.perf_counter()
        out = model(tokens[:, step : step + 1], use_cache=True, logits_to_keep=1, **({"cache": cache} if cache else {}))
        if watch is not None:
            watch.take(1)
        cache = out.cache
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Print the times and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="FOLDER", help="a checkpoint in place of the random model")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = random_model() if options.model is None else load_model(options.model)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, model.config.vocab_size, (1, PROMPT)))
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, run in (("prefill", prefill), ("decode", decode)):
            without, watched = [], []
            for _ in range(PASSES + 1):
                without.append(run(model, None, tokens))
                with RouterWatch(model) as watch:
                    watched.append(run(model, watch, tokens))
            # The fastest of every call apart, without the first pass, which warms up.
            plain, hooked = (float(np.min(times[1:], axis=0).mean()) for times in (without, watched))
            found[name] = {"without_ms": plain, "with_ms": hooked, "ratio": hooked / plain}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, row in found.items():
        plain, hooked, ratio = row["without_ms"], row["with_ms"], row["ratio"]
        print(f"{name}: {plain:.2f} ms a call, with hooks {hooked:.2f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
