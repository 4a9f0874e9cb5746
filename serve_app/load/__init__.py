"""Load on an endpoint and its figures.

Enter: a URL and a trace. Leave: one record per request; samples of a metrics page.
"""
