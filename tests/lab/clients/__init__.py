"""Clients that other people wrote, unmodified, against a running Tandem (``make clients``).

In: ``stand``, the product, and packages that ``pins.toml`` lists. Each client has an environment of its own, and one
``*_checks`` module that runs inside it; such a module imports its client, ``checks`` and Python's own library only. It
prints one line of JSON per check. Out: a table on the terminal and in ``docs/clients.md``. ``make`` alone calls it.
"""
