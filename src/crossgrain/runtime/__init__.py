"""Facts about the process: settings, devices, ranks, random numbers, which pass is running; and patches of torch."""
