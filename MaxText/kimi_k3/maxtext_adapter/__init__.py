"""The only package that imports MaxText. Importing it changes nothing; `register()` does."""

from kimi_k3.maxtext_adapter.register import register, register_engine

__all__ = ["register", "register_engine"]
