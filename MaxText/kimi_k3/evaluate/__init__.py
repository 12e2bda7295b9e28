"""Measuring a model: perplexity of a text, exact match of answers."""
