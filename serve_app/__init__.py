"""The doors: Serve's import path, the SDK, the command line.

Enter: a YAML, arguments, a mapping. Leave: a bound application, printed answers, errors in one line.
"""
