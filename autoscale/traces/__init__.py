"""Traces of requests, read from files and logs, cut, scaled and synthesised (pure, but for loading and saving).

Enters: CSV files, JSON logs, descriptions of workloads. Leaves: TraceRequests in order of time. A trace is a list of
requests, each with its arrival, its lengths and, if they are known, the hashes of its prompt's blocks.
"""
