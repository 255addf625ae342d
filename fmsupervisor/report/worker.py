"""One thread for calls that would hold up an event loop."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from fmsupervisor import signals


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], bool]
    answer: "asyncio.Future[bool]"


class Worker:
    """Makes calls one after the other in a thread of its own, which begins with the first and is a daemon thread.

    (The executors of the standard library keep the process alive until their last call has returned.)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] | None = None  # None: the thread does not run

    async def call(self, function: Callable[[], bool]) -> bool:
        """What ``function`` returns or raises. A call whose caller was cancelled before its turn is left out."""
        if self._calls is None:
            calls: SimpleQueue[_Call | None] = SimpleQueue()
            threading.Thread(target=_work, args=(calls,), name=self._name, daemon=True).start()
            self._calls = calls  # only now: that no thread can be started is raised, and tried again by the next call
        call = _Call(function, asyncio.get_running_loop().create_future())
        self._calls.put(call)
        return await call.answer

    def stop(self) -> None:
        """End the thread after the call that it is at."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _work(calls: "SimpleQueue[_Call | None]") -> None:
    signals.hold()
    while (call := calls.get()) is not None:
        if call.answer.cancelled():
            continue
        outcome = _outcome(call.function)
        try:
            call.answer.get_loop().call_soon_threadsafe(_settle, call.answer, outcome)
        except RuntimeError:  # the loop was closed meanwhile
            return


def _outcome(function: Callable[[], bool]) -> bool | Exception:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - raised again where the call was made
        return error


def _settle(answer: "asyncio.Future[bool]", outcome: bool | Exception) -> None:  # noqa: FBT001 - a result, not a switch
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
