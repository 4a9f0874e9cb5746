"""Decisions about one application at one instant: replica counts of each role and group, and the replicas that serve.

Enters: snapshots (``autoscale.types``), configuration, nodes and their topology, and the wish of a policy of
``autoscale.policies``. Leaves: plans, and lines of the decision log. All but ``ray_policy_limit`` is pure: no clock, no
Ray, no file but the log that is replayed. Cooldowns, limits, budgets and placement are here and nowhere else.

A tick is one decision about one service; a cycle has one tick of each service of an application. ``controller`` does a
tick by stages, ``cycle`` does a cycle. A stage is a function that takes a ``Draft`` and nothing else, so it can be
tested alone. ``status`` has the messages between processes.

Terms:
    pool: replicas of one role in one group; KV moves only inside a group.
    lowest count: ``lowest_replicas`` of a pool; 0 lets its group sleep.
    room: free GPUs and CPUs of nodes, and GPUs that budgets leave. The class ``Room`` is about counts: the bounds of
        both roles, and their GPU budget.
    scarce: a node is scarcer if GPUs of several types are below its switch, since few switches have several. Replicas
        take the least scarce nodes (``SubgroupPriority`` in ``kvtransfer.topology``).
    leader, follower: a replica of the ratio's larger role (decode if both are equal), and one of the other role.
    unit: one leader, and the followers that the ratio requires with it.
    followed ratio: the P/D ratio of ``pd_ratio: auto``, which changes with the lengths of the requests.
    guard, gate: the guard limits the wanted counts; the gate chooses which ready replicas serve.
    floor: least counts of a service at a set time (``autoscale.floors``). prewarm: the time before it in which its
        replicas start.
    admitted: gets requests. warm: runs as a reserve without requests. held: runs without requests, since it is warm or
        the gate has not admitted it. (``held_replicas`` of a pool is another count: its replicas on nodes.)
    withdrawn: gets no more requests, but may return. victim: must stop.
    pending: wanted, but no group has room for it.
    hold: a tick ignores the policy's wish.
    overdue: a pool with replicas that have waited for a node for more than ``no_node_s``. stuck: such a replica, if the
        pool's lowest count requires it.
    claim: a demand of a more important service for the room of a less important one.
"""
