"""Ray actors of one kind: started, replaced where they die or hang, and ended."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from apexrl.collectors.ray.session import RaySession, first_line
from apexrl.core.errors import ConfigError, EnvError
from apexrl.envs.options import check_at_least

MAX_LOST_ACTORS = 3
"""Workers lost in a row, in the same place and without a result between them, that end the run."""
POLL_SECONDS = 0.2
"""How long it may take to notice a dead worker while others still work."""
ROOM_SECONDS = 10.0
"""How long a worker may wait for its process before people are told what it waits for."""
START_SECONDS = 120.0, 600.0
"""How long it may wait for it: at least, and at most, whatever the time that results may take."""


class RayWorkers:
    """Ray actors, each in a place with a number.

    Args:
        kind: the class of the actors. Its ``describe`` makes the environments and says what they are.
        num_workers: places.
        timeout: seconds without a result after which a worker counts as hanging.
        options: what Ray should know of an actor, such as ``num_cpus`` (1 when not given).
        on_message: told which workers are lost, and what they wait for.
    """

    def __init__(
        self,
        kind: type,
        num_workers: int,
        timeout: float,
        options: Mapping[str, Any] | None,
        on_message: Callable[[str], None],
    ) -> None:
        check_at_least("RayCollector.", 1, num_workers=num_workers)
        if timeout <= 0:
            raise ConfigError(f"RayCollector.rollout_timeout must be positive, got {timeout}.")
        self.timeout, self.on_message = timeout, on_message
        self.arguments: tuple[Any, ...] = ()
        """What the next actor is made with."""
        self.lost = 0
        """Results that workers took with them."""
        self.actors: list[Any] = []
        self.ray = RaySession(num_workers)
        self._options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **(options or {}), "max_restarts": 0}
        self._kind, self._deaths = kind, [0] * num_workers
        self._stop = weakref.finalize(self, self.ray.leave)

    def start(self, *arguments: Any) -> list[Any]:
        """Make the actors and return what each ``describe`` says; an EnvError where they do not start in time."""
        self.arguments = arguments
        self.actors += [self._new_actor() for _ in self._deaths]
        self._wait_for_room(self.actors)
        refs = [actor.describe.remote() for actor in self.actors]
        ready, late = self.ray.wait(refs, num_returns=len(refs), timeout=self.timeout)
        if late:
            raise EnvError(f"Only {len(ready)} of {len(refs)} Ray workers made environments in {self.timeout:g} s.")
        try:
            return list(self.ray.get(refs))
        except self.ray.lost_errors as error:
            raise EnvError(f"A Ray worker died while it started: {first_line(error)}") from error

    def gather(self, refs: Mapping[int, Any], again: Callable[[int], Any]) -> dict[int, Any]:
        """Wait for the result of each place, and replace workers that die or hang meanwhile.

        ``again`` orders the result of a place once more, from its new worker, and returns what to wait for.
        """
        waiting, found = dict(refs), dict[int, Any]()
        since = time.monotonic()
        while waiting:
            places = {ref: place for place, ref in waiting.items()}
            ready, _ = self.ray.wait(list(places), num_returns=len(places), timeout=POLL_SECONDS)
            lost: dict[int, str] = {}
            for place in (places[ref] for ref in ready):
                try:
                    found[place] = self.ray.get(waiting[place])
                except self.ray.lost_errors as error:
                    lost[place] = f"died ({first_line(error)})"
                except Exception as error:
                    error.add_note(f"Raised in Ray worker {place}.")
                    raise
                else:
                    del waiting[place]
                    self._deaths[place] = 0
            if time.monotonic() - since > self.timeout:
                lost |= dict.fromkeys(waiting.keys() - lost.keys(), f"gave no rollout for {self.timeout:g} s")
            for place, what in lost.items():
                self._replace(place, what)
                waiting[place] = again(place)
            if lost:
                since = time.monotonic()
        return found

    def require_open(self) -> None:
        """Raise when the actors have been ended."""
        if not self._stop.alive:
            raise EnvError("The RayCollector is closed.")

    def close(self) -> None:
        """End the actors, also in the middle of their work."""
        for actor in self.actors if self._stop.alive else ():
            self.ray.kill(actor)
        self._stop()

    def _new_actor(self) -> Any:
        return self.ray.remote(self._kind).options(**self._options).remote(*self.arguments)

    def _replace(self, place: int, what: str) -> None:
        self.lost += 1
        self._deaths[place] += 1
        if self._deaths[place] >= MAX_LOST_ACTORS:
            raise EnvError(
                f"{MAX_LOST_ACTORS} Ray workers in a row were lost in place {place}; the last one {what}. "
                "Look into the messages of the simulator, or give each worker more memory or fewer environments."
            )
        self.on_message(
            f"Ray worker {place} {what}: the rollout it was collecting is lost, and a new worker starts new episodes."
        )
        self.ray.kill(self.actors[place])
        self.actors[place] = self._new_actor()
        self._wait_for_room([self.actors[place]])

    def _wait_for_room(self, actors: Sequence[Any]) -> None:
        """Wait until actors have their processes; what these then do may take longer."""
        refs = [actor.__ray_ready__.remote() for actor in actors]
        least, most = START_SECONDS
        limit = min(max(self.timeout, least), most)
        first = min(ROOM_SECONDS, limit)
        for seconds, waited in ((first, first), (limit - first, limit)):
            ready, late = self.ray.wait(refs, num_returns=len(refs), timeout=seconds)
            if not late:
                return
            found = f"{len(ready)} of {len(refs)} new Ray workers started within {waited:g} s."
            found = f"{found} {self.ray.room(self._options)}"
            if waited < limit:
                self.on_message(f"{found} Waiting for {limit - waited:.0f} s.")
        raise EnvError(f"{found} Use fewer workers, or give the cluster another host.")
