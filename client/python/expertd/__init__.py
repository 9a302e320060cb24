# SPDX-License-Identifier: Apache-2.0
"""expertd for Python: token batches to the experts of mixture-of-experts models, over libexpertd.

    import expertd
    with expertd.Client("tcp://127.0.0.1:7410") as client:
        y = client.forward("mixtral", 3, x, expert_ids, expert_scales)
"""

from . import errors
from ._c import lib as _lib
from ._client import Client, Health, Layer, Model, Node, Prepared, Result, Stats, Tls
from .errors import Error

__version__ = "0.1.0"
__all__ = ["Client", "Error", "Health", "Layer", "Model", "Node", "Prepared", "Result", "Stats", "Tls", "errors"]
__all__ += ["library_version"]


def library_version() -> str:
    """Of the libexpertd that is loaded."""
    return _lib.ep_version().decode()
