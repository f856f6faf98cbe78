"""Facts of this process: device, seeds, allocator, signals, errors, run directory."""
