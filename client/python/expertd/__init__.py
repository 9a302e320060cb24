# SPDX-License-Identifier: Apache-2.0
"""expertd for Python: token batches to the experts of mixture-of-experts models, over libexpertd.

    import expertd
    with expertd.Client("tcp://127.0.0.1:7410") as client:
        y = client.forward("mixtral", 3, x, expert_ids, expert_scales)

A Group is for programs whose ranks hold tokens and experts themselves.
"""

from . import errors
from ._c import lib as _lib
from ._client import Client, Health, Layer, Model, Node, Prepared, Result, Stats
from ._gate import Gate
from ._group import AddRmsNorm, Combine, Dispatch, Group, GroupBuffers, GroupParams, GroupStats, GroupTraffic
from ._group import group_buffer_sizes
from ._values import Tls
from .errors import Error

__version__ = "0.1.0"
__all__ = ["Client", "Error", "Gate", "Health", "Layer", "Model", "Node", "Prepared", "Result", "Stats", "Tls", "errors"]
__all__ += ["AddRmsNorm", "Combine", "Dispatch", "Group", "GroupBuffers", "GroupParams", "GroupStats", "GroupTraffic"]
__all__ += ["group_buffer_sizes", "library_version"]


def library_version() -> str:
    """Of the libexpertd that is loaded."""
    return _lib.ep_version().decode()
