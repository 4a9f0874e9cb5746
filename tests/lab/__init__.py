"""The laboratory: what we run to know how good Tandem is; ``make`` calls it.

It may import the product and development dependencies, and read files of the checkout. No product file imports it.
Figures leave it as tables on the terminal and as JSON under ``reports/``.
"""
