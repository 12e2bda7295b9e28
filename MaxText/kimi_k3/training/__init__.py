"""Training: what a step costs in arithmetic."""
