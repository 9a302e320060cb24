# SPDX-License-Identifier: Apache-2.0
"""One exception for each error code of expertd/error.h, which says what each means."""

from __future__ import annotations

from typing import Optional


class Error(Exception):
    """What a call failed with. str() names the thing, its value, the allowed range or what was waited for.

    code           the C number, name its name ("UNAVAILABLE")
    layer, expert  None where they do not apply
    node           "" where it does not apply
    waited         seconds, or None
    retry_after    seconds after which the service asks to try again, or None
    current_epoch  number of the peer's routing table, or None
    """

    code: int = 2
    name: str = "UNKNOWN"

    def __init__(self, text: str, *, layer: Optional[int] = None, expert: Optional[int] = None, node: str = "",
                 waited: Optional[float] = None, retry_after: Optional[float] = None,
                 current_epoch: Optional[int] = None):
        super().__init__(text)
        self.layer, self.expert, self.node, self.waited = layer, expert, node, waited
        self.retry_after, self.current_epoch = retry_after, current_epoch

    def __str__(self) -> str:
        return f"{self.name}: {super().__str__()}"


class Cancelled(Error): code, name = 1, "CANCELLED"
class InvalidArgument(Error, ValueError): code, name = 3, "INVALID_ARGUMENT"
class DeadlineExceeded(Error, TimeoutError): code, name = 4, "DEADLINE_EXCEEDED"
class NotFound(Error, LookupError): code, name = 5, "NOT_FOUND"
class AlreadyExists(Error): code, name = 6, "ALREADY_EXISTS"
class PermissionDenied(Error, PermissionError): code, name = 7, "PERMISSION_DENIED"
class ResourceExhausted(Error): code, name = 8, "RESOURCE_EXHAUSTED"
class FailedPrecondition(Error): code, name = 9, "FAILED_PRECONDITION"
class Aborted(Error): code, name = 10, "ABORTED"
class OutOfRange(Error): code, name = 11, "OUT_OF_RANGE"
class Unimplemented(Error, NotImplementedError): code, name = 12, "UNIMPLEMENTED"
class Internal(Error): code, name = 13, "INTERNAL"
class Unavailable(Error, ConnectionError): code, name = 14, "UNAVAILABLE"
class DataLoss(Error): code, name = 15, "DATA_LOSS"
class Unauthenticated(Error, PermissionError): code, name = 16, "UNAUTHENTICATED"
class NoMemory(Error, MemoryError): code, name = 32, "NO_MEMORY"
class NotOwner(Error): code, name = 33, "NOT_OWNER"
class StaleEpoch(Error): code, name = 34, "STALE_EPOCH"
class Draining(Unavailable): code, name = 35, "DRAINING"
class ConnectionLost(Unavailable): code, name = 36, "CONNECTION_LOST"
class DeviceLost(Unavailable): code, name = 37, "DEVICE_LOST"
class ProtocolError(Error): code, name = 38, "PROTOCOL"
class Closed(Error): code, name = 39, "CLOSED"
class IoError(Error, OSError): code, name = 40, "IO"
class BadFile(Error): code, name = 41, "BAD_FILE"
class BadConfig(Error): code, name = 42, "BAD_CONFIG"


def _all(base):
    for kind in base.__subclasses__():
        yield kind
        yield from _all(kind)


BY_CODE = {kind.code: kind for kind in _all(Error)}


def from_c(error) -> Error:
    """The exception for an ep_error."""
    return BY_CODE.get(error.code, Error)(
        error.text.decode(errors="replace"),
        layer=error.layer if error.layer >= 0 else None,
        expert=error.expert if error.expert >= 0 else None,
        node=error.node.decode(errors="replace"),
        waited=error.waited_us / 1e6 if error.waited_us >= 0 else None,
        retry_after=error.retry_after_us / 1e6 if error.retry_after_us else None,
        current_epoch=error.current_epoch or None,
    )
