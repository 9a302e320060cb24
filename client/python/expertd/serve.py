# SPDX-License-Identifier: Apache-2.0
"""transformers serve with the routed experts of its models on a service: it has no option for that.

    EXPERTD_URL=tcp://127.0.0.1:7410 python -m expertd.serve Qwen/Qwen3-30B-A3B --port 8000

Takes the arguments of transformers serve and gives its OpenAI endpoint. Options of the service are in EXPERTD_OPTIONS
(expertd/_settings.py). Whatever model it loads has its experts on the service, or is refused.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from transformers import PreTrainedModel

from . import hf
from ._settings import arguments

_load = PreTrainedModel.from_pretrained.__func__


def _on_service(model_class: Any, path: str, **options: Any) -> PreTrainedModel:
    plain = types.SimpleNamespace(from_pretrained=functools.partial(_load, model_class))
    return hf.from_pretrained(path, model_class=plain, **arguments(), **options)


def main() -> None:
    try:
        arguments()  # a wrong one is told before anything is loaded
    except (OSError, ValueError) as error:
        sys.exit(f"expertd.serve: {error}")
    PreTrainedModel.from_pretrained = classmethod(_on_service)
    sys.argv[1:1] = ["serve"]
    from transformers.cli.transformers import main as serve

    serve()


if __name__ == "__main__":
    main()
