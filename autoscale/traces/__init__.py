"""Traces of requests, read from files and logs, cut, scaled and synthesised (pure, but for loading and saving).

Enters: CSV files, JSON logs, descriptions of workloads. Leaves: TraceRequests in order of time.
"""
