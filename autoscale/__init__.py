"""How many replicas, where and when; and the reports that measure it (pure except files named ``ray_*``)."""
