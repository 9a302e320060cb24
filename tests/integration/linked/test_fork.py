#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_fork.py BUILD SOURCE PROGRAM: children of a process that has clients, over each way that frames go."""
import os, select, signal, socket, sys, threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../door")
from door_cluster import Cluster, wait_for


def has_ended(side):
    """Whether it said that it will say no more; what it said before is dropped."""
    side.setblocking(False)
    try:
        while side.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def pass_on(client, service, ends):
    """Until one side ends; into ends, whether the client's did, whichever was seen first."""
    others = {client: service, service: client}
    try:
        while True:
            for side in select.select(list(others), [], [])[0]:
                data = side.recv(1 << 16)
                if not data:
                    return
                others[side].sendall(data)
    except OSError:
        pass
    finally:
        ends.append(has_ended(client))
        client.close()
        service.close()


def accept(listener, port, ends):
    while True:
        client = listener.accept()[0]
        threading.Thread(target=pass_on, args=(client, socket.create_connection(("127.0.0.1", port)), ends), daemon=True).start()


def check_left_child(c, program, url):
    """A client's connection ends with its process, although a child of that lives: not when the service gives it up because nothing answers its pings."""
    ends, listener = [], socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, args=(listener, int(url.rpartition(":")[2]), ends), daemon=True).start()
    child = int(c.run(program, f"tcp://127.0.0.1:{listener.getsockname()[1]}", "left", code=-signal.SIGKILL).stdout)
    try:
        wait_for("the end of the dead client's connection", lambda: ends)
        assert all(ends), "the service ended it, the child held it open"
        state = open(f"/proc/{child}/stat").read().rpartition(")")[2].split()[0]
        assert state not in "ZX", "the child has ended too"
    finally:
        os.kill(child, signal.SIGKILL)


def main():
    program = sys.argv[3]
    with Cluster() as c:
        url = c.coordinator()["rpc_url"]
        for name in "a", "b":
            c.node(name, f"--coordinator-url={url}")
        c.wait_serving("--coordinator", url)
        for lane in "uv", "nng":
            for lanes in "", "stream":
                environment = {"LIBEXPERTD_STREAM_LANE": lane, "LIBEXPERTD_LANES": lanes}
                for how in ("before", "after", "during") if lane == "uv" else ("before", "nng"):
                    os.environ.update(environment)
                    c.run(program, url, how)
                if lane == "uv":
                    check_left_child(c, program, url)
        c.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
