"""The whole decoding step, or a chunk of prefill, as one program a device with every collective written down.

MaxText's own partitioning leaves them to the compiler, which is right everywhere and fast nowhere near the machine's
limit. Here the same layers run inside one `jax.shard_map`, on the shapes of one device.
"""
