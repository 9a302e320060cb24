# SPDX-License-Identifier: Apache-2.0
"""How long a pass takes: the same for expertd and for every rival."""
import concurrent.futures, statistics, time

SECONDS, PASSES, SECONDS_MAX = 0.25, 3, 2.0


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
    """Median milliseconds of a quarter of a second and three passes at least, after one that is not counted; of one where that is a matter of seconds. Not
    in the main thread: there Python's client has another thread wait, to see Ctrl-C."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_passes, run).result()
