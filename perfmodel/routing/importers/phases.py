"""Order, sequences and phases of logs that only show forward calls: how many tokens each had."""

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import ImportOptions, prompt_lengths, sequence_lengths


def order_of(
    tokens: NDArray[np.int64],
    requests: NDArray[np.int64],
    lines: NDArray[np.int64],
    name: str,
    *,
    starts_at_zero: bool,
) -> NDArray[np.int64]:
    """The order [T] in which the rows of every request follow one another, where its counter tells that.

    Requests that take turns are put one after another if no counter comes twice in a request, and are refused
    otherwise. A counter that skips a token is refused too, since the rows after it would lie elsewhere in their
    sequence: it grows by one, and starts anew at 0 (or where all start at 1, there), or goes on from the row before.
    """
    starts = np.flatnonzero(np.append(True, requests[1:] != requests[:-1]))
    order = np.arange(len(tokens))
    if len(np.unique(requests[starts])) < len(starts):
        order = np.argsort(requests, kind="stable")
        within = requests[order][1:] == requests[order][:-1]
        back = np.flatnonzero(within & (np.diff(tokens[order]) <= 0))
        if len(back):
            raise TraceError(
                f"{name}: line {lines[order[back[0] + 1]]}: the lines of several requests take turns, and token_idx "
                f"{tokens[order[back[0] + 1]]} does not go on from {tokens[order[back[0]]]}, so that it does not tell "
                "the order of a request's tokens; expected one request after another, or a counter that runs on"
            )
    t, r = tokens[order], requests[order]
    anew = np.append(True, (r[1:] != r[:-1]) | (t[1:] <= t[:-1]))
    goes_on = np.append(False, t[1:] == t[:-1] + 1)
    lowest = min(1, int(t.min())) if starts_at_zero else int(t.min())
    first = lowest if starts_at_zero else None
    gaps = ~goes_on & (~anew | ((t != first) if first is not None else False))
    if gaps.any():
        row = int(np.argmax(gaps))
        after = f"after {t[row - 1]}" if row and not anew[row] else "at the start of a request or call"
        raise TraceError(
            f"{name}: line {lines[order[row]]}: token_idx {t[row]} {after}: tokens between are not in the log, so that "
            "prompts and sequences would be cut at the wrong rows"
        )
    return order


