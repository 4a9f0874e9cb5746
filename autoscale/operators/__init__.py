"""The operators of a model: their shapes, their times on a GPU, and how many of them a load needs where (pure).

Enter: a model's config.json as a dict, measured tables, a GPU; a demand or a trace, and what planners assume. Leave:
times, memory and traffic of each operator (``OperatorCosts``), an ``EngineProfile`` from them alone, and plans
(``Plan``): replicas, batch and parallelism of each operator, and the GPUs that host them.
Files are read only by functions named ``load``.

Modules of plans in the order of reading: ``demand``, ``options`` and ``option_table`` (what may be chosen);
``queueing``, ``loads``, ``contention``, ``accounting`` and ``evaluation`` (what a choice gives); then the planners:
``model_level``, ``sizing`` and ``placement`` (the paper's, ``paper_greedy``), ``joint_sizing`` (``greedy``),
``search``, ``steady``, ``oracle``. ``over_time`` and ``throughput`` use them.

Modules of settings for engines: ``role_settings`` (sizes of steps), ``pair_search`` (sizes and counts of both roles) by
``pair_prediction``; ``overlap`` and ``expert_parallel``.
"""
