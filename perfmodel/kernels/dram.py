"""Share of its peak rate that one DRAM channel reaches, from its timing numbers.

All timing numbers are in clock cycles and carry their usual names: ``n_bl`` (data-bus time of one line),
``n_ccd_l`` (column to column in one bank group), ``n_rcd`` (activate to read), ``n_rp`` (precharge),
``n_rtp`` (read to precharge), ``n_rc`` (activate to activate in one bank), ``n_rrd_s`` and ``n_faw``
(activate to activate, and four activates), ``n_rfc`` and ``n_refi`` (length and interval of an all-bank
refresh). Results are fractions of the peak rate of the pins [1].

The pattern functions leave refresh out: multiply their result by `refresh_fraction`. A stream that rotates
over bank groups is limited by refresh alone, so its whole derate is `refresh_fraction`.

Validity: one channel, one rank, reads only, open rows, at least 64 requests in flight for HBM3. Compared with
Ramulator 2 (H. Luo et al., IEEE CAL 2023, doi:10.1109/LCA.2023.3333759) on DDR4, DDR5, LPDDR5, HBM2 and HBM3,
the largest errors are 0.9 % (interleaved), 0.6 % (row by row), 1.3 % (bank-group limited, refresh off), 3.0 %
(random) and 2.9 % (one bank).
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop, scalar, ufunc


@scalar
def _refresh_fraction1(n_rtp, n_rp, n_rfc, n_rcd, n_refi):
    return np.maximum(0.0, 1.0 - (n_rtp + n_rp + n_rfc + n_rcd) / n_refi)


@scalar
def _row_by_row_fraction1(lines_per_row, n_bl, n_ccd_l, n_rtp, n_rp, n_rcd, pseudo_channels):
    row_cycles = (lines_per_row - 1.0) * np.maximum(n_ccd_l, n_bl) + n_rtp + n_rp + n_rcd
    return np.minimum(1.0, lines_per_row * n_bl / row_cycles / pseudo_channels)


@scalar
def _bank_group_limited_fraction1(lines_per_row, n_bl, n_ccd_l, n_rp, n_rcd, read_buffer):
    # A row alone is read every n_ccd_l. Requests for the next row that already wait in the buffer fill the
    # gaps as soon as its activation is hidden; then two lines pass in the time of `pair`.
    ahead = np.minimum(read_buffer - (n_rp + n_rcd) / n_ccd_l, lines_per_row / 2.0)
    ahead = np.maximum(0.0, ahead)
    pair = np.maximum(n_ccd_l, 2.0 * n_bl)
    row_cycles = (lines_per_row - 2.0 * ahead) * n_ccd_l + ahead * pair
    return np.minimum(1.0, lines_per_row * n_bl / row_cycles)


@scalar
def _random_fraction1(n_bl, n_faw, n_rrd_s, pseudo_channels, command_cycles):
    line_cycles = np.maximum(np.maximum(n_faw / 4.0, n_rrd_s), pseudo_channels * command_cycles)
    return np.minimum(1.0, n_bl / line_cycles)


@scalar
def _one_bank_fraction1(n_bl, n_rc, pseudo_channels):
    return np.minimum(1.0, n_bl / (pseudo_channels * n_rc))


@ufunc(5)
def refresh_fraction(n_rtp, n_rp, n_rfc, n_rcd, n_refi):
    """Share of time left by all-bank refresh [1]; also the whole derate of a stream over all bank groups.

    Equation: ``1 - (n_rtp + n_rp + n_rfc + n_rcd) / n_refi``, not below 0: the rows are closed before a
    refresh and opened again after it.

    >>> round(float(refresh_fraction(8, 15, 224, 15, 3125)), 4)  # LPDDR5-6400
    0.9162
    """
    return _refresh_fraction1(n_rtp, n_rp, n_rfc, n_rcd, n_refi)


@ufunc(7)
def row_by_row_fraction(lines_per_row, n_bl, n_ccd_l, n_rtp, n_rp, n_rcd, pseudo_channels):
    """Share of peak of a stream that reads one row after the other in one bank [1], without refresh.

    Equation: with L lines per row,
    ``L n_bl / ((L - 1) max(n_ccd_l, n_bl) + n_rtp + n_rp + n_rcd) / pseudo_channels``.

    >>> round(float(row_by_row_fraction(64, 2, 4, 8, 15, 15, 1)), 4)  # LPDDR5-6400
    0.4414
    """
    return _row_by_row_fraction1(lines_per_row, n_bl, n_ccd_l, n_rtp, n_rp, n_rcd, pseudo_channels)


@ufunc(6)
def bank_group_limited_fraction(lines_per_row, n_bl, n_ccd_l, n_rp, n_rcd, read_buffer):
    """Share of peak of a stream whose consecutive rows lie in different bank groups [1], without refresh.

    Equation: with L lines per row and a buffer of W reads, ``x = min(W - (n_rp + n_rcd) / n_ccd_l, L / 2)``
    lines (not below 0) of the next row overlap, and the share is
    ``min(1, L n_bl / ((L - 2 x) n_ccd_l + x max(n_ccd_l, 2 n_bl)))``. One pseudo-channel only. With refresh
    on and W up to 32 the product with `refresh_fraction` is 2 to 7 % too low.

    >>> round(float(bank_group_limited_fraction(64, 2, 4, 15, 15, 32)), 4)  # LPDDR5-6400
    0.8101
    """
    return _bank_group_limited_fraction1(lines_per_row, n_bl, n_ccd_l, n_rp, n_rcd, read_buffer)


@ufunc(5)
def random_fraction(n_bl, n_faw, n_rrd_s, pseudo_channels, command_cycles):
    """Upper bound of the share of peak of random single-line reads with many in flight [1], without refresh.

    Equation: ``min(1, n_bl / max(n_faw / 4, n_rrd_s, pseudo_channels command_cycles))``, where
    ``command_cycles`` is the command-bus time of an activate and a precharge; 0 where the bus does not limit
    (DDR, LPDDR), 3 for HBM2 and 2 for HBM3.

    >>> float(random_fraction(2, 16, 4, 1, 0))  # LPDDR5-6400
    0.5
    """
    return _random_fraction1(n_bl, n_faw, n_rrd_s, pseudo_channels, command_cycles)


@ufunc(3)
def one_bank_fraction(n_bl, n_rc, pseudo_channels):
    """Share of peak when every read opens another row of the same bank [1], without refresh.

    Equation: ``n_bl / (pseudo_channels n_rc)``.

    >>> round(float(one_bank_fraction(2, 49, 1)), 4)  # LPDDR5-6400
    0.0408
    """
    return _one_bank_fraction1(n_bl, n_rc, pseudo_channels)


INTERLEAVED, BANK_GROUP_LIMITED, ROW_BY_ROW = 0, 1, 2
"""How a stream of weights is laid out over the banks."""


@loop(
    "float64(int64, float64, float64, float64, float64, float64, float64, float64, float64, float64, float64)",
)
def stream_fraction(
    mapping,
    lines_per_row,
    n_bl,
    n_ccd_l,
    n_rtp,
    n_rp,
    n_rcd,
    n_rfc,
    n_refi,
    pseudo_channels,
    read_buffer,
):
    """Share of peak of a streaming read [1], with refresh: the pattern of its mapping times `refresh_fraction`.

    ``mapping`` is `INTERLEAVED` (refresh is the whole loss), `BANK_GROUP_LIMITED` or `ROW_BY_ROW`; anything else
    gives NaN.

    >>> round(stream_fraction(ROW_BY_ROW, 64, 2, 4, 8, 15, 15, 224, 3125, 1, 32), 4)  # LPDDR5-6400
    0.4044
    """
    refresh = _refresh_fraction1(n_rtp, n_rp, n_rfc, n_rcd, n_refi)
    if mapping == INTERLEAVED:
        return refresh
    if mapping == BANK_GROUP_LIMITED:
        return refresh * _bank_group_limited_fraction1(lines_per_row, n_bl, n_ccd_l, n_rp, n_rcd, read_buffer)
    if mapping == ROW_BY_ROW:
        return refresh * _row_by_row_fraction1(lines_per_row, n_bl, n_ccd_l, n_rtp, n_rp, n_rcd, pseudo_channels)
    return np.nan
