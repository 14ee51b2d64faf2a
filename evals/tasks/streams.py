"""Seeded synthetic streams whose answers live in the recurrent state.

Each ``draw_*`` function returns ``(ids, mask, meta)``: ``ids`` int64 [n, length] of printable ASCII
byte values, ``mask`` bool [n, length] where ``mask[b, t]`` says that ``ids[b, t + 1]`` is a scored
answer, and ``meta`` int32 arrays of the same shape that describe the answer at the masked places.
A stream opens with two bytes that name its task (``~c``, ``~r``, ``~m``, ``~t``), so one model can
hold all tasks.

Alphabets: event keys ``a``-``h``, counts ``0``-``9 A``-``V`` (0-31), recall keys all 62 letters and
digits, recall values 28 punctuation marks. The design follows the counting, recall and leaky-mean
probes of the linear-RNN literature (MQAR: Arora et al. 2023; flip-flop: Liu et al. 2023).
"""

from __future__ import annotations

import numpy as np

Drawn = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64)


KEYS = _codes("abcdefgh")
COUNTS = _codes("0123456789ABCDEFGHIJKLMNOPQRSTUV")
FILL = _codes(".,;:")
RECALL_KEYS = _codes("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
RECALL_VALUES = _codes("!\"#$%&'()*+,-./:;<=>@[]^_{}\\")
RECALL_FILL = _codes(" `")
QUERY, BAR, PLUS, MINUS = (int(c) for c in _codes("?|+-"))
TAG_LENGTH = 2
BUCKETS = 8


def check_span(name: str, span: tuple[int, int], low: int, high: int) -> tuple[int, int]:
    """Return ``span`` as two ints with ``low <= first <= last <= high``, else raise ValueError."""
    first, last = int(span[0]), int(span[1])
    if not low <= first <= last <= high:
        raise ValueError(f"{name}={tuple(span)}: need {low} <= first <= last <= {high}")
    return first, last


def check_length(length: int, at_least: int = 16) -> int:
    """Return ``length`` as an int, else raise ValueError."""
    if length < at_least:
        raise ValueError(f"length={length}: the shortest stream is {at_least} tokens")
    return int(length)


def _open(rng: np.random.Generator, n: int, length: int, tag: str, fill: np.ndarray) -> np.ndarray:
    """Streams of random filler behind their tag."""
    if n < 1:
        raise ValueError(f"n={n}: ask for at least one stream")
    ids = fill[rng.integers(0, len(fill), (n, length))]
    ids[:, :TAG_LENGTH] = _codes(tag)
    return ids


def _place(size: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """First token of each operation [n, ops] and whether all of it fits."""
    start = TAG_LENGTH + np.cumsum(size, 1) - size
    return start, start + size <= length


def draw_count(
    rng: np.random.Generator,
    n: int,
    length: int = 512,
    keys: tuple[int, int] = (4, 8),
    p_query: float = 0.3,
    p_fill: tuple[float, float] = (0.1, 0.4),
    max_count: int = 31,
) -> Drawn:
    """Events over ``keys`` kinds; ``?k`` asks how often ``k`` has occurred, 0 to ``max_count``.

    Tokens: an event is its key, a question is ``?``, key, count; the rest is filler, whose share is
    drawn per stream from ``p_fill``. A key past ``max_count`` is no longer asked for. meta:
    ``count``, the answer; ``position``, events and fillers since the key last occurred.
    """
    length = check_length(length)
    low, high = check_span("keys", keys, 1, len(KEYS))
    if not 0 <= max_count < len(COUNTS):
        raise ValueError(f"max_count={max_count}: one symbol per count, 0 to {len(COUNTS) - 1}")
    ids = _open(rng, n, length, "~c", FILL)
    used = rng.integers(low, high + 1, n)
    weight = rng.gamma(2.0, 1.0, (n, len(KEYS))) * (np.arange(len(KEYS)) < used[:, None])
    edges = np.cumsum(weight / weight.sum(1, keepdims=True), 1)[:, None, :-1]
    letter = KEYS[np.argsort(rng.random((n, len(KEYS))), 1)]
    ops = length
    kind = rng.random((n, ops))
    key = (rng.random((n, ops, 1)) > edges).sum(2)
    fill = rng.uniform(*p_fill, (n, 1))
    query = kind < p_query
    event = kind >= p_query + fill
    hits = np.cumsum(event[:, :, None] & (key[:, :, None] == np.arange(len(KEYS))), 1)
    count = np.take_along_axis(hits, key[:, :, None], 2)[:, :, 0]  # at a question nothing is added
    query &= count <= max_count
    start, fits = _place(np.where(query, 3, 1), length)
    rows, op = np.nonzero(event & fits)
    ids[rows, start[rows, op]] = letter[rows, key[rows, op]]
    rows, op = np.nonzero(query & fits)
    at, asked, answer = start[rows, op], key[rows, op], count[rows, op]
    ids[rows, at] = QUERY
    ids[rows, at + 1] = letter[rows, asked]
    ids[rows, at + 2] = COUNTS[answer]
    mask = np.zeros((n, length), bool)
    mask[rows, at + 1] = True
    counts = np.zeros((n, length), np.int32)
    counts[rows, at + 1] = answer
    return ids, mask, {"count": counts}


def draw_recall(
    rng: np.random.Generator,
    n: int,
    length: int = 512,
    keys: tuple[int, int] = (40, 62),
    p_read: float = 0.4,
    p_fill: float = 0.05,
    p_again: float = 0.1,
) -> Drawn:
    """Key-value pairs, overwritten now and then; ``?k`` asks for the newest value of ``k``.

    Tokens: a write is key, value; a read is ``?``, key, value. Writes introduce new keys until
    ``keys`` of them exist, a share ``p_again`` of them overwrites an existing key; afterwards a
    write becomes an overwrite with probability ``p_again`` and a read otherwise. meta: ``age``,
    tokens since the value was written; ``stored``, keys held at that time.
    """
    length = check_length(length)
    low, high = check_span("keys", keys, 1, len(RECALL_KEYS))
    ids = _open(rng, n, length, "~r", RECALL_FILL)
    limit = rng.integers(low, high + 1, (n, 1))
    symbol = RECALL_KEYS[np.argsort(rng.random((n, len(RECALL_KEYS))), 1)]
    ops = length // 2
    kind, again, pick = rng.random((n, ops)), rng.random((n, ops)), rng.random((n, ops))
    value = rng.integers(0, len(RECALL_VALUES), (n, ops))
    filler = kind < p_fill
    read = (kind >= p_fill) & (kind < p_fill + p_read)
    filler[:, 0] = read[:, 0] = False
    want = ~filler & ~read
    fresh = want & (again >= p_again)
    fresh[:, 0] = True
    before = np.minimum(np.cumsum(fresh, 1) - fresh, limit)
    fresh &= before < limit
    late = want & ~fresh
    read |= late & (before >= limit) & (again >= p_again)
    write = want & ~read
    key = np.where(fresh, before, (pick * before).astype(np.int64))
    start, fits = _place(np.where(filler, 1, np.where(read, 3, 2)), length)
    write &= fits
    read &= fits
    slot = np.where(
        write[:, :, None] & (key[:, :, None] == np.arange(len(RECALL_KEYS))),
        np.arange(ops)[:, None],
        -1,
    )
    newest = np.maximum.accumulate(slot, 1)
    rows, op = np.nonzero(write)
    ids[rows, start[rows, op]] = symbol[rows, key[rows, op]]
    ids[rows, start[rows, op] + 1] = RECALL_VALUES[value[rows, op]]
    rows, op = np.nonzero(read)
    source = newest[rows, op, key[rows, op]]
    at = start[rows, op]
    ids[rows, at] = QUERY
    ids[rows, at + 1] = symbol[rows, key[rows, op]]
    ids[rows, at + 2] = RECALL_VALUES[value[rows, source]]
    mask = np.zeros((n, length), bool)
    mask[rows, at + 1] = True
    age, stored = np.zeros((n, length), np.int32), np.zeros((n, length), np.int32)
    age[rows, at + 1] = at - start[rows, source]
    stored[rows, at + 1] = before[rows, op]
    return ids, mask, {"age": age, "stored": stored}


def draw_leaky_mean(
    rng: np.random.Generator,
    n: int,
    length: int = 512,
    p_query: float = 0.15,
    margin: float = 0.03,
    keep: float = 1 - 1 / 32,
) -> Drawn:
    """A stream of ``+`` and ``-``; ``?`` asks for the bucket (0-7) of its leaky mean.

    ``m = keep * m + (1 - keep) * x`` from ``m = 0``; the buckets divide [-1, 1] evenly. A question
    is only put while ``m`` is at least ``margin`` away from a bucket's edge. The bias of the stream
    changes now and then, so that every bucket is visited. meta: ``milli``, 1000 m rounded.
    """
    length = check_length(length)
    ids = _open(rng, n, length, "~m", FILL)
    kind, coin = rng.random((n, length)), rng.random((n, length))
    change = rng.random((n, length)) < 1 / 48
    level = rng.random((n, length))
    where = np.maximum.accumulate(np.where(change, np.arange(length), 0), 1)
    up = coin < np.take_along_axis(level, where, 1)
    mean = np.zeros(n)
    at = np.full(n, TAG_LENGTH)
    mask = np.zeros((n, length), bool)
    milli = np.zeros((n, length), np.int32)
    half = BUCKETS / 2
    for op in range(length - TAG_LENGTH):
        scaled = (mean + 1) * half
        clear = np.abs(scaled - np.rint(scaled)) >= margin * half
        asks = (kind[:, op] < p_query) & clear & (at + 2 <= length)
        tells = ~asks & (at < length)
        rows = np.nonzero(asks)[0]
        ids[rows, at[rows]] = QUERY
        ids[rows, at[rows] + 1] = COUNTS[np.clip(scaled[rows].astype(np.int64), 0, BUCKETS - 1)]
        mask[rows, at[rows]] = True
        milli[rows, at[rows]] = np.rint(mean[rows] * 1000).astype(np.int32)
        rows = np.nonzero(tells)[0]
        ids[rows, at[rows]] = np.where(up[rows, op], PLUS, MINUS)
        sign = np.where(up[rows, op], 1.0, -1.0)
        mean[rows] = keep * mean[rows] + (1 - keep) * sign
        at += np.where(asks, 2, 1)
    return ids, mask, {"milli": milli}


MAX_PASSES = 63
"""Passes of a tally none of whose asked keys ever occurs, so that no count runs out."""


def _one_tally(
    rng: np.random.Generator,
    warmup: tuple[int, int],
    events: tuple[int, int],
    queries: tuple[int, int],
    repeats: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Warm-up and ``|`` [w], passes [p, m], and which of the m columns are counts (bool)."""
    letters = rng.permutation(len(KEYS))
    number, asked, extra = (int(rng.integers(a, b + 1)) for a, b in (events, queries, repeats))
    acting = letters[:number]
    # an item is an event's key, or -1 - key for a question
    items = [*acting, *rng.choice(acting, extra), *(-1 - rng.permutation(letters)[:asked])]
    items = [int(items[i]) for i in rng.permutation(len(items))]
    kinds = int(rng.integers(2, len(KEYS) + 1))
    head = letters[rng.integers(0, kinds, int(rng.integers(warmup[0], warmup[1] + 1)))]
    start = np.bincount(head, minlength=len(KEYS))
    gain = np.bincount([i for i in items if i >= 0], minlength=len(KEYS))  # per pass
    seen = start.copy()
    row: list[int] = []
    columns, first, growth = [], [], []
    for item in items:
        if item >= 0:
            seen[item] += 1
            row.append(int(KEYS[item]))
        else:
            key = -1 - item
            row += [QUERY, int(KEYS[key]), 0]
            columns.append(len(row) - 1)
            first.append(int(seen[key]))
            growth.append(int(gain[key]))
    row.append(BAR)
    room = [(len(COUNTS) - 1 - f) // g for f, g in zip(first, growth, strict=True) if g]
    total = min(room, default=MAX_PASSES - 1) + 1
    passes = np.tile(np.array(row), (total, 1))
    passes[:, columns] = COUNTS[np.array(first) + np.arange(total)[:, None] * np.array(growth)]
    answer = np.zeros(len(row), bool)
    answer[columns] = True
    return np.array([*KEYS[head], BAR]), passes, answer


def draw_tally(
    rng: np.random.Generator,
    n: int,
    length: int = 512,
    warmup: tuple[int, int] = (8, 40),
    events: tuple[int, int] = (4, 8),
    queries: tuple[int, int] = (2, 4),
    repeats: tuple[int, int] = (0, 0),
    decode: int | None = None,
    whole: bool = False,
) -> Drawn:
    """A counting stream that goes on by itself: a warm-up, then one pattern over and over.

    Text: ``~t``, ``warmup`` random events, ``|``, and then passes of a fixed pattern closed by
    ``|``: events (``events`` distinct keys, ``repeats`` of them once more) mixed with ``queries``
    questions ``?k`` and their counts. The prompt ends after the first pass; it determines all that
    follows. The warm-up gives every key its own offset, so a count depends on every event since
    the start of the stream. Every token after the prompt is scored. A pattern ends where a count
    would pass 31; filler follows.

    With ``decode`` only streams that have so many tokens after the prompt are kept, and exactly
    that many are scored; with ``whole`` only streams whose pattern ends, so that a model that has
    learned it stops by itself. meta: ``count``, 1 + the count where the scored token is one, else
    0; ``generated``, 1-based index of the scored token.
    """
    length = check_length(length)
    warmup = check_span("warmup", warmup, 0, length)
    events = check_span("events", events, 1, len(KEYS))
    queries = check_span("queries", queries, 1, len(KEYS))
    repeats = check_span("repeats", repeats, 0, events[0])
    ids = _open(rng, n, length, "~t", FILL)
    mask = np.zeros((n, length), bool)
    counts, generated = np.zeros((n, length), np.int32), np.zeros((n, length), np.int32)
    for b in range(n):
        for _ in range(1000):
            head, passes, answer = _one_tally(rng, warmup, events, queries, repeats)
            begin = TAG_LENGTH + len(head) + passes.shape[1]
            end = TAG_LENGTH + len(head) + passes.size
            stop = min(end, length)
            if whole and end >= length:
                continue
            if decode is None or stop - begin >= decode:
                break
        else:
            if whole:
                raise ValueError(
                    f"whole: 1000 patterns did not end within {length} tokens; use a larger "
                    "length, or more repeats"
                )
            raise ValueError(
                f"decode={decode}: 1000 patterns in {length} tokens were all shorter; "
                "use a smaller decode or warmup, or more events and queries"
            )
        if decode is not None:
            stop = begin + decode
        text = np.concatenate([head, passes.ravel()])[: stop - TAG_LENGTH]
        ids[b, TAG_LENGTH : TAG_LENGTH + len(text)] = text
        if stop > begin:
            mask[b, begin - 1 : stop - 1] = True
            generated[b, begin - 1 : stop - 1] = np.arange(1, stop - begin + 1)
            places = begin + np.nonzero(np.tile(answer, len(passes) - 1)[: stop - begin])[0]
            counts[b, places - 1] = 1 + np.searchsorted(COUNTS, ids[b, places])
    return ids, mask, {"count": counts, "generated": generated}
