"""Kimi K3 on MaxText. Importing this imports neither JAX nor MaxText, and changes nothing in anybody else."""
