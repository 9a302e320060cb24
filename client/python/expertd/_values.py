# SPDX-License-Identifier: Apache-2.0
"""From Python's values to C's, and back."""

from __future__ import annotations

import ctypes
import numbers
from dataclasses import dataclass, fields
from typing import Any, Dict, Optional

from . import _c


@dataclass(frozen=True)
class Tls:
    """For tls+tcp:// URLs: PEM files, and the name in the service's certificate."""

    ca_file: str
    server_name: str
    cert_key_file: Optional[str] = None


def set_tls(config: ctypes.Structure, tls: Any) -> None:
    """The three fields that ep_client_config and ep_group_config have for it."""
    if tls is None:
        return
    if not isinstance(tls, Tls):
        raise TypeError(f"tls is a {type(tls).__name__}: allowed is expertd.Tls(ca_file, server_name, cert_key_file)")
    config.tls_ca_file, config.tls_server_name = text("tls.ca_file", tls.ca_file), text("tls.server_name", tls.server_name)
    config.tls_cert_key_file = text("tls.cert_key_file", tls.cert_key_file)


def integer(name: str, value: Any, bits: int, least: int = 0) -> int:
    try:
        whole = value.__index__()
    except AttributeError:
        raise TypeError(f"{name} is a {type(value).__name__}: allowed is an integer") from None
    if not least <= whole < 1 << bits:
        raise ValueError(f"{name} is {whole}: allowed {least}..{(1 << bits) - 1}")
    return whole


def microseconds(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a {type(value).__name__}: allowed is a number of seconds")
    if not 0 < value < 4294:
        raise ValueError(f"{name} is {value}: allowed more than 0 and less than 4294 seconds")
    return max(1, int(float(value) * 1e6))


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a {type(value).__name__}: allowed is a number")
    return float(value)


def text(name: str, value: Any) -> Optional[bytes]:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}: allowed is a string")
    if "\0" in value:
        raise ValueError(f"{name} is {value!r}: allowed are strings without a zero")
    return value.encode()


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}: allowed are True and False")
    return value


def word(name: str, value: Any, words: Dict[str, int]) -> int:
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} is {value!r}: allowed are {', '.join(map(repr, words))}")
    return words[value]


def name_of(kind: str, number: int) -> str:
    return next((word for word, n in _c.ENUMS[kind].items() if n == number), str(number))


def plain(kind: type, struct: ctypes.Structure, **more: Any) -> Any:
    """A dataclass from the struct's fields of the same names."""
    values = {f.name: getattr(struct, f.name) for f in fields(kind) if f.name not in more}
    return kind(**{k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in values.items()}, **more)
