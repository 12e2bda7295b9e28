"""Kimi Delta Attention: gate, short convolution, recurrence and its chunked form, and the layer of them."""
