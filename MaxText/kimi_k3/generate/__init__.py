"""Generation: sampling, lengths, the decode loop."""
