"""What pytest loads beside vLLM's own tests: ``standing_server``. It imports nothing of ours.

In: URL of a server, in the environment. Out: the outcome of each test, as JSON.
"""
