"""HTTP/1.1 (RFC 9112) as far as a metrics server needs it: the head of a request, and a final answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from types import MappingProxyType

HEAD_END = b"\r\n\r\n"
HEAD_LIMIT_BYTES = 1 << 14  # the request line and all headers
_LINE_LIMIT_BYTES = 1 << 13
_HEADER_LIMIT = 100
_PRINTABLE_FROM = 0x20
_DELETE = 0x7F

# Nothing here is meant to be shown in a page, run, framed or stored.
_ALWAYS = MappingProxyType(
    {
        "Server": "fmsupervisor",
        "Connection": "close",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    }
)


class BadRequest(Exception):
    """A request that cannot be answered otherwise than by ``status``."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. Names of headers are in lower case; values have no control characters."""

    method: str
    path: str  # without the query
    headers: Mapping[str, str]

    @property
    def has_body(self) -> bool:
        """Whether more than the head was announced."""
        return "content-length" in self.headers or "transfer-encoding" in self.headers


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, before the headers that all have."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def plain(status: HTTPStatus, text: str = "", **headers: str) -> Response:
    """A line of text; the status in words when there is none. ``headers``: with ``_`` for ``-``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(status, f"{text or status.phrase}\n".encode("utf-8", "backslashreplace"), headers=named)


def parse_request(head: bytes) -> Request:
    """The request of which ``head`` is everything up to the empty line. Raises ``BadRequest``."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if len(lines[0]) > _LINE_LIMIT_BYTES:
        raise BadRequest(HTTPStatus.REQUEST_URI_TOO_LONG)
    if len(lines) > _HEADER_LIMIT:
        raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    words = lines[0].split(" ")
    if len(words) != 3 or not all(map(_is_clean, lines)):  # noqa: PLR2004  method, target, version
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    method, target, version = words
    if not version.startswith("HTTP/1."):
        raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        name = name.lower()
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    return Request(method, target.partition("?")[0], headers)


def render_response(response: Response, extra: Mapping[str, str], *, with_body: bool) -> bytes:
    """The bytes to send. ``extra`` takes precedence over the headers that are always there."""
    headers = {
        "Date": formatdate(usegmt=True),
        **_ALWAYS,
        **response.headers,
        **extra,
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
    }
    lines = [f"HTTP/1.1 {response.status.value} {response.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines).encode("latin-1", "replace") + HEAD_END
    return head + response.body if with_body else head


def _is_clean(line: str) -> bool:
    """Whether a line has no control characters besides tabs."""
    return all(character == "\t" or _PRINTABLE_FROM <= ord(character) != _DELETE for character in line)
