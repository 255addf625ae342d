"""Says a thing that repeats once, and then how often it was repeated.

A *stream* is what must not fill the journal: everything about one instance of a condition, or one text of any other
event. Within a stream a message equal to the one before is counted and dropped; when the window ends, or another
message comes in that stream, one line gives the number. Only neighbours are compared, never the whole window: "raised,
cleared, raised" must stay three lines, since a reader who saw only the first two would believe that all is well.

Memory is bounded: beyond ``capacity`` streams the oldest is ended early, which costs a line and never loses a count.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from threading import Lock

import structlog
from structlog.typing import EventDict, WrappedLogger

_LONGEST_TEXT = 4096  # longer ones are not worth the memory: they pass
_KEPT_FIELDS = ("condition", "subject", "session", "fm_pid", "pci_bus_id", "sxid")


@dataclass(frozen=True, slots=True)
class Repeated:
    """``count`` further messages like this one were left out during ``seconds``."""

    message: str
    level: str
    count: int
    seconds: float
    fields: Mapping[str, object]


@dataclass(slots=True)
class _Stream:
    text: Hashable
    message: str
    level: str
    began: float
    fields: Mapping[str, object]
    count: int = 0


class RepeatFilter:
    """A structlog processor. ``report`` writes the line about what was left out; ``exempt`` kinds always pass.

    ``clock`` is monotonic, in seconds. Safe to use from several threads.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        report: Callable[[Repeated], None],
        window_seconds: float = 300.0,
        capacity: int = 512,
        exempt: Collection[object] = (),
    ) -> None:
        self._clock = clock
        self._report = report
        self._window_seconds = window_seconds
        self._capacity = capacity
        self._exempt = frozenset(exempt)
        self._streams: OrderedDict[Hashable, _Stream] = OrderedDict()  # in the order in which their windows end
        self._lock = Lock()

    def __call__(self, _logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
        """Pass the event on, or raise ``DropEvent``."""
        message = str(event_dict["event"])
        if event_dict.get("kind") in self._exempt or len(message) > _LONGEST_TEXT:
            return event_dict
        with self._lock:
            now = self._clock()
            ended = self._take_ended(now)
            is_repeat = self._count(event_dict, message, now, ended)
        self._tell(ended)
        if is_repeat:
            raise structlog.DropEvent
        return event_dict

    def flush(self, *, everything: bool = False) -> None:
        """End the windows that are over, or all of them. For a slow timer, and for the end of the program."""
        with self._lock:
            ended = list(self._streams.values()) if everything else self._take_ended(self._clock())
            if everything:
                self._streams.clear()
        self._tell(ended)

    def _take_ended(self, now: float) -> list[_Stream]:
        ended = []
        while self._streams:
            oldest = next(iter(self._streams.values()))
            if now - oldest.began < self._window_seconds:
                break
            ended.append(self._streams.popitem(last=False)[1])
        return ended

    def _count(self, event_dict: EventDict, message: str, now: float, ended: list[_Stream]) -> bool:
        key, text = _identity(event_dict, message)
        stream = self._streams.get(key)
        if stream is not None and stream.text == text:
            stream.count += 1
            return True
        if stream is not None:
            ended.append(self._streams.pop(key))
        elif len(self._streams) >= self._capacity:
            ended.append(self._streams.popitem(last=False)[1])
        fields = {name: event_dict[name] for name in _KEPT_FIELDS if name in event_dict}
        self._streams[key] = _Stream(text, message, str(event_dict.get("level", "info")), now, fields)
        return False

    def _tell(self, ended: list[_Stream]) -> None:
        for stream in ended:
            if stream.count:
                seconds = min(self._clock() - stream.began, self._window_seconds)
                self._report(Repeated(stream.message, stream.level, stream.count, seconds, stream.fields))


def _identity(event_dict: EventDict, message: str) -> tuple[Hashable, Hashable]:
    """The stream of an event, and what must be equal for a repeat."""
    kind = event_dict.get("kind")
    if "condition" in event_dict:
        # The reason is the particulars; the message may also hold a count or a duration, which are not news.
        return ("condition", event_dict["condition"], event_dict.get("subject")), (kind, event_dict.get("reason"))
    # A new run of Fabric Manager says the same lines again, and they must be seen.
    return (kind, event_dict.get("session"), message), message
