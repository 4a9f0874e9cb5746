"""What the commands about single operators compute: answers to one question, figures, and settings for a config.

Enter: options, a model's config.json, tables of times, a trace or a load, and a Serve YAML. Leave: plans by each
planner (``answer``, ``trace``), documents and SVG figures, and settings that the simulator has judged
(``settings_result``). Printing, pages and options are in ``serve_app/cli``.
"""
