"""A model that reads a prompt and goes on by itself, one token a call, while its routers are watched."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.record.blocks import family_of
from perfmodel.record.options import is_whole
from perfmodel.record.routers import RouterWatch
from perfmodel.record.sampling import Sampling
from perfmodel.routing.npz import one_line


@dataclass(frozen=True)
class Generation:
    """One sequence, prompt and answer, with a row of routing for every token.

    tokens : int64 [P + N]
    prompt_len : P
    ids : uint16 [P + N, layers, k]
    weights : float32 [P + N, layers, k]
    ended : whether the last token is a mark of the end
    """

    tokens: NDArray[np.int64]
    prompt_len: int
    ids: NDArray[np.uint16]
    weights: NDArray[np.float32]
    ended: bool


class Generator:
    """Runs one model on one prompt after another.

    model : a causal language model of Transformers with experts
    watch : open, of this model
    sampling : how tokens are drawn
    ends : tokens after which a sequence ends; the mark of the end is fed to the model like any other token
    never : tokens that are never drawn
    """

    def __init__(
        self,
        model: Any,
        watch: RouterWatch,
        sampling: Sampling,
        *,
        ends: Collection[int] = (),
        never: Collection[int] = (),
    ) -> None:
        self._model, self._watch, self._sampling = model, watch, sampling
        self._ends = frozenset(ends)
        self._never = np.array(sorted(never), np.int64)
        self._family = family_of(model)
        # Logits of every token of a long prompt would take more memory than the model's rows do.
        takes = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        # The cache has two names among versions of Transformers, here and in what comes back.
        self._cache = "cache" if "cache" in takes else "past_key_values"

    def run(self, prompt: NDArray[np.int64], new_tokens: int, sequence: int, told: Callable[[int], None]) -> Generation:
        """The prompt in one call, and then up to ``new_tokens`` tokens with one call each.

        The keys and values of earlier tokens are kept in the model's own cache. Every token that is drawn is also
        fed, the last one too, so that it has a row like the others.

        prompt : token ids, int64 [P]
        sequence : place in the recording, which says what random numbers are used
        told : called with the number of rows after every call

        Raises :class:`ModelConfigError` for a model that keeps no cache, and as `RouterWatch.take`.
        """
        stream = self._sampling.stream(sequence)
        tokens = fresh = prompt.tolist()
        cache, kept, ended = None, [], False
        while True:
            logits, cache = self._read(fresh, cache, len(tokens))
            kept.append(self._watch.take(len(fresh)))
            told(len(fresh))
            if ended or len(kept) > new_tokens:
                break
            fresh = [self._draw(logits, stream)]
            tokens = tokens + fresh
            ended = fresh[0] in self._ends
        ids, weights = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        return Generation(np.array(tokens, np.int64), len(prompt), ids, weights, ended)

    def _read(self, fresh: list[int], cache: Any, read: int) -> tuple[NDArray[np.float32], Any]:
        """Logits after the last token, and the cache of all ``read`` tokens."""
        import torch  # a model is there, so this is

        with torch.inference_mode():
            given = torch.tensor([fresh], device=self._model.device)
            try:
                found = self._model(input_ids=given, use_cache=True, **{self._cache: cache}, **self._last_only)
                logits: NDArray[np.float32] = found.logits[0, -1].float().cpu().numpy()
            except (PerfModelError, MemoryError):
                raise
            except Exception as error:  # a device without memory, a checkpoint that is at odds with itself
                raise ModelConfigError(
                    f"model family {self._family}: cannot read {len(fresh)} tokens after {read - len(fresh)} others"
                    f" ({one_line(error) or type(error).__name__})"
                ) from error
        cache = getattr(found, self._cache, None)
        length = _length(cache)
        if length != read:
            raise ModelConfigError(
                f"model family {self._family}: its cache holds {length} tokens of {read}, so it cannot be asked for one"
                " token at a time"
            )
        return logits, cache

    def _draw(self, logits: NDArray[np.float32], stream: np.random.Generator) -> int:
        if self._never.size:
            logits = logits.copy()
            logits[self._never[self._never < len(logits)]] = -np.inf
        try:
            return self._sampling.draw(logits, stream)
        except ModelConfigError as error:
            raise ModelConfigError(f"model family {self._family}: {error}") from None


def _length(cache: Any) -> int:
    """Tokens that a cache holds; none where there is no cache, or one that cannot tell."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        return 0


def marks_of_end(model: Any) -> frozenset[int]:
    """The tokens that end an answer, as the checkpoint's generation config says, or its config."""
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        given = getattr(config, "eos_token_id", None)
        if given is not None:
            listed = given if isinstance(given, list | tuple) else [given]
            return frozenset(one for one in listed if is_whole(one) and one >= 0)  # -1 stands for none
    return frozenset()
