"""The processes of a run meet in a store, and agree on the members of each round.

Note [Rounds]
    A round has a number, and members in the order of their ranks. A process enters the next round by a word in the
    store. One `compare_set` decides the round, once all members of the last round have entered or are gone. A host
    closes a process's port as the process ends, so knocks are refused at once. Once a member has entered, others get
    `patience`; before, members only train, and newcomers wait. Late processes enter the round after. The last round is
    read from the store: a newcomer remembers none, and would decide a round alone.
"""

from __future__ import annotations

import json
import math
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from ..core.arguments import check_positive

_LOOK = 0.01  # seconds between two looks into the store
_PAUSE = 0.1  # the same, of a spare


class Round(NamedTuple):
    """The members of a round, in the order of their ranks."""

    number: int
    members: Sequence[int]


NO_ROUND = Round(0, ())


class Meeting:
    """The place where the processes of a run meet.

    - `store`: outlives all processes of the run: a `TCPStore` in a process of its own, say.
    - `address`: this host's address, for other processes.
    - `patience`: seconds to wait for a host without an answer.

    >>> meeting = Meeting(dist.HashStore())
    >>> meeting.enter(least=1)
    Round(number=1, members=[1])
    """

    def __init__(self, store: dist.Store, address: str = "127.0.0.1", patience: float = 10.0):
        check_positive("Meeting: patience", patience)
        self.store, self.patience = dist.PrefixStore("fshard", store), patience
        self._door = socket.create_server((address, 0), backlog=512)
        self._door.setblocking(False)
        weakref.finalize(self, self._door.close)
        self.me = int(self.store.add("processes", 1))
        self.store.set(f"door/{self.me}", json.dumps([address, self._door.getsockname()[1]]))

    def last_round(self) -> Round:
        """Return the last decided round; number 0, without members, before the first."""
        number = int(self._read("round") or 0)  # of the last round, or of one before it
        while self.store.check([f"members/{number + 1}"]):
            number += 1
        return Round(number, json.loads(self._read(f"members/{number}") or "[]"))

    def enter(self, least: int) -> Round | None:
        """Enter the next round, and wait for its members, `least` in the first; None if the run is over."""
        while not self.is_over():
            last = self.last_round()
            place = self.store.add(f"entering/{last.number + 1}", 1)
            self.store.set(f"entered/{last.number + 1}/{place}", str(self.me))
            self._decide(last, 1 if last.number else least)
            if self.me in (decided := self.last_round()).members:
                return decided
        return None

    def entered(self, number: int) -> list[int]:
        """Return the processes in a round, decided or not, in the order of their coming."""
        places = range(1, int(self.store.add(f"entering/{number}", 0)) + 1)
        return [int(text) for place in places if (text := self._read(f"entered/{number}/{place}"))]

    def alive(self) -> list[int]:
        """Return all living processes of the run."""
        return [x for x in range(1, int(self.store.add("processes", 0)) + 1) if not self._is_gone(x)]

    def end(self) -> None:
        """End the run for all processes."""
        self.store.set("over", "yes")

    def is_over(self) -> bool:
        """Return True if the run has ended."""
        return bool(self._read("over"))

    def note_state(self, number: int) -> None:
        """Note a state held by all ranks of a round: states of earlier rounds are old."""
        self.store.set(f"state/{number}", "yes")

    def last_with_state(self, before: int) -> int:
        """Return the last round before `before` with a state held by all ranks; 0 if none."""
        return next((number for number in range(before - 1, 0, -1) if self._read(f"state/{number}")), 0)

    def wait(self, round: Round, trains: Sequence[int]) -> bool:
        """Wait, as a spare, until the others enter the next round or are gone; return True if the run is over."""
        while not self.is_over() and {*trains}.isdisjoint(self.entered(round.number + 1)):
            if all(map(self._is_gone, trains)):
                break
            self._open_door()
            time.sleep(_PAUSE)
        return self.is_over()

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _decide(self, last: Round, least: int) -> None:
        """Wait until the round after `last` is decided; decide it if nobody else does."""
        number, until = last.number + 1, math.inf
        while self.last_round().number < number and not self.is_over():
            self._open_door()
            entered = self.entered(number)
            knocks = {x: self._knock(x) for x in last.members if x not in entered}
            late = [x for x, answers in knocks.items() if answers is not False]
            if until == math.inf and (len(knocks) < len(last.members) or True not in knocks.values()):
                until = time.monotonic() + self.patience
            may_begin = len(entered) >= least and (not late or time.monotonic() > until)
            here = [x for x in entered if not self._is_gone(x)] if may_begin else []  # some may have died since
            if len(here) >= least:
                order = [x for x in last.members if x in here] + [x for x in here if x not in last.members]
                self.store.compare_set(f"members/{number}", "", json.dumps(order))
                self.store.set("round", str(number))
            else:
                time.sleep(_LOOK)

    def _open_door(self) -> None:
        """Accept knocks: a full queue would refuse them."""
        with suppress(BlockingIOError):
            while True:
                self._door.accept()[0].close()

    def _is_gone(self, process: int) -> bool:
        return self._knock(process) is False

    def _knock(self, process: int) -> bool | None:
        """Return True if a process answers, False if it has ended; None without an answer: the host may be slow."""
        address, port = json.loads(self._read(f"door/{process}") or '["", 0]')
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        return True
