"""The second shell: engines as models, driven by a virtual clock. It may import ``router``."""
