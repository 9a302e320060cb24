# SPDX-License-Identifier: Apache-2.0
"""What vLLM looks for. Apart from expertd, which loads libexpertd when it is imported: vLLM only logs what an import
of a plugin raises, and would then serve with experts of its own."""

import os


def register() -> None:
    """Does nothing unless EXPERTD_URL is set."""
    if os.environ.get("EXPERTD_URL"):
        import expertd.vllm

        expertd.vllm.register(os.environ["EXPERTD_URL"])
