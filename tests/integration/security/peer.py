# SPDX-License-Identifier: Apache-2.0
"""A peer written from the frame format alone (lib/wire/frame.h's table, proto/*.proto), for attacks on running daemons. It shares no code
with the wire library: sockets, struct and a hand-written protobuf encoding. Nothing here checks what it sends; that is the daemon's work."""
import os, random, socket, ssl, struct, threading, time

# proto/methods.def: service << 8 | method
HELLO, FORWARD, DESCRIBE, NODE_STATUS = 0x0000, 0x0101, 0x0102, 0x0201
REGISTER, HEARTBEAT, WATCH, CLUSTER_STATUS, STATISTICS = 0x0301, 0x0302, 0x0303, 0x0304, 0x0305
HEALTH_CHECK, LIST_SERVICES, GATEWAY_FORWARD = 0x0401, 0x0501, 0x0601
DRAIN, RELOAD, GET_CONFIG = 0x0701, 0x0702, 0x0703
REQUEST, REPLY, REPLY_MORE, CANCEL, PING, PONG, CREDIT, GOODBYE = range(1, 9)
NO_DEADLINE = 0xFFFFFFFF
SP_REQ_HELLO, SP_REP_HELLO = b"\0SP\0\0\x30\0\0", b"\0SP\0\0\x31\0\0"


def _crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def crc32c(data, crc=0):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value):
    return (value << 1) ^ (value >> 63)


class Fixed64(float):
    """A double."""