def phases_of_calls(
    tokens: NDArray[np.int64],
    requests: NDArray[np.int64],
    options: ImportOptions,
    where: str,
    *,
    decode_only: bool = False,
    breaks: NDArray[np.bool_] | None = None,
    repeats: NDArray[np.bool_] | None = None,
    apart: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths and prompt lengths of the sequences that the tokens of a log make up.

    Parameters
    ----------
    tokens : [T], counter of each token; it grows within a forward call
    requests : [T], number of each token's request in the order of the log; may stand for a forward call instead
    options : what the user said; it comes before everything below, but no sequence may end within a request, unless
        the log names only one
    where : name of the file, for messages
    decode_only : the log holds generated tokens only, so every request is a sequence without prefill
    breaks : [T], tokens at which the log itself says that a call starts
    repeats : [T], tokens with just the picks of the token before them
    apart : the log's requests took turns, and were put one after another: then each is a sequence

    A call ends where the request changes, the counter does not grow, or the log says so. Calls show the phases of
    requests that are served one by one: a call of several tokens is a prompt, and the calls of one token after it are
    decode steps. Calls of one row over and over at the start of a log are kept apart, for a server's trial runs look
    like that. A prompt may have been read in several calls, or several prompts may follow each other: which, only
    ``--prompt-len`` tells. Anything else, such as a batch of requests or a counter that runs on and on, leaves the
    phases open: TraceError, which names the options that say them.
    """
    new = (requests[1:] != requests[:-1]) | (tokens[1:] <= tokens[:-1])
    starts = np.flatnonzero(np.append(True, new if breaks is None else new | breaks[1:]))
    sizes = np.diff(np.append(starts, len(tokens)))
    if options.sequence_len is not None:
        lengths = sequence_lengths(options, len(tokens), where)
        _check_ends(lengths, requests, apart, where)
        return lengths, prompt_lengths(options, lengths, where)
    if apart:
        lengths = _whole_requests(requests, where)
        zero = decode_only and options.prompt_len is None
        return lengths, np.zeros(len(lengths), np.int64) if zero else prompt_lengths(options, lengths, where)
    called = requests[starts]
    many = len(np.unique(called)) > 1
    if decode_only or (sizes > 1).all() or (many and len(np.unique(called)) < len(called)):
        lengths = _whole_requests(requests, where)
        first = np.append(True, called[1:] != called[:-1])
        if decode_only and options.prompt_len is None:
            return lengths, np.zeros(len(lengths), np.int64)
        if options.prompt_len is not None or (sizes > 1).all():
            return lengths, prompt_lengths(options, lengths, where)
        if (sizes[~first] > 1).any():
            raise _open(where, "a request has a second forward call of several tokens")
        return lengths, sizes[first]
    if sizes[0] == 1:
        raise _open(where, "starts with a forward call of one token")
    return _one_by_one(starts, sizes, options, where, np.zeros(len(tokens), bool) if repeats is None else repeats)


def _one_by_one(
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    options: ImportOptions,
    where: str,
    repeats: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences of requests that were served one by one."""
    several = sizes > 1
    # A call that holds one row over and over is a trial run; only those before the first decode step are.
    alike = np.add.reduceat(repeats, starts) >= sizes - 1
    trials = several & np.logical_and.accumulate(several & alike)
    follows = np.append(False, several[1:] & several[:-1] & ~trials[:-1])
    if options.prompt_len is None:
        if follows.any():
            at = int(np.argmax(follows))
            raise TraceError(
                f"{where}: forward calls of {sizes[at - 1]} and {sizes[at]} tokens follow each other: one prompt that "
                "was read in pieces, or several prompts; --prompt-len says the rows of each prompt"
            )
        firsts = np.flatnonzero(several)
        return np.add.reduceat(sizes, firsts), sizes[firsts]
    firsts = np.flatnonzero(several & ~follows)
    lengths = np.add.reduceat(sizes, firsts)
    prompts = prompt_lengths(options, lengths, where)
    inside = ~np.isin(np.cumsum(np.append(0, lengths[:-1])) + prompts, np.append(starts, lengths.sum()))
    if follows.any() and inside.any():
        s = int(np.argmax(inside))
        raise TraceError(
            f"{where}: --prompt-len is {prompts[s]} for sequence {s}, which ends within a forward call; are several "
            "prompts in it? --sequence-len says where each sequence ends"
        )
    return lengths, prompts


def _check_ends(lengths: NDArray[np.int64], requests: NDArray[np.int64], apart: bool, where: str) -> None:
    """Refuse lengths that cut a request in two, or join requests that took turns; ids may also be those of calls."""
    own = np.append(np.flatnonzero(requests[1:] != requests[:-1]) + 1, len(requests))
    if len(own) == 1 and len(lengths) > 1 and not apart:
        return
    ends = np.cumsum(lengths)
    wrong = np.flatnonzero(~np.isin(ends, own))
    if len(wrong):
        s = int(wrong[0])
        raise TraceError(
            f"{where}: --sequence-len: sequence {s} would end after row {ends[s]}, within a request; requests end "
            f"after rows {', '.join(map(str, own[:8]))}{', ...' * (len(own) > 8)}"
        )
    if apart and len(lengths) != len(own):
        raise TraceError(f"{where}: --sequence-len says {len(lengths)} sequences, the log has {len(own)} requests")


def _open(where: str, what: str) -> TraceError:
    return TraceError(f"{where}: {what}, so it does not show the phases; --sequence-len and --prompt-len say them")


def _whole_requests(requests: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Tokens of each request; TraceError where one goes on after another began."""
    starts = np.flatnonzero(np.append(True, requests[1:] != requests[:-1]))
    if len(np.unique(requests[starts])) != len(starts):
        raise TraceError(f"{where}: the lines of several requests take turns; expected one request after another")
    return np.diff(np.append(starts, len(requests)))
