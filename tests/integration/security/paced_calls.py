#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""paced_calls.py COORDINATOR_URL CA LAYER: one client's calls, fifty a second at most, until standard input ends; prints how many. The first that fails ends it."""
import select, sys

import expertd, numpy

url, ca, layer = sys.argv[1:]
with expertd.Client(url, tls=expertd.Tls(ca, "127.0.0.1")) as client:
    (shape,) = [shape for model in client.models() for shape in model.layers if shape.layer == int(layer)]
    x = numpy.ones((4, shape.hidden), numpy.float32)
    ids = numpy.arange(4 * shape.top_k, dtype=numpy.int32).reshape(4, -1) % shape.experts
    calls = 0
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        client.forward("demo", shape.layer, x, ids, numpy.ones(ids.shape, numpy.float32))
        calls += 1
print(calls)
