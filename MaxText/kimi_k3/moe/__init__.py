"""The router, the routed experts, and the LatentMoE layer."""
