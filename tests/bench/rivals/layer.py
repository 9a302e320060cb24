# SPDX-License-Identifier: Apache-2.0
"""The layer that everybody computes: its size, weights, tokens and routes, all from fixed seeds, and its answer in float64."""
import concurrent.futures, dataclasses, itertools, math, os

import numpy as np

MATRICES = ("gate", "up", "down")
ERROR_TOKENS = 16
WINDOWS = 64
X_SEED, ROUTE_SEED, SCALE_SEED = 1 << 20, 1 << 21, 1 << 22


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int

    def matrix(self, name):
        """[rows,columns]: y = x * W^T"""
        return (self.hidden, self.inner) if name == "down" else (self.inner, self.hidden)

    @property
    def elements(self):
        return 3 * self.experts * self.hidden * self.inner


SHAPES = {"Q": Shape("Q", 128, 8, 2048, 768), "M": Shape("M", 8, 2, 4096, 14336)}


def shape_of(text):
    """Q, M, or ExKxHxI."""
    if text in SHAPES:
        return SHAPES[text]
    numbers = text.split("x")
    if len(numbers) != 4 or not all(n.isdigit() and int(n) > 0 for n in numbers) or int(numbers[1]) > int(numbers[0]):
        raise ValueError(f"shape {text!r}: allowed are {', '.join(SHAPES)} and ExKxHxI: experts, top-k of them, hidden, inner")
    return Shape(text, *map(int, numbers))


def to_bf16(values):
    """float32 rounded to nearest, ties to even; the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def each_expert(shape, function):
    """function(matrix's name, expert) for all, on all cores: NumPy lets others run."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda job: function(*job), [(name, e) for name in MATRICES for e in range(shape.experts)]))


def draw_weights(shape, stacks):
    """Gaussian with a deviation of 1/sqrt(columns), rounded to bf16, into stacks["gate.weight"] [E,rows,columns] and so on."""

    def draw(name, e):
        rows, columns = shape.matrix(name)
        values = np.random.default_rng([MATRICES.index(name), e]).standard_normal((rows, columns), np.float32)
        stacks[f"{name}.weight"][e] = to_bf16(values / np.float32(math.sqrt(columns)))

    each_expert(shape, draw)


def draw_tokens(shape, count):
    """x [T,H] as bits of bf16, ids [T,K] int32, all apart in a row, and scales [T,K] float32 that add up to one. Fewer tokens are the first of more."""
    x = to_bf16(np.random.default_rng(X_SEED).standard_normal((count, shape.hidden), np.float32))
    ids = np.argsort(np.random.default_rng(ROUTE_SEED).random((count, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    scales = np.random.default_rng(SCALE_SEED).random((count, shape.top_k), np.float32) + np.float32(0.25)
    return x, ids, (scales / scales.sum(axis=1, keepdims=True)).astype(np.float32)


def windows(tokens, count):
    """Slices of count tokens that passes of so many tokens go through in turn, so that a few experts do not stay in the cache; the first is first."""
    return itertools.cycle([slice(tokens * w, tokens * (w + 1)) for w in range(min(WINDOWS, count // tokens))])


def answer(shape, stacks, x, ids, scales):
    """y [T,H] in float64 of the bf16 weights."""
    x = from_bf16(x).astype(np.float64)
    y = np.zeros(x.shape)
    for e in np.unique(ids):
        tokens, slots = np.nonzero(ids == e)
        gate, up, down = (from_bf16(stacks[f"{name}.weight"][e]) for name in MATRICES)
        g, u = x[tokens] @ gate.T.astype(np.float64), x[tokens] @ up.T.astype(np.float64)
        y[tokens] += scales[tokens, slots, None].astype(np.float64) * ((g / (1 + np.exp(-g)) * u) @ down.T.astype(np.float64))
    return y


def error_of(got, want):
    """Root mean square of the difference, of the answer's."""
    return math.sqrt(((got.astype(np.float64) - want) ** 2).sum() / (want**2).sum())
