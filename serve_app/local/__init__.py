"""A Ray cluster of this process's own: its guardian, checks of the machine, shipped files, the tiny model.

Enter: nodes and variables. Leave: a cluster that ends with its owner, or one line that says what is missing.
"""
