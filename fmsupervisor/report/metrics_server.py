"""The HTTP(S) server for Prometheus and probes, in a thread of its own with its own event loop.

Why not the threading server of prometheus_client: it has a thread per connection and no deadlines, so a few hundred
idle or slow clients exhaust it. A fixed pool of threads is no cure, since each idle client then holds one. Here all
sockets are non-blocking in one loop. At most ``_CONNECTIONS`` are open; when one more comes, the one that has waited
longest without completing its request is cut off, so idle clients cannot keep a scrape out. Every connection, from the
TLS handshake to the last byte, has one deadline. An answer ends the connection: between two scrapes a kept one would
idle longer than the deadline. (asyncio gives each TLS connection a buffer of 256 KiB, hence few of them.)

Making the answer takes milliseconds and reads one reference to a frozen state. Two things are slow and have a thread
each (``worker``): checking passwords, and asking the supervisor's loop whether it turns. An answer that cannot be made
is a bug: the client is cut off, asyncio logs it, and the server lives on.
"""

import asyncio
import gzip
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus

from prometheus_client.exposition import choose_encoder, gzip_accepted

from fmsupervisor import signals
from fmsupervisor.errors import ActionFailed, ConfigError
from fmsupervisor.facts import Problem
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.basic_auth import PasswordChecker, parse_authorization
from fmsupervisor.report.http_message import (
    HEAD_END,
    HEAD_LIMIT_BYTES,
    BadRequest,
    Request,
    Response,
    parse_request,
    plain,
    render_response,
)
from fmsupervisor.report.metrics import FabricCollector
from fmsupervisor.report.web_config import LoadedWebConfig, WebConfig, WebConfigFile, has_allowed_san
from fmsupervisor.report.worker import Worker
from fmsupervisor.settings import MetricsSettings

_CONNECTIONS = 32
_BACKLOG = 1024  # a connection attempt beyond it is repeated by the client's kernel a second later
_DEADLINE_SECONDS = 10.0
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 16
_ACCEPT_PAUSE_SECONDS = 0.1
_STOP_SECONDS = 5.0
_DRAIN_SECONDS = 2.0
_DRAIN_POLL_SECONDS = 0.005
_OPEN_TO_ALL = LoadedWebConfig(WebConfig(), None)

_PAGE = b"""<!DOCTYPE html>
<html lang="en"><title>fmsupervisor</title>
<h1>fmsupervisor</h1>
<ul><li><a href="/metrics">metrics</a><li><a href="/readyz">readyz</a><li><a href="/healthz">healthz</a></ul>
</html>
"""


def _ignore(_problem: Problem | None) -> None:
    pass


