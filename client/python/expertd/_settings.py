# SPDX-License-Identifier: Apache-2.0
"""The two environment variables that name the service to plugins of engines:

    EXPERTD_URL      of the coordinator; unset: the plugins do nothing
    EXPERTD_OPTIONS  a JSON object, each key optional:

    model_name   as the service calls it; without: the only one there is
    version      of expertd.Model.version; without: the default of the model at start
    wait         seconds for the service to have loaded every expert, 600
    deadline     seconds of one call, a layer of all tokens of a batch, 60
    token_file   what the service knows this client by
    tls          {"ca_file": ..., "server_name": ..., "cert_key_file": ...}, for tls+tcp:// URLs
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Dict

from . import _values
from ._values import Tls

_OPTIONS = ("model_name", "version", "wait", "deadline", "token_file", "tls")


def _options_of(text: str) -> Dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"EXPERTD_OPTIONS is {text!r}: {error}: allowed is a JSON object") from None
    if not isinstance(options, dict):
        raise ValueError(f"EXPERTD_OPTIONS is {text!r}: allowed is a JSON object with {', '.join(_OPTIONS)}")
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"EXPERTD_OPTIONS has {name!r}: allowed are {', '.join(_OPTIONS)}")
    return options


def _token_of(path: Any) -> str:
    if not isinstance(path, str):
        raise ValueError(f"EXPERTD_OPTIONS has token_file {path!r}: allowed is the path of a file with the token")
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"EXPERTD_OPTIONS has token_file {path!r}, which cannot be read: {error}") from None
    if not token:
        raise ValueError(f"EXPERTD_OPTIONS has token_file {path!r}, which is empty: allowed is a file with the token")
    return token


def _tls_of(given: Any) -> Tls:
    names = [f.name for f in dataclasses.fields(Tls)]
    allowed = "an object with ca_file and server_name, and cert_key_file where the service asks for one: texts"
    texts = {n: v for n, v in given.items() if v is not None} if isinstance(given, dict) else {}
    wrong = [n for n, v in texts.items() if n not in names or not isinstance(v, str)]
    if wrong or not {"ca_file", "server_name"} <= set(texts):
        raise ValueError(f"EXPERTD_OPTIONS has tls {given!r}: allowed is {allowed}")
    return Tls(**texts)


def _check_plain(options: Dict[str, Any]) -> None:
    for name in ("model_name", "version"):
        if not isinstance(options.get(name), (str, type(None))) or options.get(name) == "":
            raise ValueError(f"EXPERTD_OPTIONS has {name} {options[name]!r}: allowed is a text")
    for name in ("wait", "deadline"):
        try:
            _values.microseconds(name, options.get(name, 1))
        except (TypeError, ValueError):
            allowed = "a number of seconds, more than 0 and less than 4294"
            raise ValueError(f"EXPERTD_OPTIONS has {name} {options[name]!r}: allowed is {allowed}") from None


def arguments() -> Dict[str, Any]:
    """What EXPERTD_URL and EXPERTD_OPTIONS say, as arguments of Service and of expertd.hf."""
    url = os.environ.get("EXPERTD_URL")
    if not url:
        raise ValueError("EXPERTD_URL is not set: allowed is the URL of a coordinator, such as tcp://127.0.0.1:7410")
    options, client = _options_of(os.environ.get("EXPERTD_OPTIONS") or "{}"), {}
    _check_plain(options)
    if "token_file" in options:
        client["token"] = _token_of(options.pop("token_file"))
    if "tls" in options:
        client["tls"] = _tls_of(options.pop("tls"))
    defaults = {"experts": url, "model_name": None, "version": None, "wait": 600.0, "deadline": 60.0, "client": client}
    return {**defaults, **options}
