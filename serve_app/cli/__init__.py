"""The command ``tandem``: one file for each family of commands, and what they print.

Enter: arguments. Leave: text on the terminal, files that options name, an exit code.
"""
