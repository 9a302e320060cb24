# SPDX-License-Identifier: Apache-2.0
"""How long a pass takes: the same for expertd and for every rival."""
import concurrent.futures, statistics, time

SECONDS, PASSES, SECONDS_MAX = 0.06, 3, 1.5  # of a take
TAKES, ROUND_SECONDS = 6, 1.0


def _passes(run):
    took, begin = [], time.perf_counter()
    run()
    warm = time.perf_counter()
    while not took or warm - begin < SECONDS_MAX and (len(took) < PASSES or time.perf_counter() - warm < SECONDS):
        start = time.perf_counter()
        run()
        took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took)


def timed(run):
    """A take: median milliseconds of three passes at least, after one that is not counted; of one where that is a matter of seconds. Not in the main
    thread: there Python's client has another thread wait, to see Ctrl-C."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_passes, run).result()


def alternate(one, other, rounds):
    """Takes of two, in turn, as memory's speed changes within seconds: [(ms of one, ms of other), ..], up to six pairs a round. Each takes the first turn
    in every second round. None of other ends it: None."""
    pairs = []
    for round_ in range(rounds):
        end = time.perf_counter() + ROUND_SECONDS
        for take in range(TAKES):
            if take and time.perf_counter() > end:
                break
            first, second = (one, other) if round_ % 2 == 0 else (other, one)
            took = {first: first()}
            took[second] = second()
            if took[other] is None:
                return None
            pairs.append((took[one], took[other]))
    return pairs
