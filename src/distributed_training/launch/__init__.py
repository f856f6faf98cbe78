"""The same program on many processes and machines."""
