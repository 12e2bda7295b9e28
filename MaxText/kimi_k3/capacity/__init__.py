"""What a program takes on a TPU, read from the compiler on a machine without one, and what it must take."""
