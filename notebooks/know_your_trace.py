# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Know your trace
#
# Two recordings of equal shape can give opposite answers: one rewards a placement by the prompt, the other a profile
# of yesterday's traffic, a third a cache. `survey` measures what decides between them, with 95 % intervals from
# resampling whole sequences, since recordings are small. On the command line this is `perfmodel trace stats FILE`.

# %%
# %matplotlib inline
import pandas as pd

from perfmodel import plots, survey
from perfmodel.routing.presets import PRESETS
from perfmodel.routing.synthetic import generate

found = survey("tiny-mixtral-32l-mini")
print(
    found.contents.model, found.contents.source, found.contents.sequences, "sequences,", found.contents.tokens, "tokens"
)
plots.survey_figures(found)["experts"]

# %% [markdown]
# All sequences together use the experts almost evenly. That hides that each sequence has its own favourites: pooled
# skew is no measure of what a placement for one sequence can gain.
#
# ## Does the prompt tell?
#
# Decode hit rates with 4 of 8 experts a layer, beside the controls without which they mean nothing.


# %%
def shown(one, place=()):
    """A value with its interval."""
    return f"{float(one.value[place]):.3f} [{float(one.low[place]):.3f}, {float(one.high[place]):.3f}]"


rates = found.hit_rates
names = ("own", "other_sequence", "static", "oracle")
print(pd.Series({name: shown(getattr(rates, name), 3) for name in names}, name="K = 4").to_string())
plots.survey_figures(found)["hit_rate"]

# %% [markdown]
# The prompt tells most of what can be told, and profiles of other traffic tell less than nothing: below K / E. The six
# sequences are six kinds of text; other sequences *of the same kind* would be a fairer control than these.
#
# ## Is there locality in time?
#
# A cache lives from experts that come back soon. If picks come back no more often than those of any two tokens of the
# sequence (*chance*), a cache is only a slow way to find the favourites.

# %%
reuse = found.reuse["decode"]
table = {f"{lag} before": shown(reuse.measured.overall, i) for i, lag in enumerate(found.lags)}
print(pd.Series({**table, "chance": shown(reuse.chance.overall)}, name="made again").to_string())
plots.survey_figures(found)["cache"]

# %% [markdown]
# No locality: reuse is at its chance. And so least recently used finds fewer picks than the fixed placement by the
# prompt, at every number of experts. Belady's rule shows what knowing the future would be worth.
#
# ## Other routing, other answers
#
# The same questions to routing with the published statistics of DeepSeek-V2-Lite on legal texts. It is *generated*,
# for no recording of it is bundled, and its caption says so.

# %%
preset = PRESETS["deepseek-v2-lite"]
shape = (preset.num_layers, preset.num_experts, preset.top_k)
drawn = generate(16, 160, 64, *shape, seed=1, model=preset.model, **preset.skew._asdict())
other = survey(drawn)
plots.survey_figures(other)["hit_rate"]


# %%
def answers(one):
    """What decides, with half of the experts."""
    half = one.contents.num_experts // 2 - 1
    reuse = one.reuse["decode"]
    return {
        "own prefill": one.hit_rates.own.value[half],
        "static": one.hit_rates.static.value[half],
        "LRU": one.cache.lru.value[half],
        "Belady": one.cache.belady.value[half],
        "reuse at lag 1": reuse.measured.overall.value[0],
        "chance": reuse.chance.overall.value,
    }


both = pd.DataFrame({"tiny-mixtral, recorded": answers(found), "DeepSeek-V2-Lite, synthetic": answers(other)})
print(both.astype(float).round(2).to_string())

# %% [markdown]
# The order is turned round: a static placement wins where all sequences are of one kind, and a cache gains from real
# locality. Neither trace is wrong; each is another kind of traffic. Before pricing a design, ask which kind yours is.

# %%
tiny, deep = (both[name].astype(float).round(2).to_dict() for name in both)
assert (tiny["own prefill"], tiny["LRU"], tiny["static"]) == (0.66, 0.58, 0.47)
assert (deep["own prefill"], deep["LRU"], deep["static"]) == (0.65, 0.75, 0.76)
assert (tiny["reuse at lag 1"], tiny["chance"]) == (0.32, 0.32)
assert (deep["reuse at lag 1"], deep["chance"]) == (0.31, 0.16)
assert other.contents.source == "synthetic"

# %% [markdown]
# **Finding.** With half of the experts on the GPU the own prompt is the best of three placements for this recording
# (hit rate 0.66, against 0.58 for an LRU cache and 0.47 for a static profile) and the worst for generated routing with
# the statistics of DeepSeek-V2-Lite (0.65 against 0.75 and 0.76), where picks come back after one token twice as often
# as by chance (0.31 against 0.16) and here no more often (0.32 and 0.32): which design pays is a property of the
# traffic, to be measured before it is priced.
