"""The embedded engine: Transformers runs the model, Leyline owns the rows.

slots.py       which rows are free
tree.py        which cached rows continue which tokens
planes.py      the rows themselves, one plane per layer and tensor
store.py       slots, tree, rows and lineages kept in step
request.py     what comes in, what goes out
splice.py      a request's plan, executed: share, move or copy, rotate
cache.py       Transformers' cache and attention over a request's rows
linear.py      linear layers for a handful of tokens on a CPU
sampler.py     logits to tokens
text.py        tokens to text, stop strings
running.py     a request from its arrival to its end
scheduler.py   which tokens go into the next forward pass
engine.py      the thread around it all, and what callers hold
"""
