"""One episode of debug-gym, in debug-gym's own environment. Run as a file; imports nothing of ours.

It talks in lines of JSON with the process that started it, over its standard input and output:

    <- {"task": …, "data": …, "steps": …, "system_prompt": …, "run_timeout_s": …}    once
    -> {"ready": {…}}                        versions, and which data
    -> {"ask": {…}}                          the body of a chat completion, as debug-gym makes it
    <- {"answer": {…}} or {"stop": "why"}    the completion, or an end to the episode
    -> {"done": {…}} or {"failed": "why"}    how it ended

So this process needs no network, and has no key and no address that its shell could read.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import platform
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

STANDINS = (
    "anthropic",
    "azure",
    "datasets",
    "docker",
    "kubernetes",
    "prompt_toolkit",
    "swebench",
    "swesmith",
    "tiktoken",
    "transformers",
)
"""Imported by debug-gym for other models, terminals and benchmarks, and never called here."""

TOOLS = ("bash", "view", "pdb", "edit", "eval")
"""As in debug-gym's own configuration for these tasks."""

FILE_BYTES = 256 * 2**20
STREAM_BYTES = 500_000
"""Of what a command writes to one of its two outputs; of more, the beginning and the end."""
MESSAGE_CHARACTERS = 1_010_000
"""Of any tool's output: both of a command's, and what debug-gym says around them."""
AFTER_KILL_S = 5.0
READONLY = "*test*.py\n"
IGNORED = "__pycache__/\n.pytest_cache/\n.debugignore\n.debugreadonly\n"
DECIDING = (
    "test.py",
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
"""The tests, and what pytest reads beside them. A shell can change what `.debugreadonly` names."""


class Stop(Exception):
    """The other side ends the episode."""


class Wire:
    """Lines of JSON, on what standard input and output were at the start."""

    def __init__(self, inward: TextIO, outward: TextIO) -> None:
        self.inward, self.outward = inward, outward
        self.asked = False

    def get(self) -> dict[str, Any]:
        line = self.inward.readline()
        if not line:
            raise SystemExit(0)  # nobody is there any more
        return dict(json.loads(line))

    def put(self, kind: str, value: Any) -> None:
        self.asked = self.asked or kind == "ask"
        self.outward.write(json.dumps({kind: value}) + "\n")
        self.outward.flush()


def main() -> None:
    """Standard input and output are kept from what the tools run: a shell gets neither."""
    wire = Wire(os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    sys.meta_path.append(StandIns())
    job = wire.get()
    with tempfile.TemporaryDirectory(prefix="task-") as folder:
        try:
            episode(wire, job, Path(folder))
        except Stop as stop:
            wire.put("done", {"resolved": False, "reason": str(stop)})
        except Exception as trouble:
            kind = model_doing(trouble) if wire.asked else None
            if kind is not None:
                wire.put("done", {"resolved": False, "reason": f"{kind}: {trouble}"})
            else:
                wire.put("failed", f"{type(trouble).__name__}: {trouble}")


def model_doing(trouble: Exception) -> str | None:
    """What ends an episode in debug-gym by what the model wrote: a call that is no JSON, or code
    whose tests hang or print no result. None for other trouble."""
    if type(trouble).__name__ == "OpenAIResponseParsingError":
        return "answer"
    return "tests" if "from pytest output" in str(trouble) else None


def episode(wire: Wire, job: dict[str, Any], folder: Path) -> None:
    """Run the task until it is solved or its steps are up; tells how it ended."""
    import debug_gym  # type: ignore[import-not-found]
    from debug_gym.agents.froggy_agent import FroggyAgent  # type: ignore[import-not-found]
    from debug_gym.gym.envs.mini_nightmare import MiniNightmareEnv  # type: ignore[import-not-found]
    from debug_gym.gym.terminals.local import LocalTerminal  # type: ignore[import-not-found]
    from debug_gym.gym.tools.toolbox import Toolbox  # type: ignore[import-not-found]
    from debug_gym.logger import DebugGymLogger  # type: ignore[import-not-found]

    logger = DebugGymLogger("leyline", level="ERROR")
    source = Path(job["data"]) if job["data"] else wheel_data(debug_gym)
    codebase = prepared(source, job["task"], folder)
    tests = deciding(codebase)
    versions = {"debug_gym": version("debug-gym"), "python": platform.python_version()}
    wire.put("ready", {**versions, "digest": digest(codebase)})
    task = {"task_name": job["task"], "codebase": codebase, "env_type": "mini_nightmare"}
    LocalTerminal.run = run
    terminal = LocalTerminal(
        include_os_env_vars=False, env_vars=dict(os.environ), logger=logger, command_timeout=60
    )
    env = MiniNightmareEnv(task, terminal=terminal, run_timeout=job["run_timeout_s"], logger=logger)
    for name in TOOLS:
        env.add_tool(Toolbox.get_tool(name))
    settings = {"max_steps": job["steps"], "system_prompt": job["system_prompt"]}
    agent = FroggyAgent(agent_args=settings, llm=model_of(wire, logger), logger=logger)
    try:
        agent.run(env)
        passed = bool(env.resolved)
        same = deciding(Path(env.workspace.working_dir)) == tests
        wire.put(
            "done",
            {
                "resolved": passed and same,
                "reason": "steps" if not passed else "solved" if same else "tests changed",
                "score": env.score,
                "max_score": env.max_score,
            },
        )
    finally:
        env.close()


def model_of(wire: Wire, logger: Any) -> Any:
    """debug-gym's own OpenAI client in all but the last step: what it would send goes to the other
    side, whose answer is read as if it had come from the wire."""
    from debug_gym.llms.base import LLMConfig  # type: ignore[import-not-found]
    from debug_gym.llms.openai import OpenAILLM  # type: ignore[import-not-found]
    from openai import NotGiven
    from openai.types.chat import ChatCompletion

    class Piped(OpenAILLM):  # type: ignore[misc]
        def tokenize(self, messages: list[dict[str, Any]]) -> list[list[str]]:
            """Only to be far below the limit: debug-gym isn't to cut conversations by itself."""
            return [str(message.get("content")).split() for message in messages]

        def convert_observation_to_message(self, observation: str, *rest: Any, **more: Any) -> Any:
            return super().convert_observation_to_message(shortened(observation), *rest, **more)

        def need_to_be_retried(self, exception: Exception) -> bool:
            return False

        def _perform_chat_completion(self, **fields: Any) -> ChatCompletion:
            wire.put("ask", {k: v for k, v in fields.items() if not isinstance(v, NotGiven)})
            reply = wire.get()
            if "stop" in reply:
                raise Stop(reply["stop"])
            return ChatCompletion.model_validate(reply["answer"])

    config = LLMConfig(model="any", context_limit=10**6, api_key="none", endpoint="none")
    return Piped("any", llm_config=config, logger=logger)


def run(
    terminal: Any,
    entrypoint: str | list[str],
    timeout: float | None = None,
    raises: bool = False,
    strip_output: bool = True,
) -> tuple[bool, str]:
    """In place of `LocalTerminal.run`, which kills only the shell of a command that takes too long,
    and then waits for whatever else has its output open. Whether it went well, and what it printed.

    strip_output: debug-gym has it so for commands; without, it reads a file, which is not cut.
    """
    limit = terminal.command_timeout if timeout is None else timeout
    process = subprocess.Popen(
        terminal.prepare_command(entrypoint),
        env=terminal.env_vars,
        cwd=terminal.working_dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdout is not None and process.stderr is not None
    out, errors = Kept(), Kept()
    with process.stdout, process.stderr:
        pipes = {process.stdout.fileno(): out, process.stderr.fileno(): errors}
        ended = drain(pipes, process, limit)
        if not ended:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            drain(pipes, process, AFTER_KILL_S)
    output = out.text() + errors.text()
    if not ended:
        late = f"Command timed out after {limit} seconds"
        return False, f"{late}\nPartial output:\n{output.strip()}" if output.strip() else late
    if raises and process.returncode:
        raise ValueError(f"Failed to run command: {entrypoint}")
    if strip_output:
        output = output.strip("\r\n")
    elif out.left_out:
        return False, f"It is longer than {STREAM_BYTES:,} bytes"
    return process.returncode == 0, output


def drain(pipes: Mapping[int, Kept], process: subprocess.Popen[bytes], limit: float) -> bool:
    """Read until all pipes are closed and the process has ended; False where `limit` seconds are
    over before that."""
    end = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                return False
            for ready, _ in selector.select(left):
                if data := os.read(ready.fd, 65536):
                    pipes[ready.fd].take(data)
                else:
                    selector.unregister(ready.fd)
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


class Kept:
    """The beginning and the end of what comes; never more in memory than that."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self.left_out = 0

    def take(self, data: bytes) -> None:
        room = STREAM_BYTES // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        over = max(0, len(self._tail) - STREAM_BYTES // 2)
        del self._tail[:over]
        self.left_out += over

    def text(self) -> str:
        """With line ends as Python has them; what is no text is replaced."""
        between = f"\n[… {self.left_out:,} bytes left out …]\n".encode() if self.left_out else b""
        text = bytes(self._head + between + self._tail).decode(errors="replace")
        return text.replace("\r\n", "\n").replace("\r", "\n")


def shortened(text: str) -> str:
    """A tool's output as the model gets it."""
    over = len(text) - MESSAGE_CHARACTERS
    if over <= 0:
        return text
    half = MESSAGE_CHARACTERS // 2
    return f"{text[:half]}\n[… {over:,} characters left out …]\n{text[-half:]}"


def deciding(folder: Path) -> dict[str, bytes]:
    """What decides whether the program in a folder passes."""
    files = [folder / name for name in DECIDING]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def wheel_data(debug_gym: ModuleType) -> Path:
    """Where the wheel has its copy of the tasks."""
    assert debug_gym.__file__ is not None
    return Path(debug_gym.__file__).parent.parent / "data" / "mini_nightmare"


def prepared(source: Path, task: str, folder: Path) -> Path:
    """A whole copy of a task. The wheel's lacks files whose names don't end in .py: the lists of
    what is read-only and ignored, and what the patcher's tests read."""
    if not (source / task / "test.py").is_file():
        raise FileNotFoundError(f"{source}: no task {task!r}")
    target = folder / task
    shutil.copytree(source / task, target)
    for name, text in ((".debugreadonly", READONLY), (".debugignore", IGNORED)):
        if not (target / name).exists():
            (target / name).write_text(text)
    if task == "patcher" and not (target / "source_code.txt").exists():
        (target / "source_code.txt").write_text(patcher_text((target / "test.py").read_text()))
    return target


def patcher_text(tests: str) -> str:
    """The file that the patcher's tests read, from what they expect: the first replaces its lines
    from the fourth on, the second its first line."""
    texts = [
        node.value.value
        for node in ast.walk(ast.parse(tests))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "expected_output"
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    first, second = (text.split("\n") for text in texts if text.count("\n") > 1)
    return "\n".join(first[:3] + second[3:])


def digest(folder: Path) -> str:
    """Of a task's Python and text files: whether two runs had the same task."""
    sha = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".py", ".txt")):
        sha.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return sha.hexdigest()[:16]


class Anything(type):
    """Of classes that have any attribute, each another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (Exception,), {})


class StandIn(ModuleType):
    """A module from which anything can be imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (Exception,), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is listed in STANDINS where it is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in STANDINS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "__main__":
    main()
