"""Part of the contract double: see `pypto_serving/__init__.py` beside it."""
