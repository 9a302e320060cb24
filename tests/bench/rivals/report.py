# SPDX-License-Identifier: Apache-2.0
"""Rows as bench_report.h has them; and the table of cells."""
import json, math

BAR, CLASS = 1.0, 1.2


class Report:
    def __init__(self):
        self.rows = []
        print(f"{'name':60} {'value':>12} {'unit':10} {'rival':>12} {'ratio':>8} {'bar':>6}  pass")

    def add(self, name, value=None, unit="ms", rival=None, ratio=None, bar=None, better="lower"):
        passes = None if bar is None else ratio <= bar if better == "lower" else ratio >= bar
        self.rows.append(dict(name=name, value=value, unit=unit, limit=None, rival=rival, ratio=ratio, better=better, bar=bar, **{"pass": passes}))
        shown = ["-" if n is None else f"{n:.{digits}f}" for n, digits in ((value, 4), (rival, 4), (ratio, 3), (bar, 2))]
        verdict = "-" if passes is None else "yes" if passes else "NO"
        print(f"{name:60} {shown[0]:>12} {unit:10} {shown[1]:>12} {shown[2]:>8} {shown[3]:>6}  {verdict}", flush=True)

    def finish(self, path):
        with open(path, "w") as file:
            json.dump(self.rows, file, indent=1)
        return int(any(row["pass"] is False for row in self.rows))


def best_of(error, cells):
    """Of the rivals whose error is at most 1.2 times ours, the one that we are slowest against: (name, cell); None: there is none. cells: name: (ms, ratio
    of our time to it, its error)."""
    of_class = {name: cell for name, cell in cells.items() if cell[2] <= CLASS * error}
    return max(of_class.items(), key=lambda item: item[1][1], default=None)


def add_cells(report, stem, error, ours, cells):
    """The rows of one cell: ours against the best of our class, then each rival's time with the ratio to ours. Returns the best, as best_of does."""
    best = best_of(error, cells)
    if best is None:
        report.add(f"{stem} expertd, no rival of its accuracy", ours)
    else:
        name, (ms, ratio, _) = best
        report.add(f"{stem} expertd, against {name}", ours, rival=ms, ratio=ratio, bar=BAR)
    for name, (ms, ratio, _) in cells.items():
        report.add(f"{stem} {name}", ms, rival=ours, ratio=1 / ratio)
    return best


def short(number):
    """Three digits: .0028, 13.4, 112"""
    digits = 4 if number < 0.01 else 3 if number < 1 else 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f}".removeprefix("0") if number < 1 else f"{number:.{digits}f}"


def cell(ours, best, cells):
    """Our ms, and the ratio to the best of our class; in brackets to the best of all, where none is as accurate."""
    if best is not None:
        return f"{short(ours)} **{best[1][1]:.2f}** {best[0]}"
    other = best_of(math.inf, cells)
    return short(ours) if other is None else f"{short(ours)} ({other[1][1]:.2f} {other[0]} {short(other[1][2])})"


def table(head, rows):
    """In Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def markdown(tokens, lines):
    """lines: (shape, form, error, {T: cell})"""
    return table(["shape", "form", "error", *(f"T={t}" for t in tokens)],
                 [[shape, form, short(error), *(cells[t] for t in tokens)] for shape, form, error, cells in lines])
