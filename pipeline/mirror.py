"""What a run publishes in one dataset, carried into another: so that raw collectors follow a learner elsewhere."""

import logging
import threading

from pipeline.action_table import table_name
from pipeline.params import params_name
from pipeline.progress import progress_name
from pipeline.store import Store

MIRROR_SECONDS = 0.1
_NAMES = (params_name, table_name, progress_name)

_log = logging.getLogger(__name__)


class RunMirror:
    """Copies parameters, action table and progress of a run as they are replaced, from a thread of its own.

    The beat in the record is copied like the rest: a learner that has gone silent is silent on the other side, and so
    is one whose mirror has died. What cannot be read or written is said once and tried again.

    Attributes:
        run: whose; None mirrors nothing.
    """

    def __init__(self, source: Store, target: Store) -> None:
        self._source, self._target = source, target
        self._copied: dict[str, str] = {}
        self._is_failing = False
        self.run: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> "RunMirror":
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, after a last look. Closing twice is fine."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.copy_what_is_new()

    def copy_what_is_new(self) -> None:
        """One look at the run's objects; each appears on the other side whole or not at all."""
        if self.run is None:
            return
        for name in (name_of(self.run) for name_of in _NAMES):
            try:
                identity = self._source.identity(name)
                if identity is not None and identity != self._copied.get(name):
                    self._target.replace(name, self._source.get(name))
                    self._copied[name] = identity
            except OSError as error:
                if not self._is_failing:
                    _log.warning("%s cannot be mirrored: %s", name, error)
                self._is_failing = True
                return
        self._is_failing = False

    def _work(self) -> None:
        while not self._stop.wait(MIRROR_SECONDS):
            self.copy_what_is_new()
