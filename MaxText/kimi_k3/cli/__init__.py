"""The verbs of `kimi-k3`."""
