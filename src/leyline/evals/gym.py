"""debug-gym in an environment of its own: one process an episode, spoken to in lines of JSON.

The process gets no key, no address and none of this one's environment variables; its home and its
temporary files are in a folder that goes with it. That is no sandbox: its shell runs as the same
user, unless it is started inside one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

CHILD = Path(__file__).with_name("gym_child.py")
ENVIRONMENT = Path(".venv-debug-gym")
VARIABLE = "LEYLINE_DEBUG_GYM"
"""Names debug-gym's Python where the environment is elsewhere."""

TASKS = (
    "config",
    "counter",
    "grader",
    "pandas_dataframe",
    "patcher",
    "purr",
    "scientific_calculator",
    "shopping_cart",
    "sum_tree",
    "tomorrow_date",
)
OFFLINE = tuple(task for task in TASKS if task != "pandas_dataframe")
"""The others fetch what they work on."""

_LAST = 2000
_KILL_S = 5.0


class GymError(RuntimeError):
    """debug-gym didn't get to the end of an episode, for no fault of the agent's."""


class TimeUp(GymError):
    """An episode took longer than it may."""


def find_python(given: Path | None = None) -> Path:
    """debug-gym's Python. Raises ValueError where there is none."""
    named = given or os.environ.get(VARIABLE)
    python = Path(named) if named else ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        how = "--python names one" if named is None else "that is no file"
        raise ValueError(
            f"debug-gym's environment is missing ({python}; {how}): `make env-debug-gym` makes it, "
            "with Python 3.12 or newer"
        )
    return python.absolute()


class Gym:
    """Starts episodes, and ends those that are left when it is closed.

    sandbox: words of a command that runs the command after it, `unshare -rn` say.
    """

    def __init__(self, python: Path, sandbox: Sequence[str] = ()) -> None:
        self.python = python
        self.sandbox = tuple(sandbox)
        self._lock = threading.Lock()
        self._live: set[Episode] = set()
        self._closed = False

    def __enter__(self) -> Gym:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill_all()

    def kill_all(self) -> None:
        """And start no more."""
        with self._lock:
            self._closed = True
            live = list(self._live)
        for episode in live:
            episode.kill()

    def start(self, job: dict[str, Any], limit_s: float) -> Episode:
        """A process that was told its job; see gym_child.py. limit_s: its life, at most."""
        with self._lock:
            if self._closed:
                raise GymError("the evaluation is ending")
            episode = Episode(self, limit_s)
            self._live.add(episode)
        try:
            episode.put(job)
        except BaseException:
            episode.close()
            raise
        return episode

    def ended(self, episode: Episode) -> None:
        with self._lock:
            self._live.discard(episode)


class Episode:
    """A running process. Close it; `with` does."""

    def __init__(self, gym: Gym, limit_s: float) -> None:
        self._gym, self._limit_s = gym, limit_s
        self._home = tempfile.TemporaryDirectory(prefix="debug-gym-", ignore_cleanup_errors=True)
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._late = threading.Event()
        words = [*gym.sandbox, str(gym.python), "-I", str(CHILD)]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                cwd=self._home.name,
                env=_environment(gym.python, self._home.name),
                start_new_session=True,
            )
        except OSError as trouble:
            self._errors.close()
            self._home.cleanup()
            raise ValueError(f"{words[0]}: can't be started: {trouble.strerror}") from trouble
        self._timer = threading.Timer(limit_s, self._time_up)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Episode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def put(self, message: dict[str, Any]) -> None:
        """Raises GymError where the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as trouble:
            raise self._gone() from trouble

    def get(self) -> tuple[str, Any]:
        """The next message's kind and value. Raises GymError where the process is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):  # killed in the middle of it, say
            raise self._gone()
        try:
            ((kind, value),) = json.loads(line).items()
        except (AttributeError, ValueError) as trouble:
            raise GymError(f"debug-gym's process said {line[:200]!r}, no message") from trouble
        return kind, value

    def kill(self) -> None:
        """The process and all it started: also what has a process group or session of its own, as
        debug-gym's commands and debuggers do. Those are found by their home, where there is /proc;
        not what was given another one."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        end = time.monotonic() + _KILL_S
        while (left := list(_at_home(self._home.name))) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        self._timer.cancel()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._home.cleanup()
        self._gym.ended(self)

    def _time_up(self) -> None:
        self._late.set()
        self.kill()

    def _gone(self) -> GymError:
        if self._late.is_set():
            return TimeUp(f"not done after {self._limit_s:g} s")
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-_LAST:].decode("utf-8", "replace").strip()
        return GymError(f"debug-gym's process ended with code {code}: {said or 'it said nothing'}")


def _at_home(home: str) -> Iterator[int]:
    """Processes that were started with this home and are not dead."""
    wanted = b"\0HOME=" + os.fsencode(home) + b"\0"
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in b"\0" + (folder / "environ").read_bytes():
                yield int(folder.name)


def _environment(python: Path, home: str) -> dict[str, str]:
    """All that the process, and so its shell, knows. With PIP_USER, pip installs nothing into the
    environment, which all episodes share: in a virtual one it refuses."""
    return {
        "PATH": os.pathsep.join((str(python.parent), "/usr/local/bin", "/usr/bin", "/bin")),
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PIP_USER": "1",
    }
