"""Leyline as a plugin of SGLang: `--radix-cache-backend leyline`, no fork and no patched file.

plugin.py           what SGLang calls at start: the cache backend and all hooks
versions.py         the SGLang versions this was written for, and the names it relies on
refuse.py           what a server can't have together with Leyline
request.py          a request with a `leyline` object, on its way to the scheduler and back
carriers.py         the places in which the object comes
http.py             the same at the top level of OpenAI and Anthropic requests
count_tokens.py     the count of what `context_management` leaves
session_routes.py   sessions shown, dropped and edited while a tool runs
targets.py          what such an edit is to make of a session, as tokens
session_control.py  what the routes ask the scheduler
asgi.py             requests read, sent once more, refused
answers.py          the report, in OpenAI's and Anthropic's shapes
arrival.py          a request reaches the scheduler
sessions.py         sessions, their lineages, and which slots are theirs alone
turn.py             one request of a session: its plan, its key, how far it has come
cache.py            the radix cache: matching, keys, where rows enter a request
splice.py           rows moved or copied, turned, and freed
admission.py        prefill chunks that end where kept rows begin
rows.py             SGLang's KV pools as rows to copy and turn
rotary.py           what SGLang's model does to a key when its position moves
report.py           what became of a request, for its client and for metrics
cpu/                SGLang on a machine without a GPU
demo.py             `make sglang-demo`
bench/              `make sglang-bench`
"""
