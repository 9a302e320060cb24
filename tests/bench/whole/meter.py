# SPDX-License-Identifier: Apache-2.0
"""What is measured of an engine: tokens a second, and memory."""
import os, threading

KINDS = ("RssAnon", "RssFile", "RssShmem")
LOOK_SECONDS = 0.2


def rate(stamps):
    """Tokens a second of all sequences, from when each has its first token until one has its last. stamps: a list for each sequence."""
    begin, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    count = sum(begin < t <= end for times in stamps for t in times)
    if count == 0:
        raise ValueError("no token came while all sequences were under way: generate more of them")
    return count / (end - begin)


def share(answer):
    """Of the time between steps, that of layers of experts. None: the engine does not tell."""
    if "experts" not in answer:
        return None
    times, experts = answer["stamps"][0], answer["experts"]
    return (experts[-1] - experts[0]) / (times[-1] - times[0])


def children():
    """{pid: name} of this process's."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if int(rest.split()[1]) == os.getpid():
            found[int(pid)] = name
    return found


def cpu_seconds():
    """Of all children, so far: on a machine with other work it says more than the clock, but counts threads that spin."""
    total = 0
    for pid in children():
        try:
            with open(f"/proc/{pid}/stat") as file:
                total += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))  # user's and system's
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


def memory_of(pid):
    """{kind: bytes} of a process; nothing when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            words = [line.split() for line in file]
    except OSError:
        return {}
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in words if line[0].rstrip(":") in KINDS}


class Memory:
    """The most that each child of this process has while it is in the block, by kind, looked at five times a second. most: {name: {kind: bytes}}"""

    def __init__(self):
        self.most, self.over = {}, threading.Event()
        self.thread = threading.Thread(target=self._look)

    def _look(self):
        while True:
            for pid, name in children().items():
                most = self.most.setdefault(name, dict.fromkeys(KINDS, 0))
                for kind, value in memory_of(pid).items():
                    most[kind] = max(most[kind], value)
            if self.over.wait(LOOK_SECONDS):
                return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def own(most):
    """Bytes that only a process holds: what is not of a file."""
    return most["RssAnon"] + most["RssShmem"]
