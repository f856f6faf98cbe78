"""Compiled code of ours, in C++: its source lies here and is built on the machine that uses it."""