def message(*fields):
    """Packs (number, value) pairs in order: int or bool as varint, str and bytes as they are, a tuple as a message of such pairs, a list of int packed."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, Fixed64):
            out += varint(number << 3 | 1) + struct.pack("<d", value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(int(value))
        else:
            if isinstance(value, str):
                value = value.encode("utf-8", "surrogateescape")
            elif isinstance(value, tuple):
                value = message(*value)
            elif isinstance(value, list):
                value = b"".join(varint(v) for v in value)
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return bytes(out)


def parse(data):
    """number: [values] of a packed message; length-delimited values stay bytes."""
    fields, at = {}, 0

    def read_varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = read_varint()
        kind = tag & 7
        if kind == 0:
            value = read_varint()
        elif kind == 2:
            size = read_varint()
            value = bytes(data[at : at + size])
            at += size
        else:
            size = 8 if kind == 1 else 4
            value = int.from_bytes(data[at : at + size], "little")
            at += size
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def unpack_ints(data):
    """The numbers of a packed repeated field."""
    return [] if not data else parse(b"".join(b"\x08" + piece for piece in _split_varints(data))).get(1, [])


def _split_varints(data):
    begin = 0
    for at, byte in enumerate(data):
        if byte < 0x80:
            yield data[begin : at + 1]
            begin = at + 1


def frame(kind, method=0, call=0, header=b"", tensors=b"", status=0, deadline_us=0, attempt=0, flags=0, crc=True, claim_header=None, claim_tensors=None):
    """A whole frame. claim_*: what the fixed part says in place of the true length."""
    header_bytes = len(header) if claim_header is None else claim_header
    tensor_bytes = len(tensors) if claim_tensors is None else claim_tensors
    offset = (64 + header_bytes + 63) & ~63
    payload = header + b"\0" * (-len(header) % 64) + tensors if claim_header is None else header + tensors
    fixed = struct.pack("<4sBBHQHHIIIIIQIQ", b"EPD1", 1, kind, flags, call, attempt, method, status, deadline_us, header_bytes, offset, 0, tensor_bytes, crc32c(payload) if crc else 0, 0)
    return fixed + struct.pack("<I", crc32c(fixed)) + payload


def request_header(body=b"", metadata=()):
    """CallHeader with its length, then the message."""
    call_header = b"".join(message((1, ((1, key), (2, value)))) for key, value in metadata)
    return struct.pack("<I", len(call_header)) + call_header + body


class Prepared:
    """A request made before there is a connection: a check sum of megabytes takes seconds here, and pings must be answered."""

    call = 1 << 63

    def __init__(self, method, body):
        self.bytes = frame(REQUEST, method, self.call, request_header(body), deadline_us=NO_DEADLINE)

    def send(self, peer):
        peer.send(self.bytes)
        return self.call


class Frame:
    def __init__(self, fixed, payload):
        (self.magic, self.version, self.kind, self.flags, self.call, self.attempt, self.method, self.status, self.deadline_us, header_bytes, offset, self.sequence, tensor_bytes, _, _,
         _) = struct.unpack("<4sBBHQHHIIIIIQIQI", fixed)
        self.header, self.tensors = payload[:header_bytes], payload[offset - 64 :]
        self.fields = parse(self.header) if self.kind in (REPLY, REPLY_MORE, GOODBYE) else {}

    def text(self):
        """Why a call failed; "" when it did not."""
        return self.fields.get(2, [b""])[0].decode("utf-8", "replace") if self.status else ""


def split_url(url):
    scheme, rest = url.split("://")
    host, port = rest.rsplit(":", 1)
    return scheme, host.strip("[]"), int(port)


def connect(url, source=None, timeout=10, tls=None):
    """A connected socket. source: a local address to come from, 127.0.0.x for another peer of this machine. tls: an ssl.SSLContext."""
    _, host, port = split_url(url)
    sock = socket.create_connection((host, port), timeout=timeout, source_address=(source, 0) if source else None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return tls.wrap_socket(sock, server_hostname=host) if tls is not None else sock


def read_exact(sock, count):
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError(f"the connection ended after {len(data)} of {count} bytes")
        data += piece
    return bytes(data)


def is_closed(sock):
    """Whether the daemon has ended this connection; what it sent before is read and dropped."""
    before = sock.gettimeout()
    sock.settimeout(0)
    try:
        while True:
            if not sock.recv(65536):
                return True
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    finally:
        try:
            sock.settimeout(before)
        except OSError:
            pass


class Peer:
    """One connection to a `listen` address. Not for threads."""

    def __init__(self, url, source=None, timeout=10, tls=None):
        self.sock = connect(url, source, timeout, tls)
        self.crc = tls is None
        self.last_call = random.getrandbits(32) << 32
        self.welcome = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data)

    def read_frame(self):
        fixed = read_exact(self.sock, 64)
        header_bytes, offset = struct.unpack_from("<II", fixed, 28)
        tensor_bytes = struct.unpack_from("<Q", fixed, 40)[0]
        return Frame(fixed, read_exact(self.sock, offset - 64 + tensor_bytes) if header_bytes or tensor_bytes else b"")

    def next_frame(self):
        """The next one that is no ping; pings are answered."""
        while True:
            got = self.read_frame()
            if got.kind == PING:
                self.send(frame(PONG, call=got.call, crc=False))
            elif got.kind not in (PONG, CREDIT):
                return got

    def hello(self, role="client", token="", node="", incarnation=0, more=()):
        """Returns the reply frame; status 0 is a welcome. more: further (number, value) fields of Hello."""
        body = message((1, 1), (2, 1), (5, token), (6, incarnation), (7, node), (8, role), (9, 16 << 20), (10, 4 << 20), (11, 64 << 20), (13, 500), (14, self.crc), (18, "peer.py"), *more)
        self.last_call += 1
        self.send(frame(REQUEST, HELLO, self.last_call, request_header(body), deadline_us=NO_DEADLINE, crc=self.crc))
        self.welcome = self.next_frame()
        return self.welcome

    def start(self, method, body=b"", metadata=(), tensors=b"", deadline_us=NO_DEADLINE):
        """Sends a request; its call id."""
        self.last_call += 1
        self.send(frame(REQUEST, method, self.last_call, request_header(body, metadata), tensors, deadline_us=deadline_us, crc=self.crc))
        return self.last_call

    def call(self, method, body=b"", metadata=(), tensors=b"", deadline_us=NO_DEADLINE):
        """The reply frame: status, fields, tensors, text()."""
        return self.reply_to(self.start(method, body, metadata, tensors, deadline_us))

    def reply_to(self, wanted):
        while True:
            got = self.next_frame()
            if got.kind == GOODBYE:
                raise ConnectionError("goodbye: " + got.text())
            if got.call == wanted and got.kind in (REPLY, REPLY_MORE):
                return got

    def keep(self, seconds):
        """Stays connected for a while, answering pings; the frames that came."""
        frames, end, before = [], time.monotonic() + seconds, self.sock.gettimeout()
        try:
            while (left := end - time.monotonic()) > 0:
                self.sock.settimeout(left)
                got = self.read_frame()
                if got.kind == PING:
                    self.send(frame(PONG, call=got.call, crc=False))
                frames.append(got)
        except socket.timeout:
            pass
        finally:
            self.sock.settimeout(before)
        return frames


class Service:
    """A daemon's place on a port of its own, which answers any Hello, and each method of `answers` with that body, or what it returns; or with (status, text). For what a wrong
    service can do to those who call it."""

    def __init__(self, answers, node="n0"):
        self.answers = answers | {HELLO: message((1, 1), (2, 1), (6, 7), (7, node), (8, "node"), (9, 16 << 20), (10, 4 << 20), (11, 64 << 20), (13, 500), (14, True), (18, "peer.py"))}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()

    def _accept(self):
        try:
            while True:
                threading.Thread(target=self._serve, args=(self.listener.accept()[0],), daemon=True).start()
        except OSError:
            pass

    def _serve(self, sock):
        with sock:
            try:
                while True:
                    fixed = read_exact(sock, 64)
                    kind, call, method = fixed[5], *struct.unpack_from("<QxxH", fixed, 8)
                    header_bytes, offset, _, tensor_bytes = struct.unpack_from("<IIIQ", fixed, 28)
                    if header_bytes or tensor_bytes:
                        read_exact(sock, offset - 64 + tensor_bytes)
                    if kind == PING:
                        sock.sendall(frame(PONG, call=call, crc=False))
                    elif kind == REQUEST:
                        answer = self.answers.get(method, (12, "no such method"))
                        answer = answer() if callable(answer) else answer
                        status, body = (answer[0], message((1, answer[0]), (2, answer[1]))) if isinstance(answer, tuple) else (0, answer)
                        sock.sendall(frame(REPLY, method, call, body, status=status, flags=2 if method == WATCH else 0))
            except OSError:
                pass


class DoorPeer:
    """One connection to a `door_listen` address: SP's REQ."""

    def __init__(self, url, source=None, timeout=10, tls=None, hello=True):
        self.sock = connect(url, source, timeout, tls)
        self.crc = tls is None
        self.last_id = 0
        if hello:
            self.sock.sendall(SP_REQ_HELLO)
            assert read_exact(self.sock, 8) == SP_REP_HELLO

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.sock.close()

    def begin(self, length, sent=b""):
        """Only a message's length, and the first bytes of it."""
        self.sock.sendall(struct.pack(">Q", length) + sent)

    def send(self, body):
        self.last_id += 1
        self.sock.sendall(struct.pack(">QI", len(body) + 4, 0x80000000 | self.last_id) + body)

    def receive(self):
        data = read_exact(self.sock, struct.unpack(">Q", read_exact(self.sock, 8))[0])[4:]
        return Frame(data[:64], data[64:])

    def call(self, method, body=b"", token="", tensors=b""):
        metadata = (("authorization", "Bearer " + token),) if token else ()
        self.send(frame(REQUEST, method, 1, request_header(body, metadata), tensors, deadline_us=NO_DEADLINE, crc=self.crc))
        return self.receive()


def layer_info(layer, experts=16, hidden=128, inner=256, top_k=2, owned=(), digests=()):
    """LayerInfo of a SwiGLU layer."""
    return ((1, layer), (2, hidden), (3, inner), (4, experts), (6, top_k), (7, 1), (8, list(owned)), (9, b"".join(struct.pack("<I", d) for d in digests)))


def model_info(name, version, layers, numerics="portable"):
    return ((1, name), (2, version), (3, version), (4, numerics), *((5, layer) for layer in layers), (6, [1, 2, 3]))


def register_body(node, url, incarnation, models=(), more=()):
    return message((1, node), (2, url), (3, incarnation), *((4, model) for model in models), *more)


def heartbeat_body(node, incarnation, state="serving", epoch=(), models=(), more=()):
    return message((1, node), (2, incarnation), (3, tuple(epoch)), (4, state), *((7, model) for model in models), *more)


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
