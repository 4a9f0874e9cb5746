"""The doors: Serve's import path, the SDK, the command line and the benchmark."""
