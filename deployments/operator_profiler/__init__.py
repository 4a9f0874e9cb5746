"""Times the operators of one decoder layer on this machine, with random weights, and writes tables of them.

Enter: an operator graph, a device (``cpu`` or ``cuda``), sizes, a budget in seconds. Leave: a folder with tables as
``autoscale/operators/tables.py`` reads them, the facts of the device, and all measured points, so that a run goes on
where it was interrupted. It needs torch and numpy, and nothing else that is not Python's own: a machine with a GPU may
have no more. Settings of a GPU are read and never changed.
"""
