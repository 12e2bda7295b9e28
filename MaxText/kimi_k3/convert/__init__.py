"""Released safetensors in, an Orbax checkpoint that MaxText loads out. Nothing here imports MaxText or the model."""
