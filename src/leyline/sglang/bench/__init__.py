"""Measurements of the plugin on real SGLang, on the CPU: `python -m leyline.sglang.bench`.

As in leyline.bench each module has a `run` that returns rows; all ratios are taken within one run.
"""
