# SPDX-License-Identifier: Apache-2.0
"""What vLLM and SGLang look for. Apart from expertd, which loads libexpertd when it is imported: both only log what an
import of a plugin raises, and SGLang what a plugin raises too, and would then serve with experts of their own."""

import os


def vllm() -> None:
    """Does nothing unless EXPERTD_URL is set."""
    if os.environ.get("EXPERTD_URL"):
        import expertd.vllm

        expertd.vllm.register()


def sglang() -> None:
    """Does nothing unless EXPERTD_URL is set."""
    if os.environ.get("EXPERTD_URL"):
        try:
            import expertd.sglang

            expertd.sglang.register()
        except Exception as error:
            raise SystemExit(f"EXPERTD_URL is set, and expertd is no plugin of this SGLang: {error!r}: install the SGLang that the wheel's manual names, or unset EXPERTD_URL") from error
