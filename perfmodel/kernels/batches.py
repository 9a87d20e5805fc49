"""Decode steps of several tokens: which experts a step runs, each once, and with how many of its tokens."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs
# mypy: disable-error-code=assignment, allow-untyped-calls

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only

#: Mixes the entries of a row into the place where it is looked for first.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

#: So many entries of a row are sorted by moving each to its place.
_FEW = 48


@loop(
    types.Tuple((types.int32[:, ::1], types.int64[::1], types.int64[::1], types.float64[::1]))(
        read_only(types.uint8[:, :, ::1]),
        read_only(types.uint16[:, :, ::1]),
        read_only(types.uint8[:, :, ::1]),
        read_only(types.int64[::1]),
        types.int64,
        types.int64,
    )
)
def number_steps(picks, ids, copies, form, num_ids, batch):
    """Number the distinct rows of work of all steps and layers.

    An expert that several tokens of a step pick in the same stored form runs once with all of them, as the first of
    these picks says: later ones find it where that one left it.

    Parameters
    ----------
    picks : uint8 [T, L, k], class of every pick; the tokens of a step stand one after another.
    ids : uint16 [T, L, k], expert of every pick, below ``num_ids``.
    copies : uint8 [T, L, W], classes of work that belongs to no pick; every one stays as it is.
    form : int64 [classes], number of the stored form that a class reads, -1 where it does nothing.
    batch : tokens of a step B; T is a multiple of it.

    Returns
    -------
    row [T / B, L] : number of each step's and layer's row, in the order in which they first occur.
    offsets [R + 1], kinds, count : the rows in compressed form. A kind is a class and a number of tokens,
        ``class * base + base - 1 - tokens`` with ``base = batch * k + 1``; rising within a row, so that within a class
        most tokens come first.
    """
    tokens, layers, width = picks.shape
    steps, base = tokens // batch, batch * width + 1
    num_forms = 0
    for c in range(form.shape[0]):
        num_forms = max(num_forms, form[c] + 1)
    row = np.empty((steps, layers), np.int32)
    seen, place = np.full(num_ids * num_forms, -1, np.int64), np.empty(num_ids * num_forms, np.int64)
    most = batch * (width + copies.shape[2])
    of_class, of_tokens = np.empty(most, np.int64), np.empty(most, np.int64)
    kind, often = np.empty(most, np.int64), np.empty(most, np.float64)
    # Rows by a hash of their entries: the number of a row, or -1 where a place is free.
    table = np.full(1024, -1, np.int64)
    hashes, offsets = np.empty(512, np.uint64), np.zeros(513, np.int64)
    kinds, count = np.empty(4096, np.int64), np.empty(4096, np.float64)
    num_rows = 0
    for step in range(steps):
        first = step * batch
        for layer in range(layers):
            cell = step * layers + layer
            num = 0
            for t in range(first, first + batch):
                for j in range(width):
                    c = picks[t, layer, j]
                    if form[c] < 0:
                        continue
                    key = ids[t, layer, j] * num_forms + form[c]
                    if seen[key] == cell:
                        of_tokens[place[key]] += 1
                    else:
                        seen[key], place[key] = cell, num
                        of_class[num], of_tokens[num] = c, 1
                        num += 1
            for t in range(first, first + batch):
                for j in range(copies.shape[2]):
                    c = copies[t, layer, j]
                    if form[c] >= 0:
                        of_class[num], of_tokens[num] = c, 1
                        num += 1
            for i in range(num):
                new = of_class[i] * base + base - 1 - of_tokens[i]
                at = i
                while num <= _FEW and at > 0 and kind[at - 1] > new:
                    kind[at] = kind[at - 1]
                    at -= 1
                kind[at] = new
            if num > _FEW:
                kind[:num].sort()
            entries = 0
            for i in range(num):
                if entries > 0 and kind[entries - 1] == kind[i]:
                    often[entries - 1] += 1.0
                else:
                    kind[entries], often[entries] = kind[i], 1.0
                    entries += 1
            mixed = np.uint64(entries)
            for i in range(entries):
                mixed = (mixed ^ np.uint64(kind[i])) * _FACTOR
                mixed = (mixed ^ (mixed >> np.uint64(29)) ^ np.uint64(often[i])) * _FACTOR
            mixed ^= mixed >> np.uint64(32)
            at = np.int64(mixed & np.uint64(table.shape[0] - 1))
            while table[at] >= 0:
                known = table[at]
                start = offsets[known]
                same = hashes[known] == mixed and offsets[known + 1] - start == entries
                for i in range(entries if same else 0):
                    same = same and kinds[start + i] == kind[i] and count[start + i] == often[i]
                if same:
                    break
                at = (at + 1) % table.shape[0]
            if table[at] >= 0:
                row[step, layer] = table[at]
                continue
            end = offsets[num_rows]
            if end + entries > kinds.shape[0]:
                kinds = np.concatenate((kinds, np.empty(max(kinds.shape[0], entries), np.int64)))
                count = np.concatenate((count, np.empty(max(count.shape[0], entries))))
            kinds[end : end + entries], count[end : end + entries] = kind[:entries], often[:entries]
            table[at] = row[step, layer] = num_rows
            hashes[num_rows] = mixed
            num_rows += 1
            offsets[num_rows] = end + entries
            if 2 * num_rows == table.shape[0]:
                # Half full: twice the places, and every row in its new one.
                table = np.full(2 * table.shape[0], -1, np.int64)
                hashes = np.concatenate((hashes, np.empty(num_rows, np.uint64)))
                offsets = np.concatenate((offsets, np.empty(num_rows, np.int64)))
                for n in range(num_rows):
                    at = np.int64(hashes[n] & np.uint64(table.shape[0] - 1))
                    while table[at] >= 0:
                        at = (at + 1) % table.shape[0]
                    table[at] = n
    end = offsets[num_rows]
    return row, offsets[: num_rows + 1].copy(), kinds[:end].copy(), count[:end].copy()


@loop(
    types.Tuple((types.int32[:, :, ::1], types.uint16[:, :, ::1], types.uint8[:, :, ::1]))(
        read_only(types.uint16[:, :, ::1]), read_only(types.uint8[:, :, ::1]), types.int64
    )
)
def ask_once(ids, wanted, num_experts):
    """The picks of every step and layer with every expert but once, where it stands first.

    Parameters
    ----------
    ids : uint16 [S, L, n], picks of a step; from ``num_experts`` on no pick.
    wanted : uint8 [S, L, n], or empty; the smallest of an expert's is what the step wants.

    Returns
    -------
    place [S, L, n] : where the expert of each pick stands first, -1 for no pick.
    asked [S, L, n] : the picks, 65535 where the expert stands before.
    wants [S, L, n] : what they want; as empty as ``wanted``.
    """
    steps, layers, width = ids.shape
    place = np.full(ids.shape, -1, np.int32)
    asked = np.full(ids.shape, 65535, np.uint16)
    wants = wanted.copy()
    seen, first = np.full(num_experts, -1, np.int64), np.empty(num_experts, np.int32)
    for step in range(steps):
        for layer in range(layers):
            cell = step * layers + layer
            for i in range(width):
                expert = ids[step, layer, i]
                if expert >= num_experts:
                    continue
                if seen[expert] != cell:
                    seen[expert], first[expert] = cell, i
                    asked[step, layer, i] = expert
                place[step, layer, i] = first[expert]
                if wanted.shape[0] > 0:
                    at = first[expert]
                    wants[step, layer, at] = min(wants[step, layer, at], wanted[step, layer, i])
    return place, asked, wants
