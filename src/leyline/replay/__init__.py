"""Recorded agent sessions, replayed.

In this process:

turns.py    a session's calls as tokens
engine.py   both arms of the demo on an embedded engine

Against a server of the OpenAI API (`leyline replay`):

arms.py     what each arm sends
client.py   one streamed call, with times
server.py   what a server is and can
loop.py     the closed loop: so many sessions at once
ceiling.py  what a cache could hit at best
numbers.py  from calls to numbers
report.py   numbers as tables, JSON and Markdown
plots.py    and as pictures
run.py      all of it, in order
convert.py  logs of the OpenAI API into traces
"""

from leyline.replay.engine import Arm, ArmResult, TurnResult, replay
from leyline.replay.turns import Turn, encode, fitting, turns_of

__all__ = [
    "Arm",
    "ArmResult",
    "Turn",
    "TurnResult",
    "encode",
    "fitting",
    "replay",
    "turns_of",
]
