"""The columns of what a trace is spilled as."""

from __future__ import annotations

from typing import Any

import numpy as np

from overlap_callbacks.traces.long.columns import Rows

# A kernel or copy. Of these, ``place`` is its row in the file;
# ``metadata`` the number of its kind of collective by metadata; ``info`` the number of what is known of its collective,
# -1 for nothing; ``call`` of a CPU job the number of the operator's call, ``returned`` when the outermost one ended;
# ``copied`` the number of the collective whose work it would be as a copy, -1 for none; ``range``, where it is asked
# for, the number of the name of the host's range in which it was launched. Times are in nanoseconds, -1 where a launch
# is not known.
KERNEL = np.dtype([
    ("place", np.int64), ("call", np.int64), ("start", np.int64), ("end", np.int64), ("correlation", np.uint64),
    ("launched", np.int64),
    ("returned", np.int64), ("num_bytes", np.int64), ("sequence", np.int64), ("name", np.int32), ("shape", np.int32),
    ("metadata", np.int32), ("lane", np.int32), ("device", np.int32), ("info", np.int32), ("copied", np.int32),
    ("thread", np.int32), ("step", np.int32), ("before", np.int32), ("range", np.int32), ("kind", np.uint8),
])  # fmt: skip
# An operator of a CPU job, or a range of a communication library.
OPERATOR = np.dtype([("place", np.int64), ("start", np.int64), ("end", np.int64), ("name", np.int32),
                     ("thread", np.int32)])  # fmt: skip
# A call that launched something, by ``thread``.
LAUNCH = np.dtype([("correlation", np.uint64), ("start", np.int64), ("end", np.int64), ("thread", np.int32)])
# A range of the host: one of torch's of collectives, with its size and the number of what it has in common with others;
# or one with a name, with the number of this.
RANGE = np.dtype([
    ("start", np.int64), ("end", np.int64), ("num_bytes", np.int64), ("thread", np.int32), ("detail", np.int32),
])  # fmt: skip
# A time in which the host waited for the device.
WAIT = np.dtype([("start", np.int64), ("end", np.int64)])
# A number.
NUMBER = np.dtype([("value", np.int64)])
# Something is launched on a lane (1) or starts (-1).
CHANGE = np.dtype([("time", np.int64), ("lane", np.int32), ("change", np.int32)])
# A call that computes, for the estimate of the slowdown: see ``estimate``.
CALL = np.dtype([
    ("duration", np.int64), ("key", np.uint64), ("name", np.int32), ("shape", np.int32), ("turn", np.int32),
    ("of", np.int32), ("turn_by_name", np.int32), ("of_by_name", np.int32), ("beside", np.bool_), ("used", np.bool_),
])  # fmt: skip


def filled(dtype: np.dtype[Any], **values: Any) -> Rows:
    """Rows with some columns; the others are zero.

    Args:
        dtype: of a row.
        **values: the columns, of shape (n,); or a number, which all rows have.
    """
    length = max(len(value) for value in values.values() if np.ndim(value))
    rows = np.zeros(length, dtype)
    for name, value in values.items():
        rows[name] = value
    return rows
