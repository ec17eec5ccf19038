"""`make sglang-demo`: real chat requests to a real server, in both arms."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from leyline.sglang import demo
from leyline.traces import Session

pytestmark = pytest.mark.sglang

OUTPUT = " ".join(f"row {i} of the table" for i in range(20))


def session() -> Session:
    """Four calls; from the fourth on, the oldest of three tool outputs is cleared."""
    turns = [{"role": "user", "content": "read the three files"}]
    for i in range(4):
        turns.append({"role": "assistant", "content": f"i am reading file {i}"})
        turns.append({"role": "tool", "content": f"{i} {OUTPUT}"})
    return Session("short", tuple(turns), ())


def test_the_policy_moves_rows(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both arms see the same prompts; with a session less of them is computed, by what moved."""
    monkeypatch.setenv("LEYLINE_CPU_FORK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Progress(disable=True) as bars:
        plain, leyline = demo.run(checkpoint("mla"), session(), 10, bars)
    assert [turn.prompt for turn in plain] == [turn.prompt for turn in leyline]
    assert len(plain) == 4 and plain[0].cached == 0
    assert [turn.moved > 0 for turn in leyline] == [False, False, False, True]
    assert leyline[3].cached >= plain[3].cached + leyline[3].moved - 1
    console = Console(width=100, record=True, file=StringIO())
    console.print(demo.table("tiny", session(), [plain, leyline]))
    text = console.export_text()
    assert f"{sum(turn.prompt for turn in plain):,}" in text and "of these moved" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--calls", "0"], "at least one"),
        (["--session", "nobody"], "no session 'nobody'; there are"),
    ],
)
def test_trouble_is_a_sentence(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main(args)
    assert says in f"{end.value} {capsys.readouterr().err}"
