"""A contract double of pypto_serving: the parts of its interface that our adapter uses, with its observable behaviour.

A real worker process computes a deterministic continuation, so results, deaths, hangs and errors can be tested without
upstream. Where upstream is present the same tests run against it, which is what keeps this double honest. Faults are
set by `DOUBLE_*` environment variables, read in the worker.
"""