class MetricsServer:
    """Serves /metrics, /healthz, /readyz and a page of links, to GET and HEAD.

    ``is_alive`` may take its time and is called in a thread of its own; ``is_configured`` (with its sentence) and
    ``on_problem`` (about web.yml; None when it is cured) are called in the server's. ``listening`` is a socket to serve
    instead of opening one.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        collector: FabricCollector,
        is_alive: Callable[[], bool],
        is_configured: Callable[[], tuple[bool, str]],
        root: HostRoot,
        *,
        on_problem: Callable[[Problem | None], None] = _ignore,
        listening: socket.socket | None = None,
        deadline_seconds: float = _DEADLINE_SECONDS,
    ) -> None:
        self._settings = settings
        self._collector = collector
        self._is_alive = is_alive
        self._is_configured = is_configured
        self._web = WebConfigFile(root, settings.web_config, on_problem) if settings.web_config else None
        self._passwords = PasswordChecker()
        self._probes = Worker("probes")
        self._listening = listening
        self._deadline_seconds = deadline_seconds
        self._is_closing = False  # and not cut off
        self._connections: dict[asyncio.Task[None], None] = {}  # oldest first
        self._reading: dict[asyncio.Task[None], None] = {}  # those whose request is not complete, oldest first
        self._serving: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened on. Only while started."""
        if self._listening is None:
            raise ActionFailed("cannot tell the metrics address: the server is not started")
        host, port = self._listening.getsockname()[:2]
        return host, port

    def fileno(self) -> int:
        """The listening socket's descriptor, -1 when there is none."""
        return self._listening.fileno() if self._listening is not None else -1

    def start(self) -> None:
        """Open the port and serve. Raises ``ActionFailed`` when that is not possible at present."""
        if self._thread is not None:
            return
        try:
            if self._web is not None:
                self._web.current()
        except ConfigError as error:
            raise ActionFailed(f"cannot serve metrics: {error}") from error
        if self._listening is None:
            self._listening = _listen(self._settings.listen)
        self._listening.setblocking(False)
        try:
            self._begin(self._listening)
        except (OSError, RuntimeError) as error:  # no descriptor for a loop, or no thread
            self._listening.close()
            self._listening = None
            raise ActionFailed(f"cannot serve metrics: {error}") from error

    def _begin(self, listening: socket.socket) -> None:
        _look_for_descriptors()
        loop = asyncio.new_event_loop()
        serving = loop.create_task(self._run(loop, listening))
        thread = threading.Thread(target=_run_loop, args=(loop, serving), name="metrics", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            serving.cancel()
            _run_loop(loop, serving)
            raise
        self._serving, self._thread = serving, thread

    def stop(self) -> None:
        """Cut off all connections and close the port."""
        thread, serving = self._thread, self._serving
        if thread is None or serving is None:
            return
        with suppress(RuntimeError):  # the loop has ended by itself
            serving.get_loop().call_soon_threadsafe(serving.cancel)
        thread.join(_STOP_SECONDS)
        self._passwords.stop()
        self._probes.stop()
        if self._listening is not None:
            self._listening.close()
        self._thread = self._serving = self._listening = None

    async def hand_over(self) -> socket.socket | None:
        """Stop serving without closing the port: answer who is being answered, and return the socket that listens.

        Whoever connects from now on waits in the socket's queue for the next server.
        """
        thread, serving = self._thread, self._serving
        self._is_closing = True
        if thread is not None and serving is not None:
            with suppress(RuntimeError):
                serving.get_loop().call_soon_threadsafe(serving.cancel)
            while thread.is_alive():  # noqa: ASYNC110 - at most _DRAIN_SECONDS
                await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self._passwords.stop()
        self._probes.stop()
        listening, self._listening = self._listening, None
        self._thread = self._serving = None
        return listening

    async def _run(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        """Serve until cancelled."""
        loop.add_reader(listening, self._accept, loop, listening)
        try:
            await loop.create_future()
        finally:
            loop.remove_reader(listening)
            if self._is_closing and self._connections:
                await asyncio.wait(set(self._connections), timeout=_DRAIN_SECONDS)
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        """Take one waiting connection; the loop calls again, after all others had their turn, while there are more."""
        try:
            client, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors or memory, or an error of the connection itself (accept(2))
            self._cut_off_one()
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_SECONDS, loop.add_reader, listening, self._accept, loop, listening)
            return
        client.setblocking(False)
        if len(self._connections) >= _CONNECTIONS:
            self._cut_off_one()
        task = loop.create_task(self._serve(loop, client))
        self._connections[task] = self._reading[task] = None
        task.add_done_callback(partial(self._forget, client))

    def _cut_off_one(self) -> None:
        for task in (*self._reading, *self._connections):
            if not task.cancelling():
                task.cancel()
                return

    def _forget(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        client.close()  # when the task was cancelled before it began, nobody else does
        self._connections.pop(task, None)
        self._reading.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": "cannot answer a request for metrics", "exception": error}
            )

    async def _serve(self, loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
        """One connection, from its acceptance to its end."""
        reader = asyncio.StreamReader(HEAD_LIMIT_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._deadline_seconds):
                web = self._web.current() if self._web is not None else _OPEN_TO_ALL
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, client, ssl=web.context)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                await self._answer(reader, writer, web)
        except (OSError, EOFError):  # too slow (TimeoutError), gone, or a TLS handshake that failed (SSLError)
            pass
        finally:
            if writer is not None:
                writer.transport.abort()
            await asyncio.sleep(0)  # transports close their sockets in the next turn

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, web: LoadedWebConfig) -> None:
        request = None
        try:
            request = parse_request(await reader.readuntil(HEAD_END))
            self._stop_reading()
            response = await self._respond(request, writer, web)
        except asyncio.LimitOverrunError:
            response = plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except BadRequest as error:
            response = plain(error.status)
        is_head = request is not None and request.method == "HEAD"
        writer.transport.set_write_buffer_limits(0)
        writer.write(render_response(response, web.config.headers, with_body=not is_head))
        await writer.drain()
        if request is None or request.has_body:
            await _linger(reader, writer)
        writer.close()
        await writer.wait_closed()

    def _stop_reading(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._reading.pop(task, None)

    async def _respond(self, request: Request, writer: asyncio.StreamWriter, web: LoadedWebConfig) -> Response:
        tls, users = web.config.tls, web.config.users
        if tls is not None and not has_allowed_san(tls, writer.get_extra_info("peercert")):
            return plain(HTTPStatus.FORBIDDEN, "the client certificate has none of the allowed names")
        if users:
            credentials = parse_authorization(request.headers.get("authorization", ""))
            if credentials is None or not await self._passwords.is_right(users, credentials):
                return plain(HTTPStatus.UNAUTHORIZED, WWW_Authenticate='Basic realm="fmsupervisor"')
        if request.method not in ("GET", "HEAD"):
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
        match request.path:
            case "/metrics":
                return self._metrics(request)
            case "/healthz":
                if await self._probes.call(self._is_alive):
                    return plain(HTTPStatus.OK, "ok")
                return plain(HTTPStatus.SERVICE_UNAVAILABLE, "the supervisor's loop does not turn")
            case "/readyz":
                is_ready, sentence = self._is_configured()
                return plain(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, sentence)
            case "/":
                return Response(HTTPStatus.OK, _PAGE, "text/html; charset=utf-8")
            case _:
                return plain(HTTPStatus.NOT_FOUND)

    def _metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        try:
            encoder, content_type = choose_encoder(accept)
            body = encoder(self._collector)
        except TypeError:  # a version in Accept that is not made of numbers
            encoder, content_type = choose_encoder("")
            body = encoder(self._collector)
        if not gzip_accepted(request.headers.get("accept-encoding", "")):
            return Response(HTTPStatus.OK, body, content_type)
        compressed = gzip.compress(body, compresslevel=6, mtime=0)
        return Response(HTTPStatus.OK, compressed, content_type, {"Content-Encoding": "gzip"})


def _look_for_descriptors() -> None:
    """Raises ``OSError`` when those that a loop needs are missing: one that fails half-way leaves its pieces behind."""
    ours, theirs = socket.socketpair()
    with ours, theirs, selectors.DefaultSelector():
        pass


def _run_loop(loop: asyncio.AbstractEventLoop, serving: "asyncio.Task[None]") -> None:
    signals.hold()
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(serving)
    loop.close()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take in what the client still sends: closing over it would be a reset, which destroys the answer on its way."""
    if writer.can_write_eof():
        writer.write_eof()
    left = _LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0 and (chunk := await reader.read(left)):
                left -= len(chunk)


def _listen(address: str) -> socket.socket:
    """A listening socket on ``HOST:PORT``. "[::]" takes IPv4 clients too. Raises ``ActionFailed``."""
    host, _, port = address.rpartition(":")
    opened = None
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        opened.bind(where)
        opened.listen(_BACKLOG)
    except (OSError, ValueError) as error:
        if opened is not None:
            opened.close()
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ActionFailed(f"cannot serve metrics on {address}: {cause}") from error
    return opened
